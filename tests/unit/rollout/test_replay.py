"""A stored attempt is played again from its record, and the first difference is found."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest

from turnwise.envs.base import EnvStep, Task, user
from turnwise.errors import DataError
from turnwise.renderers import get_renderer
from turnwise.renderers.base import Renderer
from turnwise.rollout import play_groups
from turnwise.rollout.replay import replay
from turnwise.trajectory import EndReason, Message, Trajectory
from unit.rollout.worlds import QUESTION, CountingEnv, World, make_tasks, quick, saying

pytestmark = pytest.mark.usefixtures("no_leaks")


class DiceEnv(CountingEnv):
    """All of its randomness comes from its seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.dice = random.Random(seed)

    async def step(self, reply: Message) -> EnvStep:
        self.replies.append(reply)
        roll = self.dice.randint(1, 1000)
        return EnvStep(messages=[user(f"You rolled {roll}.")], reward=roll / 1000, terminated=len(self.replies) == 3)

    def state_key(self) -> str:
        return str(len(self.replies))


async def play_one(world: World, renderer: Renderer, **config: Any) -> tuple[Task, Trajectory, Any]:
    settings = quick(group_size=2, **config)
    (task,) = make_tasks(1)
    result = await play_groups(world, [task], saying(renderer), renderer, settings, seed=5)
    (group,) = result.groups
    return task, group.trajectories[1], settings


async def test_an_attempt_is_replayed_exactly(renderer: Renderer) -> None:
    world = World(lambda _, seed: DiceEnv(seed))
    task, recorded, config = await play_one(world, renderer)
    played = await replay(world, task, recorded, renderer, config)
    assert played.is_exact
    assert [turn.reward for turn in played.replayed.turns] == [turn.reward for turn in recorded.turns]
    assert played.lines() == [
        f"attempt 1 at task-0 (seed {recorded.seed}): 3 turns replayed exactly, end reason terminated"
    ]


async def test_an_attempt_that_a_limit_cut_short_is_replayed_too(renderer: Renderer) -> None:
    world = World(lambda _, seed: DiceEnv(seed))
    for limits in ({"max_turns": 2}, {"max_tokens_per_turn": 3}, {"max_trajectory_tokens": 50}):
        task, recorded, config = await play_one(world, renderer, **limits)
        assert (await replay(world, task, recorded, renderer, config)).is_exact


async def test_time_that_ran_out_need_not_run_out_again(renderer: Renderer) -> None:
    is_slow = True

    class Slow(DiceEnv):
        async def step(self, reply: Message) -> EnvStep:
            if len(self.replies) == 2 and is_slow:
                await asyncio.sleep(60)
            return await super().step(reply)

    world = World(lambda _, seed: Slow(seed))
    task, recorded, config = await play_one(world, renderer, attempt_deadline_s=1.0)
    assert (recorded.end_reason, len(recorded.turns)) == (EndReason.TIME_LIMIT, 2)
    is_slow = False
    assert (await replay(world, task, recorded, renderer, config)).is_exact


async def test_an_env_that_does_not_follow_its_seed_is_found_with_the_turn(renderer: Renderer) -> None:
    rolls = itertools.count()

    class Wild(DiceEnv):
        async def step(self, reply: Message) -> EnvStep:
            step = await super().step(reply)
            if len(self.replies) < 2:
                return step
            return EnvStep(messages=[user(f"Roll number {next(rolls)}.")], terminated=step.terminated)

    world = World(lambda _, seed: Wild(seed))
    task, recorded, config = await play_one(world, renderer)
    played = await replay(world, task, recorded, renderer, config)
    assert played.difference is not None
    assert (played.difference.turn, played.difference.what) == (1, "observation (from item 0 of 1 on)")
    assert "Roll number" in played.difference.recorded
    assert played.lines()[0].endswith("differs at turn 1")


async def test_another_reward_start_end_or_renderer_is_found(renderer: Renderer, tokenizer: Any) -> None:
    world = World(lambda _, seed: DiceEnv(seed))
    task, recorded, config = await play_one(world, renderer)

    class Stingy(DiceEnv):
        async def step(self, reply: Message) -> EnvStep:
            step = await super().step(reply)
            return EnvStep(messages=step.messages, reward=0.0, terminated=step.terminated)

    class Polite(DiceEnv):
        async def start(self) -> list[Message]:
            return [QUESTION, user("Please.")]

    class Short(DiceEnv):
        async def step(self, reply: Message) -> EnvStep:
            step = await super().step(reply)
            return EnvStep(messages=step.messages, reward=step.reward, terminated=len(self.replies) == 2)

    found: list[tuple[int | None, str]] = []
    for env in (Stingy, Polite, Short):
        played = await replay(World(lambda _, seed, env=env: env(seed)), task, recorded, renderer, config)
        assert played.difference is not None
        found.append((played.difference.turn, played.difference.what))
    assert found == [(0, "reward"), (None, "first messages (from item 1 of 1 on)"), (2, "the end")]
    single = get_renderer(tokenizer, multi_turn=False)
    played = await replay(world, task, recorded, single, config)
    assert played.difference is not None
    assert played.difference.turn == 1
    assert played.difference.what.startswith("prompt ids (from item")


async def test_a_record_is_only_replayed_on_its_own_task(renderer: Renderer) -> None:
    world = World(lambda _, seed: DiceEnv(seed))
    _, recorded, config = await play_one(world, renderer)
    with pytest.raises(DataError, match="task-0"):
        await replay(world, Task(id="another"), recorded, renderer, config)
