"""N attempts at each task -> groups, side by side.

Attempts of all groups share one bound on how many run at once. A failed attempt is played again in a fresh env; one
that stays failed is set apart and never scored, so the baseline of its siblings is made from attempts that were really
judged. A group with too few of them is dropped. Everything that is dropped is counted.

Seeds come from (run seed, task, attempt, try) by hash: what an attempt draws does not depend on what runs beside it.
The env's seed comes from (run seed, task) alone (`same_start`): a group starts in one world, tried again or not, so a
difference in luck is no difference between its attempts.
Nothing outlives a call: cancelling it cancels the attempts, and they close their envs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Literal

from turnwise.client.base import SamplingClient
from turnwise.envs.base import Task, World
from turnwise.renderers.base import Renderer
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.play import Attempt, play
from turnwise.rollout.quarantine import Quarantine
from turnwise.rollout.seeds import derive_seed, world_seed
from turnwise.rollout.stats import RolloutStats
from turnwise.trajectory import Branch, Trajectory, TrajectoryGroup

DropReason = Literal["group_too_small", "quarantined", "ended_before_branch"]
EventKind = Literal["attempt_done", "attempt_retried", "attempt_failed", "group_done", "group_dropped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEvent:
    """Something that a live view may want to show."""

    kind: EventKind
    task_id: str
    trajectory: Trajectory | None = None
    """Of the attempt events."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedGroup:
    """A group that is not trained on, and why."""

    task_id: str
    why: DropReason
    detail: str
    trajectories: tuple[Trajectory, ...] = ()
    """Attempts that were fine, but too few."""
    failed: tuple[Trajectory, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """What one rollout brought, in the order of its tasks."""

    groups: tuple[TrajectoryGroup, ...]
    dropped: tuple[DroppedGroup, ...]
    stats: RolloutStats


OnEvent = Callable[[RolloutEvent], None]
TryAttempt = Callable[[int, int], Awaitable[Trajectory]]
"""(index in the group, how often it was tried before) -> one try."""


async def play_groups(
    world: World,
    tasks: Sequence[Task],
    sampler: SamplingClient,
    renderer: Renderer,
    config: RolloutConfig,
    *,
    seed: int,
    on_event: OnEvent | None = None,
    quarantine: Quarantine | None = None,
) -> RolloutResult:
    """Play `config.group_size` attempts at each task.

    Args:
        seed: of this rollout; a run that plays a task again gives another one.
        on_event: called on the event loop as things happen.
        quarantine: kept by a run over all its rollouts; without it, this call has one of its own.
    """
    return await Rollout(world, sampler, renderer, config, seed, on_event, quarantine).play(tasks)


async def stream_groups(
    world: World,
    tasks: Sequence[Task],
    sampler: SamplingClient,
    renderer: Renderer,
    config: RolloutConfig,
    *,
    seed: int,
    on_event: OnEvent | None = None,
    quarantine: Quarantine | None = None,
    stats: RolloutStats | None = None,
) -> AsyncGenerator[TrajectoryGroup | DroppedGroup, None]:
    """`play_groups`, each group as soon as it is done. Leave it early with `contextlib.aclosing`.

    Args:
        stats: filled while the groups come.
    """
    rollout = Rollout(world, sampler, renderer, config, seed, on_event, quarantine)
    if stats is not None:
        rollout.stats = stats
    async with aclosing(rollout.run(tasks)) as finished:
        async for _, outcome in finished:
            yield outcome


class Rollout:
    """One call of `play_groups` or `stream_groups`; `rollout.branch` plays its groups in another way."""

    def __init__(
        self,
        world: World,
        sampler: SamplingClient,
        renderer: Renderer,
        config: RolloutConfig,
        seed: int,
        on_event: OnEvent | None,
        quarantine: Quarantine | None,
    ) -> None:
        self.world = world
        self.pick_sampler: Callable[[], SamplingClient] = lambda: sampler
        """Asked at the start of every attempt."""
        self.renderer = renderer
        self.config = config.for_world(world)
        self._seed = seed
        self._on_event = on_event
        self.quarantine = quarantine or Quarantine(
            task_after=config.quarantine_task_after, world_after=config.quarantine_world_after
        )
        self.room: AbstractAsyncContextManager[None] = asyncio.Semaphore(config.max_concurrency)
        """Entered by every attempt while it is played."""
        self.stats = RolloutStats()

    @property
    def sampler(self) -> SamplingClient:
        """For an attempt that starts now."""
        return self.pick_sampler()

    def result(self, outcomes: Sequence[TrajectoryGroup | DroppedGroup]) -> RolloutResult:
        return RolloutResult(
            groups=tuple(outcome for outcome in outcomes if isinstance(outcome, TrajectoryGroup)),
            dropped=tuple(outcome for outcome in outcomes if isinstance(outcome, DroppedGroup)),
            stats=self.stats,
        )

    async def play(self, tasks: Sequence[Task]) -> RolloutResult:
        """All groups, in the order of their tasks."""
        async with aclosing(self.run(tasks)) as finished:
            outcomes = {index: outcome async for index, outcome in finished}
        return self.result([outcomes[index] for index in range(len(tasks))])

    async def run(self, tasks: Sequence[Task]) -> AsyncGenerator[tuple[int, TrajectoryGroup | DroppedGroup], None]:
        times_seen: Counter[str] = Counter()
        running: dict[asyncio.Task[TrajectoryGroup | DroppedGroup], int] = {}
        for index, task in enumerate(tasks):
            # A task that comes twice in one rollout gets attempts of its own each time.
            seed = derive_seed(self._seed, task.id, times_seen[task.id])
            times_seen[task.id] += 1
            running[asyncio.create_task(self.play_group(task, seed))] = index
        try:
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for group in done:
                    outcome = group.result()
                    yield running.pop(group), outcome
        finally:
            await cancel_all(list(running))

    async def play_group(self, task: Task, seed: int) -> TrajectoryGroup | DroppedGroup:
        reason = self.quarantine.reason(task.id)
        if reason is not None:
            return self.drop(task, "quarantined", reason, lost=self.config.group_size)
        return self.finish_group(task, await self.play_all(partial(self._try_attempt, task, seed), task))

    async def play_all(self, attempt: TryAttempt, task: Task) -> list[Trajectory]:
        """The attempts of a group side by side, each tried again while it fails and may be."""
        attempts = [asyncio.create_task(self._play_attempt(attempt, task, i)) for i in range(self.config.group_size)]
        try:
            return await asyncio.gather(*attempts)
        finally:
            await cancel_all(attempts)

    async def _play_attempt(self, attempt: TryAttempt, task: Task, index: int) -> Trajectory:
        retry = 0
        while True:
            async with self.room:
                trajectory = await attempt(index, retry)
            self.stats.add_try(trajectory)
            self.quarantine.record_try(trajectory.failure)
            if trajectory.failure is None:
                self.emit("attempt_done", task, trajectory)
            if trajectory.failure is None or not self.goes_on_after(task, trajectory, retry):
                return trajectory
            retry += 1

    async def _try_attempt(self, task: Task, group_seed: int, index: int, retry: int) -> Trajectory:
        seed = derive_seed(group_seed, index, retry)
        env_seed = world_seed(group_seed) if self.config.same_start else seed
        attempt = Attempt(
            task_id=task.id,
            index=index,
            seed=env_seed,
            make_env=lambda: self.world.make_env(task, env_seed),
            branch=Branch(turn=0, seed=seed) if self.config.same_start else None,
        )
        return await play(attempt, self.sampler, self.renderer, self.config, self.stats)

    def finish_group(
        self,
        task: Task,
        trajectories: Sequence[Trajectory],
        *,
        branch_turn: int | None = None,
        branch_probability: float = 1.0,
    ) -> TrajectoryGroup | DroppedGroup:
        """Set failed attempts apart; too few others are no group."""
        kept = tuple(trajectory for trajectory in trajectories if trajectory.failure is None)
        failed = tuple(trajectory for trajectory in trajectories if trajectory.failure is not None)
        failures = [trajectory.failure for trajectory in failed if trajectory.failure is not None]
        if self.quarantine.record_group(task.id, failures, len(kept)):
            self.stats.add_quarantined_task()
        if len(kept) < self.config.smallest_group:
            detail = f"{len(kept)} of {len(trajectories)} attempts are left, {self.config.smallest_group} are needed"
            return self.drop(task, "group_too_small", detail, lost=len(kept), kept=kept, failed=failed)
        self.stats.add_kept_group(kept, failed)
        self.emit("group_done", task)
        return TrajectoryGroup(
            task_id=task.id,
            trajectories=kept,
            failed=failed,
            branch_turn=branch_turn,
            branch_probability=branch_probability,
        )

    def goes_on_after(self, task: Task, failed: Trajectory, retry: int) -> bool:
        """An attempt failed: whether it is played again."""
        assert failed.failure is not None
        if retry == self.config.max_retries or self.quarantine.reason(task.id) is not None:
            self.emit("attempt_failed", task, failed, failed.failure.detail)
            return False
        self.emit("attempt_retried", task, failed, failed.failure.detail)
        self.stats.add_retry()
        return True

    def drop(
        self,
        task: Task,
        why: DropReason,
        detail: str,
        *,
        lost: int,
        kept: tuple[Trajectory, ...] = (),
        failed: tuple[Trajectory, ...] = (),
    ) -> DroppedGroup:
        self.stats.add_dropped_group(why, lost, failed)
        self.emit("group_dropped", task, detail=detail)
        return DroppedGroup(task_id=task.id, why=why, detail=detail, trajectories=kept, failed=failed)

    def emit(self, kind: EventKind, task: Task, trajectory: Trajectory | None = None, detail: str = "") -> None:
        if self._on_event is not None:
            self._on_event(RolloutEvent(kind=kind, task_id=task.id, trajectory=trajectory, detail=detail))


async def cancel_all(tasks: Sequence[asyncio.Task[object]]) -> None:
    """Cancel what still runs, and wait until it has cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
