"""Plays several attempts at each task, side by side, and makes groups of them.

    rollout = Rollout(world, sampler, renderer, config)
    result = await rollout.play(tasks, seed=step)       # or: async for group in rollout.stream(tasks, seed=step)

The attempts of all groups share one bound on how many run at once. A failed attempt is played again in a fresh env. An
attempt that stays failed is set apart and never scored, so the baseline of its siblings is made only from attempts that
were judged. A group with too few attempts left is dropped. Everything that is dropped is counted.

Seeds come by hash from (run seed, task, attempt, try), so what an attempt draws does not depend on what runs beside it.
With `same_start` the env's seed comes from (run seed, task) alone: all attempts of a group start in the same world,
retries included, so they differ only by what the policy said.
Nothing outlives a call: if you cancel it, it cancels the attempts, and they close their envs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypedDict

from turnwise.client.base import SamplingClient
from turnwise.envs.base import Task, World
from turnwise.envs.joint import labels_of
from turnwise.errors import Party
from turnwise.renderers.base import Renderer
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.play import Attempt, play
from turnwise.rollout.seeds import derive_seed, world_seed
from turnwise.rollout.stats import RolloutStats
from turnwise.trajectory import Branch, Failure, Trajectory, TrajectoryGroup

DropReason = Literal["group_too_small", "quarantined", "ended_before_branch"]
EventKind = Literal["attempt_done", "attempt_retried", "attempt_failed", "group_done", "group_dropped"]
QUARANTINE_PARTIES = (Party.ENV, Party.TOOL, Party.JUDGE, Party.REWARD, Party.CONTEXT)
"""Only their failures count against a task: a sampler or an opponent that is down says nothing about it."""
WORLD_PARTIES = (*QUARANTINE_PARTIES, Party.OPPONENT)
"""A world is given up after many tries in a row, over all tasks, that one of these parties failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEvent:
    """Something that a live view may want to show."""

    kind: EventKind
    task_id: str
    trajectory: Trajectory | None = None
    """The attempt that an attempt event is about; None for group events."""
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

    @classmethod
    def of(cls, outcomes: Sequence[TrajectoryGroup | DroppedGroup | None], stats: RolloutStats) -> RolloutResult:
        """Sort outcomes into kept and dropped groups."""
        return cls(
            groups=tuple(outcome for outcome in outcomes if isinstance(outcome, TrajectoryGroup)),
            dropped=tuple(outcome for outcome in outcomes if isinstance(outcome, DroppedGroup)),
            stats=stats,
        )


OnEvent = Callable[[RolloutEvent], None]
TryAttempt = Callable[[int, int], Awaitable[Trajectory]]
"""(index in the group, number of earlier tries) -> one try."""


async def play_groups(
    world: World,
    tasks: Sequence[Task],
    sampler: SamplingClient,
    renderer: Renderer,
    config: RolloutConfig,
    *,
    seed: int,
) -> RolloutResult:
    """Play `config.group_size` attempts at each task: a `Rollout` for one call.

    Args:
        seed: Seeds this rollout; give another one when you play the same tasks again.
    """
    return await Rollout(world, sampler, renderer, config).play(tasks, seed=seed)


class QuarantineState(TypedDict):
    """What a `Quarantine` has counted, ready for JSON."""

    lost_groups: dict[str, int]
    failed_tries: int
    tasks: dict[str, str]
    world: str | None


class Quarantine:
    """Counts failures in a row, by task and over the whole world, and says what must not be played any more.

    A task is quarantined when `task_after` of its groups in a row end without a single attempt left. The whole world is
    closed when `world_after` tries in a row fail, whatever their tasks. One `Quarantine` lives as long as a run.
    """

    def __init__(self, *, task_after: int = 2, world_after: int = 200) -> None:
        self._task_after = task_after
        self._world_after = world_after
        self._num_lost_groups: dict[str, int] = {}
        self._num_failed_tries = 0
        self._tasks: dict[str, str] = {}
        self._world: str | None = None

    @property
    def tasks(self) -> Mapping[str, str]:
        """Quarantined tasks, each with its last failure."""
        return self._tasks

    @property
    def world(self) -> str | None:
        """The failure that closed the whole world; None while it is open."""
        return self._world

    def to_state(self) -> QuarantineState:
        """Everything that it has counted; `restore` goes on from it."""
        return QuarantineState(
            lost_groups=dict(self._num_lost_groups),
            failed_tries=self._num_failed_tries,
            tasks=dict(self._tasks),
            world=self._world,
        )

    def restore(self, state: QuarantineState) -> None:
        """Go on from what another quarantine had counted."""
        self._num_lost_groups, self._num_failed_tries = dict(state["lost_groups"]), state["failed_tries"]
        self._tasks, self._world = dict(state["tasks"]), state["world"]

    def reason(self, task_id: str) -> str | None:
        """Why this task must not be played; None when it may be."""
        return self._world if self._world is not None else self._tasks.get(task_id)

    def record_try(self, failure: Failure | None) -> None:
        """Count one try at any task; `failure` is None if it went well."""
        if failure is None:
            self._num_failed_tries = 0
        elif failure.party in WORLD_PARTIES:
            self._num_failed_tries += 1
            if self._num_failed_tries >= self._world_after and self._world is None:
                self._world = f"{self._num_failed_tries} tries in a row failed; the last: {failure.detail}"

    def record_group(self, task_id: str, failures: list[Failure], num_left: int) -> bool:
        """Count a group that ended with `num_left` good attempts; True if its task is quarantined from now on."""
        blamed = [failure for failure in failures if failure.party in QUARANTINE_PARTIES]
        if num_left:
            self._num_lost_groups.pop(task_id, None)
        if num_left or not blamed:
            return False
        count = self._num_lost_groups[task_id] = self._num_lost_groups.get(task_id, 0) + 1
        if count < self._task_after or task_id in self._tasks:
            return False
        self._tasks[task_id] = f"{count} groups in a row were lost; the last: {blamed[-1].detail}"
        return True


