"""Copies of the policy play each other: every seat of a game is one trajectory.

    result = await play_games(world, tasks, sampler, renderer, config, seed=step)
    lessons = method.lessons(method.keep(result.groups).groups)

A game of n seats becomes n envs that share a table. `play` plays each of them like any env: exact ids, limits, end
reasons and blame work the same way. After a seat has moved, its env waits until it is that seat's turn again or the
game is over, and then tells what the seat can see. Each seat has its own deadlines; the wait ends if a seat leaves.
The seats of one game fail together: if one seat fails, no seat is scored. If a limit of the run ends one seat, the
others are truncated.

`config.group_size` games of each task are played. A group holds one seat of all these games (`task.id` and the seat),
so its attempts had the same seat in the same position, and the same luck if the game has any (`config.same_start`). A
seat that never moved in a game has no trajectory.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import cast

from turnwise.client.base import SamplingClient
from turnwise.envs.base import EnvStep, Task
from turnwise.envs.game import Game, GameWorld
from turnwise.envs.seats import RESULT, result_of
from turnwise.errors import AttemptFailed, ConfigError, Party
from turnwise.renderers.base import Renderer
from turnwise.rollout.call import call, call_now
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.group import DroppedGroup, Rollout, RolloutResult, cancel_all
from turnwise.rollout.play import Attempt, play
from turnwise.rollout.seeds import derive_seed, world_seed
from turnwise.rollout.stats import RolloutStats
from turnwise.trajectory import Branch, EndReason, Failure, Message, Trajectory, TrajectoryGroup


def seat_task_id(task_id: str, seat: int) -> str:
    """The `task_id` of a seat's trajectories and group."""
    return f"{task_id}/seat-{seat}"


async def play_games(
    world: GameWorld,
    tasks: Sequence[Task],
    samplers: SamplingClient | Sequence[SamplingClient],
    renderer: Renderer,
    config: RolloutConfig,
    *,
    seed: int,
) -> RolloutResult:
    """Play `config.group_size` games of each task; groups come in the order of tasks, then seats.

    Args:
        samplers: One for all seats, or one per seat; some may be older copies of the policy.
        seed: Seed of this rollout; give another one when you play the same tasks again.
    """
    rollout = _SelfPlay(world, lambda: samplers, renderer, config)
    running = [
        asyncio.create_task(rollout.play_task(task, derive_seed(seed, task.id, index)))
        for index, task in enumerate(tasks)
    ]
    try:
        outcomes = [outcome for outcomes in await asyncio.gather(*running) for outcome in outcomes]
    finally:
        await cancel_all(running)
    return RolloutResult.of(outcomes, rollout.stats)


