"""Groups: side by side, retried, dropped and counted; the same for the same seed; gone when cancelled."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from typing import Any

import pytest

from turnwise.client.fake import ScriptedSampler
from turnwise.envs.base import EnvStep, Task, user
from turnwise.errors import Party
from turnwise.renderers.base import Renderer
from turnwise.rollout import DroppedGroup, Rollout, play_groups
from turnwise.rollout.group import Quarantine, RolloutEvent
from turnwise.trajectory import Failure, Message, TrajectoryGroup
from unit.rollout.worlds import QUESTION, CountingEnv, World, make_tasks, quick, saying

pytestmark = pytest.mark.usefixtures("no_leaks")


def crash(_: Message) -> EnvStep:
    raise RuntimeError("the sandbox died")


class LuckyEnv(CountingEnv):
    """Reward and latency by seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)

    async def step(self, reply: Message) -> EnvStep:
        await asyncio.sleep(self.random.random() * 0.005)
        self.replies.append(reply)
        return EnvStep(messages=[user("Again.")], reward=self.random.random(), terminated=len(self.replies) == 2)


async def test_every_task_gets_a_group_of_attempts_in_the_order_of_the_tasks(renderer: Renderer) -> None:
    world = World()
    result = await play_groups(world, make_tasks(3), saying(renderer), renderer, quick(group_size=4), seed=0)
    assert [group.task_id for group in result.groups] == ["task-0", "task-1", "task-2"]
    assert [[t.attempt for t in group.trajectories] for group in result.groups] == [[0, 1, 2, 3]] * 3
    assert result.dropped == ()
    assert len(world.seeds) == 12
    assert len(set(world.seeds)) == 3, "one world for each group"
    assert all(env.num_closed == 1 for env in world.envs)
    metrics = result.stats.metrics()
    assert metrics["rollout/attempts"] == metrics["rollout/attempts_kept"] == 12
    assert metrics["rollout/groups_kept"] == 3
    assert metrics["rollout/success_mean"] == 1.0
    assert metrics["rollout/reward_mean"] == 1.25
    assert metrics["rollout/reward_outcome_mean"] == 1.0
    assert metrics["rollout/reward_shaping_mean"] == 0.25
    assert metrics["rollout/turns_mean"] == 2
    assert metrics["rollout/stop_terminated_share"] == 1.0
    assert not [name for name in metrics if "dropped" in name or "failures" in name]


async def test_the_same_seed_gives_the_same_attempts_whatever_runs_beside_them(renderer: Renderer) -> None:
    async def rewards(seed: int, max_concurrency: int, tasks: list[Task]) -> dict[str, Any]:
        config = quick(max_concurrency=max_concurrency)
        world = World(lambda _, env_seed: LuckyEnv(env_seed))
        result = await play_groups(world, tasks, saying(renderer), renderer, config, seed=seed)
        return {group.task_id: group.rewards for group in result.groups}

    tasks = make_tasks(4)
    first = await rewards(1, 16, tasks)
    assert await rewards(1, 2, tasks[::-1]) == first
    assert await rewards(2, 16, tasks) != first


async def test_a_task_that_comes_twice_gets_other_attempts_the_second_time(renderer: Renderer) -> None:
    world = World()
    task = Task(id="again")
    result = await play_groups(world, [task, task], saying(renderer), renderer, quick(), seed=0)
    assert len(result.groups) == 2
    assert len(set(world.seeds)) == 2


async def test_attempts_of_all_groups_share_one_bound(renderer: Renderer) -> None:
    running = most = 0

    async def step(_: Message) -> EnvStep:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        return EnvStep(terminated=True)

    world = World(lambda *_: CountingEnv(on_step=step))
    await play_groups(world, make_tasks(5), saying(renderer), renderer, quick(max_concurrency=3), seed=0)
    assert most == 3


async def test_a_failed_attempt_is_played_again_in_a_fresh_env_of_the_same_world(renderer: Renderer) -> None:
    num_made = 0

    def make(_: Task, __: int) -> CountingEnv:
        nonlocal num_made
        num_made += 1
        return CountingEnv(on_step=crash if num_made <= 2 else None)

    world, events = World(make), list[RolloutEvent]()
    rollout = Rollout(world, saying(renderer), renderer, quick(group_size=2, max_retries=2))
    rollout.on_event = events.append
    result = await rollout.play(make_tasks(1), seed=0)
    (group,) = result.groups
    assert len(group.trajectories) == 2
    assert group.failed == ()
    assert (len(world.seeds), len(set(world.seeds))) == (4, 1)
    assert all(env.num_closed == 1 for env in world.envs)
    metrics = result.stats.metrics()
    assert (metrics["rollout/retries"], metrics["rollout/failures_env"], metrics["rollout/tries"]) == (2, 2, 4)
    assert metrics["rollout/attempts"] == metrics["rollout/attempts_kept"] == 2
    kinds = [event.kind for event in events]
    assert sorted(kinds) == ["attempt_done"] * 2 + ["attempt_retried"] * 2 + ["group_done"]
    assert all("sandbox" in event.detail for event in events if event.kind == "attempt_retried")


