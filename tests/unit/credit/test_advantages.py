"""Vectors V4 and V5 of the algorithms' specification, and what must hold of every baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.credit.advantages import (
    center_by_group,
    is_constant_group,
    leave_one_out,
    normalise_by_group,
    reward_to_go,
)
from turnwise.errors import DataError

REWARDS = [1.0, 0.0, 0.5, 1.0]
BASELINES: list[Callable[[Sequence[float]], np.ndarray]] = [center_by_group, normalise_by_group, leave_one_out]

groups = st.lists(st.floats(-100, 100, allow_nan=False).map(lambda x: round(x, 3)), min_size=2, max_size=16)


def test_the_three_baselines_match_the_vectors() -> None:
    assert center_by_group(REWARDS) == pytest.approx([0.375, -0.625, -0.125, 0.375])
    assert normalise_by_group(REWARDS) == pytest.approx([0.783348, -1.30558, -0.261116, 0.783348], abs=2e-6)
    assert leave_one_out(REWARDS) == pytest.approx([0.5, -0.833333, -0.166667, 0.5], abs=1e-6)


def test_leave_one_out_subtracts_the_mean_of_the_others() -> None:
    expected = [reward - np.mean(REWARDS[:i] + REWARDS[i + 1 :]) for i, reward in enumerate(REWARDS)]
    assert leave_one_out(REWARDS) == pytest.approx(expected)


@given(groups)
def test_advantages_sum_to_zero_and_leave_one_out_is_the_centred_one_scaled(rewards: list[float]) -> None:
    centred = center_by_group(rewards)
    assert centred.sum() == pytest.approx(0.0, abs=1e-9)
    assert normalise_by_group(rewards).sum() == pytest.approx(0.0, abs=1e-6)
    assert leave_one_out(rewards) == pytest.approx(centred * len(rewards) / (len(rewards) - 1))


@given(groups, st.floats(-50, 50))
def test_a_constant_added_to_all_rewards_changes_nothing(rewards: list[float], constant: float) -> None:
    shifted = [reward + constant for reward in rewards]
    assert center_by_group(shifted) == pytest.approx(center_by_group(rewards), abs=1e-6)


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_group_of_one_and_a_constant_group_have_no_advantage(
    baseline: Callable[[Sequence[float]], np.ndarray],
) -> None:
    assert baseline([0.7]).tolist() == [0.0]
    assert baseline([0.1 + 0.2, 0.3, 0.3]).tolist() == [0.0, 0.0, 0.0]


def test_constant_groups_are_flagged() -> None:
    assert is_constant_group([1.0, 1.0, 1.0])
    assert is_constant_group([0.1 + 0.2, 0.3])
    assert is_constant_group([5.0])
    assert not is_constant_group([0.0, 1e-6])


@pytest.mark.parametrize("rewards", [[], [1.0, float("nan")], [[1.0], [2.0]]])
def test_rewards_that_are_none_are_refused(rewards: Sequence[float]) -> None:
    with pytest.raises(DataError):
        center_by_group(rewards)


def test_reward_to_go_counts_turns_and_discounts_per_turn() -> None:
    assert reward_to_go([0.0, 0.0, 1.0]).tolist() == [1.0, 1.0, 1.0]
    assert reward_to_go([1.0, 2.0, 4.0], discount=0.5).tolist() == [3.0, 4.0, 4.0]
    assert reward_to_go([1.0, 2.0], discount=0.0).tolist() == [1.0, 2.0]
    with pytest.raises(DataError, match=r"discount=1\.5"):
        reward_to_go([1.0], discount=1.5)
