"""RFT: rejection-sampling fine-tuning. Play, keep what succeeded, imitate it.

    L = - sum over the sampled tokens of successful attempts of weight * log p

This equals REINFORCE with advantages 1 and 0 and no baseline: nothing is unlearned, and a task that always succeeds
still counts as much as a hard one. The ids that were sampled are the ids that are trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import Field

from turnwise.credit.weights import Weighting, token_mean
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
from turnwise.methods.options import Weighed
from turnwise.trajectory import Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Rft:
    """Cross-entropy on the attempts that were good enough."""

    class Options(Weighed):
        """RFT: imitate the attempts that succeeded."""

        name: str = "rft"
        threshold: float | None = Field(
            default=None, description="Keep attempts with more reward than this; null keeps successes."
        )

        default_loss = "cross_entropy"

        @property
        def learns_from_one(self) -> bool:
            return True

        def build(self, setup: MethodSetup) -> Rft:
            return Rft(threshold=self.threshold, weigh=self.weighting(setup))

        @property
        def judges_success(self) -> bool:
            return self.threshold is None

        def why_not_potential(self) -> str | None:
            return "holds returns against a bound, and potentials lower them by phi(s_0)"

    threshold: float | None = None
    """Keep rewards above this. None keeps what the env calls a success, or any reward above 0 if it never says."""
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
