"""GRPO: several attempts at a task; each is compared with the others (arXiv:2402.03300).

    trajectory      A_j  = R_j - mean(R)                       every turn of attempt j gets it
    reward_to_go    A_jk = G_jk - mean over i of G_ik          G_jk: rewards from turn k on; 0 once attempt i is over

The mean at turn k counts every attempt of the group, those that are over too. A mean over the ones still running would
make taking another turn cost something by itself. `advantage` may also divide by the group's deviation or leave the
attempt itself out of the mean. With one optimizer step per batch the loss is on-policy: its ratio is 1 but for
rounding, and `importance_sampling` is REINFORCE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from turnwise.credit.advantages import center_by_group, leave_one_out, normalise_by_group, reward_to_go
from turnwise.credit.datums import const, seq_mean, token_mean, trajectory_to_datums
from turnwise.methods.base import Kept, Lesson
from turnwise.trajectory import TrajectoryGroup
from turnwise.types import Datum

Comparison = Callable[[Sequence[float]], NDArray[np.float64]]
Weighting = Callable[[Sequence[Sequence[Datum]]], list[Datum]]

COMPARISONS: Mapping[str, Comparison] = {
    "centered": center_by_group,
    "normalized": normalise_by_group,
    "leave_one_out": leave_one_out,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grpo:
    """Group-relative advantages, with constant groups dropped and counted."""

    loss_fn: str
    loss_config: Mapping[str, float | str]
    compare: Comparison = center_by_group
    weigh: Weighting = token_mean
    per_turn: bool = False
    gamma: float = 1.0

    def keep(self, groups: Sequence[TrajectoryGroup]) -> Kept:
        reasons = tuple(self._why_dropped(group) for group in groups)
        kept = tuple(group for group, reason in zip(groups, reasons, strict=True) if reason is None)
        return Kept(groups=kept, reasons=reasons)

    def lessons(self, groups: Sequence[TrajectoryGroup]) -> list[Lesson]:
        credited = [
            (trajectory, tuple(float(a) for a in advantages_K))
            for group in groups
            for trajectory, advantages_K in zip(group.trajectories, self.advantages(group), strict=True)
        ]
        batch = [trajectory_to_datums(trajectory, advantages) for trajectory, advantages in credited]
        weighted = iter(self.weigh(batch))
        return [
            Lesson(trajectory=trajectory, advantages=advantages, datums=tuple(next(weighted) for _ in datums))
            for (trajectory, advantages), datums in zip(credited, batch, strict=True)
        ]

    def advantages(self, group: TrajectoryGroup) -> list[NDArray[np.float64]]:
        """[K] per attempt: one number per turn."""
        lengths = [len(trajectory.turns) for trajectory in group.trajectories]
        if not self.per_turn:
            return [np.full(n, a) for n, a in zip(lengths, self.compare(group.rewards), strict=True)]
        to_go_GK = np.zeros((len(lengths), max(lengths)))
        for row_K, trajectory in zip(to_go_GK, group.trajectories, strict=True):
            row_K[: len(trajectory.turns)] = reward_to_go([t.reward for t in trajectory.turns], discount=self.gamma)
        compared_GK = np.stack([self.compare(column_G.tolist()) for column_G in to_go_GK.T], axis=1)
        return [row_K[:n] for row_K, n in zip(compared_GK, lengths, strict=True)]

    def _why_dropped(self, group: TrajectoryGroup) -> str | None:
        if len(group.trajectories) < 2:
            return "too_small"
        if not any(turn.is_trained for trajectory in group.trajectories for turn in trajectory.turns):
            return "masked"
        if not any(advantages_K.any() for advantages_K in self.advantages(group)):
            return "constant"
        return None


def weighting(name: str, *, max_tokens: int) -> Weighting:
    """How trained tokens share an optimizer step; `max_tokens` is the most that an attempt may sample, for `const`."""
    known: Mapping[str, Weighting] = {
        "token_mean": token_mean,
        "seq_mean": seq_mean,
        "const": partial(const, max_tokens=max_tokens),
    }
    return known[name]
