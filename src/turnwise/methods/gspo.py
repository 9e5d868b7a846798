"""GSPO: GRPO's advantages, with one ratio per sequence instead of one per token (arXiv:2507.18071).

    s = exp( mean over the trained tokens of a sequence of log p - log q )
    L = - sum of weight * min(s A, clip(s) A),  with p's own gradient at each token

A sequence is an attempt, or, with `sequence: turn`, each of its turns. Where a chat format rewrites history, an attempt
becomes several datums, and each of them has a ratio of its own. The bounds are narrow, because a mean over many tokens
moves little; every attempt weighs the same (`seq_mean`).
"""

from __future__ import annotations

import dataclasses

from turnwise.methods.base import MethodSetup
from turnwise.methods.grpo import Grpo, make_grpo


def make_gspo(setup: MethodSetup) -> Grpo:
    return dataclasses.replace(make_grpo(setup), is_split=setup.config.chosen("sequence") == "turn")