class _SelfPlay:
    """One call of `play_games`."""

    def __init__(
        self,
        world: GameWorld,
        samplers: Callable[[], SamplingClient | Sequence[SamplingClient]],
        renderer: Renderer,
        config: RolloutConfig,
    ) -> None:
        # A step includes the time of the other seats, which have their own deadlines.
        patience = {"step_deadline_s": config.attempt_deadline_s}
        self._config = config.for_world(world).model_copy(update=patience)
        self._world = world
        self._samplers = samplers
        self._renderer = renderer
        self.room: AbstractAsyncContextManager[None] = asyncio.Semaphore(config.max_concurrency)
        """Every game holds one place while it is played."""
        self.stats = RolloutStats()

    async def play_task(self, task: Task, seed: int) -> list[TrajectoryGroup | DroppedGroup]:
        """Play all games of a task; returns one group per seat."""
        games = [asyncio.create_task(self._play_game(task, index, seed)) for index in range(self._config.group_size)]
        try:
            played = await asyncio.gather(*games)
        finally:
            await cancel_all(games)
        num_seats = max(len(seats) for seats in played)
        return [
            self._to_group(task, seat, [seats[seat] for seats in played if seat < len(seats)])
            for seat in range(num_seats)
        ]

    async def _play_game(self, task: Task, index: int, task_seed: int) -> list[Trajectory | None]:
        """Play one game, again if it fails. Returns a trajectory per seat, None for a seat that never moved."""
        retry = 0
        while True:
            async with self.room:
                seats = await self._try_game(task, index, task_seed, derive_seed(task_seed, index, retry))
            for trajectory in seats:
                if trajectory is not None:
                    self.stats.add_try(trajectory)
            has_failed = any(trajectory is not None and trajectory.failure is not None for trajectory in seats)
            if not has_failed or retry == self._config.max_retries:
                return seats
            self.stats.add_retry()
            retry += 1

    async def _try_game(self, task: Task, index: int, task_seed: int, seed: int) -> list[Trajectory | None]:
        game_seed = world_seed(task_seed) if self._config.same_start else seed
        try:
            game = call_now(Party.ENV, "make_game", lambda: self._world.make_game(task, game_seed))
        except AttemptFailed as error:
            return [_unplayed(seat_task_id(task.id, 0), index, seed, self.stats.to_failure(error))]
        table = _Table(game)
        samplers = self._seated(game.num_seats)

        def attempt_of(seat: int) -> Attempt:
            return Attempt(
                task_id=seat_task_id(task.id, seat),
                index=index,
                seed=game_seed,
                make_env=lambda: _SeatEnv(table, seat),
                branch=Branch(turn=0, seed=derive_seed(seed, "seat", seat)),
            )

        seats = [
            asyncio.create_task(self._play_seat(table, seat, sampler, attempt_of(seat)))
            for seat, sampler in enumerate(samplers)
        ]
        try:
            trajectories = await asyncio.gather(*seats)
        finally:
            await cancel_all(seats)
        return _fail_together(trajectories)

    async def _play_seat(
        self, table: _Table, seat: int, sampler: SamplingClient, attempt: Attempt
    ) -> Trajectory | None:
        deadline_s = self._config.attempt_deadline_s
        try:
            if not await call(Party.ENV, "first move", lambda: table.wait_for(seat), deadline_s=deadline_s):
                return None
            return await play(attempt, sampler, self._renderer, self._config, self.stats)
        except AttemptFailed as error:  # this seat never moved
            return _unplayed(attempt.task_id, attempt.index, attempt.seed, self.stats.to_failure(error))
        finally:
            table.leave()

    def _seated(self, num_seats: int) -> list[SamplingClient]:
        samplers = self._samplers()
        if not isinstance(samplers, Sequence):
            return [samplers] * num_seats
        if len(samplers) != num_seats:
            raise ConfigError(f"{len(samplers)} samplers for {num_seats} seats; expected one for all or one each")
        return list(samplers)

    def _to_group(
        self, task: Task, seat: int, trajectories: Sequence[Trajectory | None]
    ) -> TrajectoryGroup | DroppedGroup:
        task_id = seat_task_id(task.id, seat)
        played = [trajectory for trajectory in trajectories if trajectory is not None]
        kept = tuple(trajectory for trajectory in played if trajectory.failure is None)
        failed = tuple(trajectory for trajectory in played if trajectory.failure is not None)
        if len(kept) >= self._config.smallest_group:
            self.stats.add_kept_group(kept, failed)
            return TrajectoryGroup(task_id=task_id, trajectories=kept, failed=failed)
        self.stats.add_dropped_group("group_too_small", len(kept), failed)
        detail = f"{len(kept)} of {len(trajectories)} games are left, {self._config.smallest_group} are needed"
        return DroppedGroup(task_id=task_id, why="group_too_small", detail=detail, trajectories=kept, failed=failed)


class SelfPlayRollout(Rollout):
    """A rollout in which the policy has both seats and learns from both.

    A group holds the attempts of both seats; `split_seats` makes one group of each seat, because each seat is compared
    with itself. The groups of a run's pool are whole tasks, so the two are split when a step takes them.
    """

    async def play_group(self, task: Task, seed: int) -> TrajectoryGroup | DroppedGroup:
        """Play `config.group_size` games, whose seed this is."""
        reason = self.quarantine.reason(task.id)
        if reason is not None:
            return self.drop(task, "quarantined", reason, lost=2 * self.config.group_size)
        games = _SelfPlay(cast(GameWorld, self.world), self.pick_sampler, self.renderer, self.config)
        games.room, games.stats = self.slots, self.stats
        outcomes = await games.play_task(task, seed)
        at_task = partial(_at_task, task=task, group_size=self.config.group_size)
        for trajectory in (one for outcome in outcomes for one in (*outcome.trajectories, *outcome.failed)):
            self.quarantine.record_try(trajectory.failure)
        kept = [at_task(one) for outcome in outcomes if _is_kept(outcome) for one in outcome.trajectories]
        failed = tuple(at_task(one) for outcome in outcomes for one in outcome.failed)
        failures = [one.failure for one in failed if one.failure is not None]
        if self.quarantine.record_group(task.id, failures, len(kept)):
            self.stats.add_quarantined_task()
        if kept:
            return TrajectoryGroup(task_id=task.id, trajectories=tuple(kept), failed=failed)
        dropped = [outcome for outcome in outcomes if isinstance(outcome, DroppedGroup)]
        lost = tuple(at_task(one) for outcome in dropped for one in outcome.trajectories)
        detail = dropped[0].detail if dropped else "no game was played"
        return DroppedGroup(task_id=task.id, why="group_too_small", detail=detail, trajectories=lost, failed=failed)


