"""An env in which 20 % of steps hang, 10 % crash and 5 % return garbage: the rollout finishes and stays unbiased."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pytest

from turnwise.credit.advantages import center_by_group
from turnwise.envs.base import EnvStep, Task, user
from turnwise.renderers.base import Renderer
from turnwise.rollout import play_groups
from turnwise.trajectory import Message
from unit.rollout.worlds import QUESTION, World, make_tasks, num_busy_threads, quick, saying, wait_for_threads

HANG_S, DEADLINE_S = 1.0, 0.3
NUM_TASKS, GROUP_SIZE = 40, 8


class ChaoticEnv:
    """Two replies, then a reward of 1 or 2, equally likely. What goes wrong has nothing to do with the reward."""

    def __init__(self, seed: int) -> None:
        self.reward = random.Random(f"reward {seed}").choice([1.0, 2.0])
        self.chaos = random.Random(f"chaos {seed}")
        self.num_steps = 0
        self.is_closed = False

    def start(self) -> Sequence[Message]:
        return [QUESTION]

    def step(self, _: Message) -> Any:
        fate = self.chaos.random()
        if fate < 0.20:
            time.sleep(HANG_S)
        elif fate < 0.30:
            raise OSError("the sandbox died")
        elif fate < 0.35:
            return {"reward": "garbage"}
        self.num_steps += 1
        if self.num_steps == 2:
            return EnvStep(reward=self.reward, terminated=True)
        return EnvStep(messages=[user("Again.")])

    def close(self) -> None:
        self.is_closed = True


async def test_chaos_is_survived_counted_and_leaves_the_baseline_unbiased(renderer: Renderer) -> None:
    world = World(lambda _task, seed: ChaoticEnv(seed))
    config = quick(
        group_size=GROUP_SIZE,
        max_retries=1,
        max_concurrency=64,
        step_deadline_s=DEADLINE_S,
        min_group_size=2,
        same_start=False,  # the seed draws what breaks: another attempt has another fate
    )
    result = await play_groups(world, make_tasks(NUM_TASKS), saying(renderer), renderer, config, seed=0)
    metrics = result.stats.metrics()
    kept = [trajectory for group in result.groups for trajectory in group.trajectories]

    dropped = {name: value for name, value in metrics.items() if name.startswith("rollout/dropped_")}
    assert metrics["rollout/attempts"] == NUM_TASKS * GROUP_SIZE == len(kept) + sum(dropped.values())
    assert dropped["rollout/dropped_env_failed"] > 50
    assert metrics["rollout/failures_env"] > dropped["rollout/dropped_env_failed"]
    assert metrics["rollout/abandoned_calls"] > 0

    # A reward of 1 or 2: a failure that was scored 0 would show at once, and so would a baseline that has it in.
    rewards = [trajectory.total_reward for trajectory in kept]
    assert set(rewards) == {1.0, 2.0}
    standard_error = 0.5 / len(rewards) ** 0.5
    assert fmean(rewards) == pytest.approx(1.5, abs=3 * standard_error)
    baselines = [fmean(group.rewards) for group in result.groups]
    assert fmean(baselines) == pytest.approx(1.5, abs=4 * standard_error)
    with_zeros = fmean(fmean([*group.rewards, *[0.0] * len(group.failed)]) for group in result.groups)
    assert with_zeros < 1.5 - 6 * standard_error
    for group in result.groups:
        assert sum(center_by_group(group.rewards)) == pytest.approx(0.0)
        assert all(trajectory.failure is not None for trajectory in group.failed)

    assert all(env.is_closed for env in world.envs)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert num_busy_threads() <= metrics["rollout/abandoned_calls"]
    assert await asyncio.to_thread(wait_for_threads, HANG_S + 5) == 0


async def test_an_advantage_is_what_it_would_be_if_the_failed_siblings_had_never_been_started(
    renderer: Renderer,
) -> None:
    """The known expectation of one attempt's leave-one-out baseline: 1.5, however many siblings are lost."""

    class Unlucky(ChaoticEnv):
        def step(self, _: Message) -> Any:
            if self.chaos.random() < 0.5:
                raise OSError("the sandbox died")
            return EnvStep(reward=self.reward, terminated=True)

    world = World(lambda _task, seed: Unlucky(seed))
    result = await play_groups(
        world, make_tasks(150), saying(renderer), renderer, quick(group_size=4, max_retries=0, same_start=False), seed=3
    )
    others = [
        fmean(group.rewards[:i] + group.rewards[i + 1 :])  # type: ignore[operator]
        for group in result.groups
        for i in range(len(group.rewards))
    ]
    assert fmean(others) == pytest.approx(1.5, abs=0.08)
    assert Task(id="task-0").id in {group.task_id for group in (*result.groups, *result.dropped)}
    assert await asyncio.to_thread(wait_for_threads) == 0
