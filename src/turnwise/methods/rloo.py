"""RLOO: plain REINFORCE, with the mean of the other attempts as the baseline (arXiv:2402.14740).

    A_j = R_j - mean of the others = G / (G - 1) * (R_j - mean)

The baseline of an attempt does not depend on the attempt itself, so the gradient is unbiased; tokens are summed, not
averaged (`seq_sum`), for the same reason.
"""

from __future__ import annotations

from turnwise.credit.advantages import leave_one_out
from turnwise.credit.weights import weighting
from turnwise.methods.base import MethodSetup
from turnwise.methods.grpo import Grpo


def make_rloo(setup: MethodSetup) -> Grpo:
    config = setup.config
    return Grpo(
        loss_fn=config.loss,
        loss_config=config.loss_config,
        compare=leave_one_out,
        weigh=weighting(config.chosen("normalisation"), max_tokens=setup.max_tokens),
        per_turn=config.chosen("credit") == "reward_to_go",
        gamma=config.chosen("gamma"),
    )
