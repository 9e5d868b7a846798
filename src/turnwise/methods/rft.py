"""RFT: rejection-sampling fine-tuning. Play, keep what succeeded, imitate it.

    L = - sum over the sampled tokens of successful attempts of weight * log p

The same as REINFORCE with advantages 1 and 0 and no baseline: nothing is unlearned, and a task that always succeeds
still weighs as much as a hard one. The ids that were sampled are the ids that are trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from turnwise.credit.weights import Weighting, token_mean, weighting
from turnwise.methods.base import (
    PLAY_GROUPS,
    Credited,
    Kept,
    Lesson,
    MethodSetup,
    PlayGroups,
    Values,
    keep_by,
    make_lessons,
    why_unusable,
)
from turnwise.trajectory import Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Rft:
    """Cross-entropy on the attempts that were good enough."""

    threshold: float | None = None
    """Of the reward; None: what the env calls a success, or any reward above 0 where it never says."""
    weigh: Weighting = token_mean
    loss_fn: str = "cross_entropy"
    loss_config: Mapping[str, float | str] = field(default_factory=dict[str, float | str])
    source: PlayGroups = PLAY_GROUPS
    needs_values: bool = False

    def keep(self, groups: Sequence[TrajectoryGroup]) -> Kept:
        return keep_by(self._why_dropped, groups)

    def lessons(self, groups: Sequence[TrajectoryGroup], values: Values | None = None) -> list[Lesson]:  # noqa: ARG002
        credited: list[list[Credited]] = [
            [(t, [1.0] * len(t.turns)) for t in group.trajectories if self.is_good(t)] for group in groups
        ]
        return make_lessons(credited, self.weigh)

    def is_good(self, trajectory: Trajectory) -> bool:
        if self.threshold is not None:
            return trajectory.total_reward > self.threshold
        return trajectory.total_reward > 0 if trajectory.is_success is None else trajectory.is_success

    def _why_dropped(self, group: TrajectoryGroup) -> str | None:
        unusable = why_unusable(group, min_size=1)
        if unusable is not None:
            return unusable
        return None if any(self.is_good(trajectory) for trajectory in group.trajectories) else "no_success"


def make_rft(setup: MethodSetup) -> Rft:
    config = setup.config
    return Rft(
        threshold=config.chosen("threshold"),
        weigh=weighting(config.chosen("normalisation"), max_tokens=setup.max_tokens),
    )
