"""Settings that cannot work are refused before anything is spent."""

from __future__ import annotations

from typing import Any

import pytest

from turnwise.errors import ConfigError
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.limits import Clock, RolloutLimits
from turnwise.rollout.seeds import derive_seed


@pytest.mark.parametrize(
    "fields",
    [
        {"max_turns": -1},
        {"max_tokens_per_turn": -1},
        {"max_trajectory_tokens": 1},
        {"step_deadline_s": 0},
        {"attempt_deadline_s": float("inf")},
        {"sample_deadline_s": float("nan")},
    ],
)
def test_limits_that_cannot_work_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        RolloutLimits(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"group_size": 0},
        {"group_size": 2, "min_group_size": 3},
        {"max_retries": -1},
        {"max_concurrency": 0},
        {"temperature": -1.0},
        {"unparsable_penalty": -0.5},
        {"unparsable_penalty": 0.5, "on_unparsable": "mask"},
        {"quarantine_task_after": 0},
    ],
)
def test_configs_that_cannot_work_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RolloutConfig(**fields)


def test_a_reply_gets_what_is_left_of_the_budget() -> None:
    limits = RolloutLimits(max_tokens_per_turn=10, max_trajectory_tokens=100)
    assert [limits.num_tokens_left(n) for n in (5, 95, 99, 100, 130)] == [10, 5, 1, 0, -30]


def test_a_calls_deadline_never_outlives_the_attempts() -> None:
    clock = Clock(deadline_s=1000.0)
    assert clock.at_most(5.0) == 5.0
    assert 990 < clock.at_most(5000.0) <= 1000
    assert Clock(deadline_s=0.0).is_over


def test_seeds_are_stable_and_depend_on_every_part() -> None:
    assert derive_seed(0, "sum-7", 3) == 1661394217
    assert derive_seed(1, "23") != derive_seed(12, "3")
    seeds = {derive_seed(0, "t", attempt, retry) for attempt in range(50) for retry in range(20)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_greedy_logprobs_are_at_temperature_one() -> None:
    assert RolloutConfig(temperature=0.0).logprob_temperature == 1.0
    assert RolloutConfig(temperature=0.6).logprob_temperature == 0.6
