"""An evaluation against several opponents: its intervals are over tasks, and all of them have to be there."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from turnwise.envs.registry import get_world
from turnwise.errors import Party
from turnwise.rollout.group import DroppedGroup, Rollout, RolloutResult
from turnwise.rollout.stats import RolloutStats
from turnwise.training.evaluate import Evaluation, play_panel
from turnwise.trajectory import EndReason, Failure, Trajectory, TrajectoryGroup
from turnwise.watch.intervals import mean_interval, success_interval
from unit.credit.groups import make_attempt


def attempt(task: int, reward: float) -> Trajectory:
    return replace(make_attempt([reward], is_success=reward >= 0.5), task_id=f"t{task}")


def played(rewards: list[float]) -> RolloutResult:
    groups = [TrajectoryGroup(task_id=f"t{i}", trajectories=(attempt(i, one),)) for i, one in enumerate(rewards)]
    return RolloutResult.of(groups, RolloutStats())


async def evaluate(**rewards: list[float] | RolloutResult) -> Evaluation:
    """An evaluation against these opponents, each with the rewards at the tasks in their order."""
    rollouts: dict[str, Any] = {}
    for name, own in rewards.items():
        result = own if isinstance(own, RolloutResult) else played(own)

        async def play(*_: object, result: RolloutResult = result, **__: object) -> RolloutResult:
            return result

        rollouts[name] = SimpleNamespace(play=play, world=get_world("negotiate"))
    return await play_panel(cast(dict[str, Rollout], rollouts), [], seed=0, label="last", step=1)


async def test_a_task_that_several_opponents_play_is_one_task() -> None:
    rewards = [0.0, 0.2, 0.6, 1.0]
    alone = (await evaluate(base=rewards)).row
    twice = (await evaluate(base=rewards, copy=rewards)).row
    assert (twice.num_tasks, twice.num_attempts) == (4, 8)
    assert (twice.reward, twice.reward_low, twice.reward_high) == pytest.approx(
        (alone.reward, alone.reward_low, alone.reward_high)
    ), "a second game that says the same makes nothing more certain"
    other = [1.0, 0.0, 0.6, 0.2]
    both = await evaluate(base=rewards, tough=other)
    pairs = list(zip(rewards, other, strict=True))
    expected = mean_interval(pairs)
    assert (both.row.reward_low, both.row.reward_high) == pytest.approx((expected.low, expected.high))
    won = success_interval([[one >= 0.5 for one in pair] for pair in pairs])
    assert (both.row.success, both.row.success_low, both.row.success_high) == (won.value, won.low, won.high)
    assert [row.num_tasks for row in both.by_opponent.values()] == [4, 4]


async def test_a_panel_without_one_of_its_opponents_has_no_number() -> None:
    failure = Failure(party=Party.OPPONENT, detail="gone")
    failed = replace(attempt(0, 0.0), end_reason=EndReason.FAILED, is_success=None, failure=failure)
    dropped = DroppedGroup(task_id="t0", why="group_too_small", detail="", failed=(failed,))
    dead = RolloutResult.of([dropped], RolloutStats())
    evaluation = await evaluate(base=[0.5, 1.0], address=dead)
    assert math.isnan(evaluation.row.reward)
    assert math.isnan(evaluation.row.success)
    assert (evaluation.row.num_attempts, evaluation.row.num_failed) == (2, 1)
    assert evaluation.by_opponent["base"].reward == 0.75
