"""What the training loop asks of a run's opponents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from turnwise.client.base import TrainingClient
from turnwise.client.publish import VersionedSampler
from turnwise.envs.base import World
from turnwise.opponents.pool import PoolState
from turnwise.trajectory import TrajectoryGroup


class RunOpponents(Protocol):
    """Everybody who plays the other seat in a run (`training.opponents.Opponents`)."""

    def panel_worlds(self) -> dict[str, World]:
        """The worlds of an evaluation, by opponent."""
        ...

    def follow(self, sampler: VersionedSampler) -> None:
        """Take the policy's newest weights."""
        ...

    def count(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Take the games of a step into the ratings; the metrics of the step, by opponent."""
        ...

    async def before_first_step(self, trainer: TrainingClient) -> None:
        """Let the policy that training begins with join a pool."""
        ...

    async def after_step(self, trainer: TrainingClient, step: int) -> None:
        """Let a snapshot of the policy join, if it is time."""
        ...

    def let_go(self, kept: Sequence[PoolState]) -> list[str]:
        """The paths of snapshots whose files nobody needs: neither the pool nor these states of checkpoints."""
        ...

    def to_state(self) -> PoolState | None:
        """What a checkpoint keeps."""
        ...