async def test_an_attempt_that_stays_failed_is_set_apart_and_never_scored(renderer: Renderer) -> None:
    made: dict[int, int] = {}

    def make(_: Task, seed: int) -> CountingEnv:
        made[seed] = len(made)
        return CountingEnv(on_step=crash if made[seed] == 0 else None)

    result = await play_groups(World(make), make_tasks(1), saying(renderer), renderer, quick(max_concurrency=1), seed=0)
    (group,) = result.groups
    assert len(group.trajectories) == 3
    assert group.rewards == [1.25] * 3  # no zero for the one whose sandbox died
    (failure,) = [t.failure for t in group.failed]
    assert failure is not None
    assert failure.party is Party.ENV
    place = "tests/unit/rollout/test_group.py:"
    assert failure.detail.startswith(f"step: RuntimeError('the sandbox died') at {place}"), "and the user's own line"
    assert result.stats.metrics()["rollout/dropped_env_failed"] == 1


async def test_a_group_that_is_too_small_is_dropped_with_its_reason(renderer: Renderer) -> None:
    def make(task: Task, _: int) -> CountingEnv:
        make.count += 1  # type: ignore[attr-defined]
        return CountingEnv(on_step=crash if task.id == "task-1" and make.count > 5 else None)  # type: ignore[attr-defined]

    make.count = 0  # type: ignore[attr-defined]
    config = quick(min_group_size=2, max_concurrency=1)
    result = await play_groups(World(make), make_tasks(2), saying(renderer), renderer, config, seed=0)
    assert [group.task_id for group in result.groups] == ["task-0"]
    (dropped,) = result.dropped
    assert (dropped.task_id, dropped.why) == ("task-1", "group_too_small")
    assert "1 of 4 attempts are left, 2 are needed" in dropped.detail
    assert (len(dropped.trajectories), len(dropped.failed)) == (1, 3)
    metrics = result.stats.metrics()
    assert (metrics["rollout/dropped_group_too_small"], metrics["rollout/dropped_env_failed"]) == (1, 3)
    assert metrics["rollout/groups_dropped"] == 1
    dropped_total = sum(value for name, value in metrics.items() if name.startswith("rollout/dropped_"))
    assert metrics["rollout/attempts"] == 8 == metrics["rollout/attempts_kept"] + dropped_total


async def test_evaluation_may_play_groups_of_one(renderer: Renderer) -> None:
    config = quick(group_size=1, min_group_size=1, temperature=0.0)
    result = await play_groups(World(), make_tasks(3), saying(renderer), renderer, config, seed=0)
    assert [len(group.trajectories) for group in result.groups] == [1, 1, 1]


async def test_a_task_that_keeps_failing_is_quarantined_and_counted(renderer: Renderer) -> None:
    world = World(lambda task, _: CountingEnv(on_step=crash if task.id == "task-0" else None))
    config, quarantine = quick(), Quarantine(task_after=2)
    for _ in range(2):
        rollout = Rollout(world, saying(renderer), renderer, config, quarantine=quarantine)
        result = await rollout.play(make_tasks(2), seed=0)
        assert [(d.task_id, d.why) for d in result.dropped] == [("task-0", "group_too_small")]
    assert result.stats.metrics()["rollout/tasks_quarantined"] == 1
    num_made = len(world.envs)
    rollout = Rollout(world, saying(renderer), renderer, config, quarantine=quarantine)
    result = await rollout.play(make_tasks(2), seed=0)
    assert [(d.task_id, d.why) for d in result.dropped] == [("task-0", "quarantined")]
    assert "the sandbox died" in result.dropped[0].detail
    assert len(world.envs) == num_made + 4
    assert result.stats.metrics()["rollout/dropped_quarantined"] == 4
    assert list(quarantine.tasks) == ["task-0"]


