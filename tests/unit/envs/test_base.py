from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from turnwise.envs.base import EnvStep, user
from turnwise.errors import DataError


def test_a_number_is_all_outcome() -> None:
    assert EnvStep(reward=1, terminated=True).reward_parts == {"outcome": 1.0}


def test_named_parts_are_kept() -> None:
    parts = {"outcome": 1.0, "format": 0.1}
    assert EnvStep(reward=parts, terminated=True).reward_parts == parts


def test_numpy_numbers_are_numbers() -> None:
    assert EnvStep(reward=np.float32(0.5), terminated=True).reward_parts == {"outcome": 0.5}  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "reward", [float("nan"), float("inf"), None, "1", {"outcome": None}, {"shaping": float("nan")}]
)
def test_a_reward_that_is_no_finite_number_is_refused(reward: Any) -> None:
    with pytest.raises(DataError, match=r"EnvStep\.reward: .*expected a finite number"):
        EnvStep(reward=reward, terminated=True)


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(DataError, match="unknown part 'bonus'; expected outcome, format, shaping, penalty, judge"):
        EnvStep(reward={"bonus": 1.0}, terminated=True)


@pytest.mark.parametrize("messages", ["Guess again.", [{"role": "user", "content": "hi"}], ["hi"], user("hi"), None])
def test_what_is_no_list_of_messages_is_refused(messages: Any) -> None:
    with pytest.raises(DataError, match=r"EnvStep\.messages holds"):
        EnvStep(messages=messages)


def test_an_attempt_that_goes_on_must_say_something() -> None:
    with pytest.raises(DataError, match="the attempt goes on"):
        EnvStep()


def test_an_attempt_ends_in_one_way() -> None:
    with pytest.raises(DataError, match="both terminated and truncated"):
        EnvStep(terminated=True, truncated=True)
    assert EnvStep(truncated=True).is_over
    assert not EnvStep(messages=[user("Go on.")]).is_over