class Rollout:
    """A world, a policy and the rules to play by. `rollout.branch` plays its groups in another way."""

    def __init__(
        self,
        world: World,
        sampler: SamplingClient,
        renderer: Renderer,
        config: RolloutConfig,
        *,
        quarantine: Quarantine | None = None,
    ) -> None:
        """`quarantine`: kept by a run over all its rollouts; without one, this rollout makes its own."""
        self.world = world
        self.pick_sampler: Callable[[], SamplingClient] = lambda: sampler
        """Gives each attempt its sampler when the attempt starts."""
        self.renderer = renderer
        self.config = config.for_world(world)
        self.on_event: OnEvent | None = None
        """Called on the event loop as things happen."""
        self.quarantine = quarantine or Quarantine(
            task_after=config.quarantine_task_after, world_after=config.quarantine_world_after
        )
        self.slots: AbstractAsyncContextManager[None] = asyncio.Semaphore(config.max_concurrency)
        """Every attempt holds one slot while it is played."""
        self.stats = RolloutStats()
        """Counts while groups are played."""
        self.rules: Callable[[Task], RolloutConfig] = lambda _: self.config
        """Gives the attempts at a task their limits; in several worlds each has its own."""

    async def play(self, tasks: Sequence[Task], *, seed: int) -> RolloutResult:
        """Play `config.group_size` attempts at each task; groups come in the order of their tasks."""
        async with aclosing(self._run(tasks, seed)) as finished:
            outcomes = {index: outcome async for index, outcome in finished}
        return RolloutResult.of([outcomes[index] for index in range(len(tasks))], self.stats)

    async def stream(self, tasks: Sequence[Task], *, seed: int) -> AsyncGenerator[TrajectoryGroup | DroppedGroup, None]:
        """Like `play`, but gives each group as soon as it is done. Leave it early with `contextlib.aclosing`."""
        async with aclosing(self._run(tasks, seed)) as finished:
            async for _, outcome in finished:
                yield outcome

    async def _run(
        self, tasks: Sequence[Task], seed: int
    ) -> AsyncGenerator[tuple[int, TrajectoryGroup | DroppedGroup], None]:
        times_seen: Counter[str] = Counter()
        running: dict[asyncio.Task[TrajectoryGroup | DroppedGroup], int] = {}
        for index, task in enumerate(tasks):
            # A task that comes twice in one rollout gets attempts of its own each time.
            group_seed = derive_seed(seed, task.id, times_seen[task.id])
            times_seen[task.id] += 1
            running[asyncio.create_task(self.play_group(task, group_seed))] = index
        try:
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for group in done:
                    outcome = group.result()
                    yield running.pop(group), outcome
        finally:
            await cancel_all(list(running))

    async def play_group(self, task: Task, seed: int) -> TrajectoryGroup | DroppedGroup:
        """Play one group, whose seed this is."""
        reason = self.quarantine.reason(task.id)
        if reason is not None:
            return self.drop(task, "quarantined", reason, lost=self.config.group_size)
        return self.finish_group(task, await self.play_all(partial(self._try_attempt, task, seed), task))

    async def play_all(self, attempt: TryAttempt, task: Task) -> list[Trajectory]:
        """Play the attempts of a group side by side, and try each again while it fails and `may_retry`."""
        attempts = [asyncio.create_task(self._play_attempt(attempt, task, i)) for i in range(self.config.group_size)]
        try:
            return await asyncio.gather(*attempts)
        finally:
            await cancel_all(attempts)

    async def _play_attempt(self, attempt: TryAttempt, task: Task, index: int) -> Trajectory:
        retry = 0
        while True:
            async with self.slots:
                trajectory = await attempt(index, retry)
            self.stats.add_try(trajectory)
            self.quarantine.record_try(trajectory.failure)
            if trajectory.failure is None:
                self.emit("attempt_done", task, trajectory)
            if trajectory.failure is None or not self.may_retry(task, trajectory, retry):
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
            labels=labels_of(self.world, task.id),
        )
        return await play(attempt, self.pick_sampler(), self.renderer, self.rules(task), self.stats)

    def finish_group(
        self,
        task: Task,
        trajectories: Sequence[Trajectory],
        *,
        branch_turn: int | None = None,
        branch_probability: float = 1.0,
    ) -> TrajectoryGroup | DroppedGroup:
        """Make a group of the good attempts, with the failed ones set apart; drop it if too few are good."""
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

    def may_retry(self, task: Task, failed: Trajectory, retry: int) -> bool:
        """Whether to play an attempt again that failed; tells listeners either way."""
        assert failed.failure is not None
        is_certain = failed.failure.party is Party.CONTEXT  # the same prompt would be as long again
        if is_certain or retry == self.config.max_retries or self.quarantine.reason(task.id) is not None:
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
        """Count a group as dropped, with `lost` attempts that did not fail themselves."""
        self.stats.add_dropped_group(why, lost, failed)
        self.emit("group_dropped", task, detail=detail)
        return DroppedGroup(task_id=task.id, why=why, detail=detail, trajectories=kept, failed=failed)

    def emit(self, kind: EventKind, task: Task, trajectory: Trajectory | None = None, detail: str = "") -> None:
        if self.on_event is not None:
            self.on_event(RolloutEvent(kind=kind, task_id=task.id, trajectory=trajectory, detail=detail))


async def cancel_all(tasks: Sequence[asyncio.Task[object]]) -> None:
    """Cancel the tasks that still run, and wait until they have cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
