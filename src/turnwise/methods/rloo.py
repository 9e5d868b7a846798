"""RLOO: plain REINFORCE, with the mean of the other attempts as the baseline (arXiv:2402.14740).

    A_j = R_j - mean of the others = G / (G - 1) * (R_j - mean)

The baseline of an attempt does not depend on the attempt itself, so the gradient is unbiased; tokens are summed, not
averaged (`seq_sum`), for the same reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from turnwise.credit.advantages import leave_one_out
from turnwise.credit.weights import Normalisation
from turnwise.methods.base import MethodSetup
from turnwise.methods.grpo import CreditedByTurn, GroupRelative
from turnwise.methods.options import FreeLoss, Weighed


@dataclass(frozen=True, slots=True, kw_only=True)
class Rloo(GroupRelative):
    """Group-relative advantages against the mean of the others."""

    class Options(CreditedByTurn, FreeLoss, Weighed):
        """RLOO: compare each attempt with the mean of the others."""

        name: str = "rloo"
        normalisation: Normalisation = Field(
            default="seq_sum", description=Weighed.model_fields["normalisation"].description
        )

        def build(self, setup: MethodSetup) -> Rloo:
            return Rloo(
                loss_fn=self.loss,
                loss_config=self.loss_config,
                compare=leave_one_out,
                weigh=self.weighting(setup),
                per_turn=self.credit == "reward_to_go",
                gamma=self.gamma,
            )