def split_seats(group: TrajectoryGroup) -> list[TrajectoryGroup]:
    """One group per seat, where the policy played both; else the group as it is."""
    seats = sorted({trajectory.labels.get("seat", "") for trajectory in group.trajectories})
    if seats == [""] or not seats:
        return [group]
    return [
        dataclasses.replace(
            group,
            trajectories=tuple(one for one in group.trajectories if one.labels.get("seat") == seat),
            failed=group.failed if seat == seats[0] else (),
        )
        for seat in seats
    ]


def _is_kept(outcome: TrajectoryGroup | DroppedGroup) -> bool:
    return isinstance(outcome, TrajectoryGroup)


def _at_task(trajectory: Trajectory, task: Task, group_size: int) -> Trajectory:
    """An attempt of a seat as an attempt at the task. Its label tells the seat; numbers of attempts stay different."""
    seat = int(trajectory.task_id.removeprefix(seat_task_id(task.id, 0)[:-1]))
    number = trajectory.attempt + seat * group_size
    return dataclasses.replace(
        trajectory, task_id=task.id, attempt=number, labels={**trajectory.labels, "seat": str(seat)}
    )


class _Table:
    """A game and who waits for it. All of it runs on one event loop, so a move is never interrupted."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self.said: list[tuple[int, str]] = []
        """Seat and words of every move."""
        self._changed = asyncio.Event()
        self._is_broken = False  # a seat left in the middle of the game, which cannot go on

    def move(self, reply: Message) -> bool:
        if self.game.to_move is not None:
            self.said.append((self.game.to_move, reply.content))
        is_read = self.game.move(reply)
        self._wake()
        return is_read

    def leave(self) -> None:
        self._is_broken = self._is_broken or self.game.to_move is not None
        self._wake()

    async def wait_for(self, seat: int) -> bool:
        """Wait until it is the seat's move (True) or the game is over for it (False)."""
        while self.game.to_move not in (seat, None) and not self._is_broken:
            await self._changed.wait()
        return self.game.to_move == seat and not self._is_broken

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class _SeatEnv:
    """A game from the view of one seat."""

    def __init__(self, table: _Table, seat: int) -> None:
        self._table = table
        self._seat = seat

    async def start(self) -> list[Message]:
        game = self._table.game
        return [*game.rules(self._seat), *game.view(self._seat)]

    async def step(self, reply: Message) -> EnvStep:
        is_read = self._table.move(reply)
        is_action = bool(getattr(self._table.game, "was_action", False))  # before the other seat moves
        return dataclasses.replace(await self._wait(is_read), is_action=is_action, labels=self._labels())

    async def _wait(self, is_read: bool) -> EnvStep:
        if await self._table.wait_for(self._seat):
            return EnvStep(messages=self._table.game.view(self._seat), is_unparsable=not is_read)
        if self._table.game.to_move is not None:
            return EnvStep(truncated=True, is_unparsable=not is_read)  # another seat reached a limit of the run
        return self._table.game.outcome(self._seat).to_env_step(is_unparsable=not is_read)

    def _result(self) -> dict[str, str]:
        """Whether this seat got more, in a game of two that is over."""
        game = self._table.game
        if game.to_move is not None or game.num_seats != 2:
            return {}
        own, other = (game.outcome(seat).reward for seat in (self._seat, 1 - self._seat))
        return {RESULT: result_of(own, other)}

    def _labels(self) -> dict[str, str]:
        said = [text for seat, text in self._table.said if seat != self._seat]
        return {"opponent": "self", "seat": str(self._seat), "opponent_said": json.dumps(said)} | self._result()

    async def close(self) -> None:
        self._table.leave()

    def state_key(self) -> str:
        return self._table.game.key()


def _fail_together(trajectories: Sequence[Trajectory | None]) -> list[Trajectory | None]:
    """If one seat failed, mark the other seats of the game as failed too; what the game said of them does not count."""
    first = next((t for t in trajectories if t is not None and t.failure is not None), None)
    if first is None or first.failure is None:
        return list(trajectories)
    shared = dataclasses.replace(first.failure, detail=f"another seat of the game failed: {first.failure.detail}")
    return [
        dataclasses.replace(t, end_reason=EndReason.FAILED, failure=shared, is_success=None)
        if t is not None and t.failure is None
        else t
        for t in trajectories
    ]


def _unplayed(task_id: str, index: int, seed: int, failure: Failure) -> Trajectory:
    return Trajectory(
        task_id=task_id,
        attempt=index,
        seed=seed,
        turns=(),
        end_reason=EndReason.FAILED,
        failure=failure,
    )