async def test_a_world_in_which_everything_fails_is_closed(renderer: Renderer) -> None:
    world = World(lambda *_: CountingEnv(on_step=crash))
    config = quick(max_concurrency=1, max_retries=50, quarantine_world_after=10)
    result = await play_groups(world, make_tasks(3), saying(renderer), renderer, config, seed=0)
    assert result.groups == ()
    assert len(world.envs) < 30  # and not 3 * 4 * 51
    assert {dropped.why for dropped in result.dropped} <= {"group_too_small", "quarantined"}


async def test_a_sampler_that_is_down_quarantines_nothing(renderer: Renderer) -> None:
    quarantine = Quarantine(task_after=1, world_after=1)
    rollout = Rollout(World(), ScriptedSampler([]), renderer, quick(), quarantine=quarantine)
    result = await rollout.play(make_tasks(2), seed=0)
    assert result.groups == ()
    assert not quarantine.tasks
    assert quarantine.world is None
    assert result.stats.metrics()["rollout/dropped_sampler_failed"] == 8


def test_quarantine_counts_failures_in_a_row() -> None:
    quarantine = Quarantine(task_after=2, world_after=3)
    failure = Failure(party=Party.ENV, detail="x")
    assert not quarantine.record_group("a", [failure], num_left=0)
    assert not quarantine.record_group("a", [], num_left=3)
    assert not quarantine.record_group("a", [failure], num_left=0)
    assert quarantine.record_group("a", [failure], num_left=0)
    assert quarantine.reason("a") is not None
    assert quarantine.reason("b") is None
    for outcome in (failure, failure, None, failure, failure):
        quarantine.record_try(outcome)
    assert quarantine.world is None
    quarantine.record_try(failure)
    assert quarantine.reason("b") is not None


async def test_groups_are_streamed_as_they_finish(renderer: Renderer) -> None:
    def make(task: Task, _: int) -> CountingEnv:
        async def step(_: Message) -> EnvStep:
            await asyncio.sleep(0.1 if task.id == "task-0" else 0)
            return EnvStep(terminated=True)

        return CountingEnv(on_step=crash if task.id == "task-1" else step)

    rollout = Rollout(World(make), saying(renderer), renderer, quick())
    outcomes = [outcome async for outcome in rollout.stream(make_tasks(3), seed=0)]
    assert outcomes[-1].task_id == "task-0"
    kinds = {outcome.task_id: type(outcome) for outcome in outcomes}
    assert kinds == {"task-0": TrajectoryGroup, "task-1": DroppedGroup, "task-2": TrajectoryGroup}
    assert rollout.stats.metrics()["rollout/attempts"] == 12


async def test_leaving_a_stream_early_closes_every_env(renderer: Renderer) -> None:
    def make(task: Task, _: int) -> CountingEnv:
        async def step(_: Message) -> EnvStep:
            await asyncio.sleep(0 if task.id == "task-0" else 60)
            return EnvStep(terminated=True)

        return CountingEnv(on_step=step)

    world = World(make)
    groups = Rollout(world, saying(renderer), renderer, quick()).stream(make_tasks(3), seed=0)
    async with aclosing(groups):
        async for group in groups:
            assert group.task_id == "task-0"
            break
    assert world.envs
    assert all(env.num_closed == 1 for env in world.envs)


async def test_cancelling_a_rollout_cancels_everything_and_closes_every_env(renderer: Renderer) -> None:
    stepping = asyncio.Event()

    async def step(_: Message) -> EnvStep:
        stepping.set()
        await asyncio.sleep(60)
        raise AssertionError

    world = World(lambda *_: CountingEnv(on_step=step))
    task = asyncio.create_task(
        play_groups(world, make_tasks(3), saying(renderer), renderer, quick(max_concurrency=5), seed=0)
    )
    await stepping.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(world.envs) <= 5
    assert all(env.num_closed == 1 for env in world.envs)


async def test_a_bug_of_ours_is_not_an_attempt(renderer: Renderer) -> None:
    def on_event(_: RolloutEvent) -> None:
        raise ZeroDivisionError("a bug in the live view")

    world = World()
    rollout = Rollout(world, saying(renderer), renderer, quick())
    rollout.on_event = on_event
    with pytest.raises(ZeroDivisionError):
        await rollout.play(make_tasks(2), seed=0)
    assert all(env.num_closed == 1 for env in world.envs)


async def test_groups_whose_attempts_start_differently_are_counted(renderer: Renderer) -> None:
    world = World(lambda _, seed: CountingEnv(first=[QUESTION, user(str(seed))]))
    result = await play_groups(world, make_tasks(2), saying(renderer), renderer, quick(same_start=False), seed=0)
    assert result.stats.metrics()["rollout/groups_with_unequal_starts"] == 2
