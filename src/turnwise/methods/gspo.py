"""GSPO: GRPO's advantages, with one ratio per sequence instead of one per token (arXiv:2507.18071).

    s = exp( mean over the trained tokens of a sequence of log p - log q )
    L = - sum of weight * min(s A, clip(s) A),  with p's own gradient at each token

A sequence is an attempt, or, with `sequence: turn`, each of its turns. An attempt that starts over (an agent rewrites
its history, a chat format drops thoughts) is one sequence for each stretch of turns whose prompts extend each other: a
ratio belongs to the tokens of one context, and the stretches are separate datums. The bounds are narrow, because a mean
over many tokens moves little; every attempt weighs the same (`seq_mean`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from turnwise.credit.weights import Normalisation
from turnwise.losses.table import GspoOptions
from turnwise.methods.base import MethodSetup
from turnwise.methods.grpo import Compared, CreditedByTurn, GroupRelative
from turnwise.methods.options import PolicyTerms, Weighed


@dataclass(frozen=True, slots=True, kw_only=True)
class Gspo(GroupRelative):
    """Group-relative advantages, with one ratio per sequence."""

    # A method offers fewer values of `kl_estimator` and more of `correction` than the loss.
    class Options(  # pyright: ignore[reportIncompatibleVariableOverride]
        Compared, CreditedByTurn, PolicyTerms, GspoOptions, Weighed
    ):
        """GSPO: one ratio for a whole attempt, or for each of its turns."""

        name: str = "gspo"
        normalisation: Normalisation = Field(
            default="seq_mean", description=Weighed.model_fields["normalisation"].description
        )
        sequence: Literal["trajectory", "turn"] = Field(
            default="trajectory", description="What one ratio covers: the whole attempt or each turn."
        )

        default_loss = "gspo"

        def why_not_memory(self) -> str | None:
            if self.sequence == "turn":
                return None
            return "has one ratio for a whole attempt, which memory cuts into several datums; set method.sequence=turn"

        def build(self, setup: MethodSetup) -> Gspo:
            return Gspo(  # as in grpo, and spelled out: each method's file shows all that the method uses
                loss_fn=self.loss,
                loss_config=self.loss_config,
                compare=self.compare,
                weigh=self.weighting(setup),
                per_turn=self.credit == "reward_to_go",
                gamma=self.gamma,
                is_split=self.sequence == "turn",
            )
