"""GRPO: several attempts at a task; each is compared with the others (arXiv:2402.03300).

    trajectory      A_j  = R_j - mean(R)                       every turn of attempt j gets it
    reward_to_go    A_jk = G_jk - mean over i of G_ik          G_jk: rewards from turn k on; 0 once attempt i is over

The mean at turn k counts every attempt of the group, also those that are over. If it counted only the running ones,
taking another turn would cost something by itself. `advantage` may also divide by the group's deviation or its mean, or
leave the attempt itself out of the mean. With one optimizer step per batch the loss is on-policy: its ratio is 1 except
for rounding, and `importance_sampling` is REINFORCE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from turnwise.credit.advantages import (
    center_by_group,
    compare_by_turn,
    divide_by_mean,
    leave_one_out,
    normalise_by_group,
    reward_to_go,
)
from turnwise.credit.weights import Weighting, token_mean
from turnwise.methods.base import (
    PLAY_GROUPS,
    Kept,
    Lesson,
    MethodSetup,
    PlayGroups,
    Values,
    credit_groups,
    keep_by,
    make_lessons,
    why_no_signal,
)
from turnwise.methods.options import FreeLoss, MethodOptions, Weighed
from turnwise.trajectory import TrajectoryGroup

Comparison = Callable[[Sequence[float]], NDArray[np.float64]]

COMPARISONS: Mapping[str, Comparison] = {
    "centered": center_by_group,
    "normalized": normalise_by_group,
    "leave_one_out": leave_one_out,
    "max_rl": divide_by_mean,
}


class Compared(MethodOptions):
    """A method that compares the returns of a group."""

    advantage: Literal["centered", "normalized", "leave_one_out", "max_rl"] = Field(
        default="centered",
        description="How to compute the advantage: return minus the group's mean (centered), also divided by "
        "the group's deviation (normalized) or by its mean (max_rl), or return minus the mean of "
        "the others (leave_one_out).",
    )

    @property
    def compare(self) -> Comparison:
        return COMPARISONS[self.advantage]

    def why_not_potential(self) -> str | None:
        if self.advantage == "max_rl":
            return "(advantage: max_rl) divides by the mean return, which potentials lower by phi(s_0)"
        return super().why_not_potential()


class CreditedByTurn(MethodOptions):
    """A method that can credit each turn with what came after it."""

    credit: Literal["trajectory", "reward_to_go"] = Field(
        default="trajectory",
        description="Give all turns of an attempt one advantage, or credit each turn with the rewards from "
        "that turn on.",
    )
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount per turn, never per token.")

    @model_validator(mode="after")
    def _discount_is_read(self) -> Self:
        if self.gamma != 1 and self.credit != "reward_to_go":
            raise ValueError(f"gamma={self.gamma} is not read by credit={self.credit}; set credit: reward_to_go")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRelative:
    """Compare each attempt with the others of its group; groups in which nothing differs are dropped and counted."""

    loss_fn: str
    loss_config: Mapping[str, float | str]
    compare: Comparison = center_by_group
    weigh: Weighting = token_mean
    per_turn: bool = False
    gamma: float = 1.0
    is_split: bool = False
    """Whether each turn has its own datum, for a loss with one ratio per datum."""
    source: PlayGroups = PLAY_GROUPS
    needs_values: bool = False

    def keep(self, groups: Sequence[TrajectoryGroup]) -> Kept:
        return keep_by(lambda group: why_no_signal(group, self.advantages), groups)

    def lessons(self, groups: Sequence[TrajectoryGroup], values: Values | None = None) -> list[Lesson]:  # noqa: ARG002
        return make_lessons(credit_groups(groups, self.advantages), self.weigh, is_split=self.is_split)

    def advantages(self, group: TrajectoryGroup) -> list[NDArray[np.float64]]:
        """[K] per attempt: one number per turn."""
        lengths = [len(trajectory.turns) for trajectory in group.trajectories]
        if not self.per_turn:
            return [np.full(n, a) for n, a in zip(lengths, self.compare(group.rewards), strict=True)]
        to_go = [reward_to_go([t.reward for t in one.turns], discount=self.gamma) for one in group.trajectories]
        return compare_by_turn(to_go, self.compare)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grpo(GroupRelative):
    """Group-relative advantages with any loss."""

    class Options(Compared, CreditedByTurn, FreeLoss, Weighed):
        """GRPO: compare the attempts at a task."""

        name: str = "grpo"

        def build(self, setup: MethodSetup) -> Grpo:
            return Grpo(
                loss_fn=self.loss,
                loss_config=self.loss_config,
                compare=self.compare,
                weigh=self.weighting(setup),
                per_turn=self.credit == "reward_to_go",
                gamma=self.gamma,
            )
