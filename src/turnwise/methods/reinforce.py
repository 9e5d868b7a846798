"""REINFORCE with the batch as its baseline: two methods that differ in what they normalise over.

    rebn          A_jk = (G_jk - mean) / std    over all turns of the batch (return batch normalisation, GEM,
                                                arXiv:2510.01051); G_jk: discounted rewards from turn k on
    reinforce_pp  the same without a discount, over all trained tokens of the batch (REINFORCE++, arXiv:2501.03262)

Rewards of different tasks are compared with each other, so a group may be one attempt, and a task that always succeeds
still teaches. `group_baseline` first subtracts the group's mean from each turn's return. Returns include the rewards of
later turns. The batch is that of one optimizer step. In a mix of worlds, each world's part of the batch has its own
mean and deviation: rewards of different worlds are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from turnwise.credit.advantages import center_by_group, compare_by_turn, reward_to_go, whiten
from turnwise.credit.weights import Weighting, token_mean
from turnwise.methods.base import (
    PLAY_GROUPS,
    Credited,
    Kept,
    Lesson,
    MethodSetup,
    PlayGroups,
    Values,
    make_lessons,
    why_unusable,
)
from turnwise.methods.options import FreeLoss, Weighed
from turnwise.trajectory import TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinforce:
    """Returns from each turn on, whitened over the batch."""

    loss_fn: str
    loss_config: Mapping[str, float | str]
    counts_tokens: bool
    """Whether mean and deviation count every trained token; otherwise they count every turn."""
    weigh: Weighting = token_mean
    gamma: float = 1.0
    group_baseline: bool = False
    source: PlayGroups = PLAY_GROUPS
    needs_values: bool = False

    def keep(self, groups: Sequence[TrajectoryGroup]) -> Kept:
        reasons = [why_unusable(group, min_size=2 if self.group_baseline else 1) for group in groups]
        usable = [group for group, reason in zip(groups, reasons, strict=True) if reason is None]
        credited = self.advantages(usable) if usable else []
        worlds = {one.world for one, own in zip(usable, credited, strict=True) if any(a.any() for a in own)}
        reasons = [  # in the other worlds, all returns of the batch are the same
            reason or (None if group.world in worlds else "constant")
            for group, reason in zip(groups, reasons, strict=True)
        ]
        kept = tuple(group for group, reason in zip(groups, reasons, strict=True) if reason is None)
        return Kept(groups=kept, reasons=tuple(reasons))

    def lessons(self, groups: Sequence[TrajectoryGroup], values: Values | None = None) -> list[Lesson]:  # noqa: ARG002
        if not groups:
            return []
        credited: list[list[Credited]] = [
            [(t, a.tolist()) for t, a in zip(group.trajectories, own, strict=True)]
            for group, own in zip(groups, self.advantages(groups), strict=True)
        ]
        return make_lessons(credited, self.weigh)

    def advantages(self, groups: Sequence[TrajectoryGroup]) -> list[list[NDArray[np.float64]]]:
        """[K] per attempt, by group."""
        rest = {
            world: iter(self._advantages([group for group in groups if group.world == world]))
            for world in {group.world for group in groups}
        }
        return [next(rest[group.world]) for group in groups]

    def _advantages(self, groups: Sequence[TrajectoryGroup]) -> list[list[NDArray[np.float64]]]:
        """`advantages` of the groups of one world."""
        returns = [self._returns(group) for group in groups]
        turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
        counts = [len(turn.sampled_ids) * turn.is_trained if self.counts_tokens else 1 for turn in turns]
        rest = whiten(np.concatenate([to_go_K for own in returns for to_go_K in own]), counts_N=counts)
        found: list[list[NDArray[np.float64]]] = []
        for own in returns:
            found.append([])
            for to_go_K in own:
                found[-1].append(rest[: len(to_go_K)])
                rest = rest[len(to_go_K) :]
        return found

    def _returns(self, group: TrajectoryGroup) -> list[NDArray[np.float64]]:
        to_go = [reward_to_go([turn.reward for turn in t.turns], discount=self.gamma) for t in group.trajectories]
        return compare_by_turn(to_go, center_by_group) if self.group_baseline else to_go


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebn(Reinforce):
    """Return batch normalisation: mean and deviation over all turns."""

    class Options(FreeLoss, Weighed):
        """ReBN: discounted returns, normalised over all turns of the batch."""

        name: str = "rebn"
        gamma: float = Field(default=0.95, gt=0, le=1, description="Discount per turn, never per token.")

        @property
        def learns_from_one(self) -> bool:
            return True

        def build(self, setup: MethodSetup) -> Rebn:
            return Rebn(
                loss_fn=self.loss,
                loss_config=self.loss_config,
                counts_tokens=False,
                weigh=self.weighting(setup),
                gamma=self.gamma,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePp(Reinforce):
    """REINFORCE++: mean and deviation over all trained tokens."""

    class Options(FreeLoss, Weighed):
        """REINFORCE++: returns, normalised over all trained tokens of the batch."""

        name: str = "reinforce_pp"
        group_baseline: bool = Field(
            default=False, description="Subtract the group's mean before the batch is normalised."
        )

        @property
        def learns_from_one(self) -> bool:
            return not self.group_baseline

        def build(self, setup: MethodSetup) -> ReinforcePp:
            return ReinforcePp(
                loss_fn=self.loss,
                loss_config=self.loss_config,
                counts_tokens=True,
                weigh=self.weighting(setup),
                group_baseline=self.group_baseline,
            )
