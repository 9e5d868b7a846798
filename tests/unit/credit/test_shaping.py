"""What is made of rewards, and what a group's baseline takes off again."""

from __future__ import annotations

import pytest

from turnwise.credit.advantages import center_by_group, compare_by_turn, reward_to_go
from turnwise.credit.shaping import NO_SHAPING, RewardConfig, RewardWeights, Shaping, shape_group, shape_trajectory
from turnwise.errors import DataError
from turnwise.trajectory import EndReason, TrajectoryGroup
from unit.credit.groups import make_attempt, make_group

PHI = [[0.1, 0.4, 0.9, 7.0], [0.1, 0.2, 7.0], [0.1, 0.0, 0.3, 7.0]]
"""The last potential is of a state after the end: it must not matter."""
REWARDS = [[0.0, 0.0, 1.0], [0.0, 0.5], [0.0, 0.0, 0.0]]


def _potential_group() -> TrajectoryGroup:
    attempts = [
        make_attempt(rewards, attempt=index, potentials=phi)
        for index, (rewards, phi) in enumerate(zip(REWARDS, PHI, strict=True))
    ]
    return TrajectoryGroup(task_id="t", trajectories=tuple(attempts))


def test_without_rules_a_group_stays_as_it_is() -> None:
    group = make_group([1.0], [0.0])
    assert shape_group(group, NO_SHAPING) is group


def test_channels_are_weighted_and_only_their_sum_counts() -> None:
    shaped = shape_trajectory(
        make_attempt([2.0], part="format"), Shaping(RewardConfig(weights=RewardWeights(format=0.25)))
    )
    assert shaped.turns[0].reward_parts == {"format": 0.5}
    assert shaped.total_reward == 0.5
    assert (
        shape_trajectory(make_attempt([2.0]), Shaping(RewardConfig(weights=RewardWeights(format=0.25)))).total_reward
        == 2.0
    )


def test_potentials_cancel_in_a_baseline_over_whole_attempts() -> None:
    group = _potential_group()
    shaped = shape_group(group, Shaping(RewardConfig(potential=True), gamma=1.0))
    assert shaped.rewards == pytest.approx([reward - 0.1 for reward in group.rewards])
    assert center_by_group(shaped.rewards) == pytest.approx(center_by_group(group.rewards))


def test_potentials_change_credit_per_turn() -> None:
    group = _potential_group()
    shaped = shape_group(group, Shaping(RewardConfig(potential=True), gamma=1.0))
    before, after = (
        compare_by_turn([reward_to_go([t.reward for t in one.turns]) for one in g.trajectories], center_by_group)
        for g in (group, shaped)
    )
    assert after[0][0] == pytest.approx(before[0][0]), "turn 0 begins in the state that all share"
    assert after[0][1] != pytest.approx(before[0][1])


def test_a_cut_attempt_keeps_the_potential_it_was_left_with() -> None:
    cut = make_attempt([0.0], potentials=[0.2, 0.6], end_reason=EndReason.MAX_TURNS)
    assert shape_trajectory(cut, Shaping(RewardConfig(potential=True), gamma=0.5)).total_reward == pytest.approx(
        0.5 * 0.6 - 0.2
    )


def test_an_env_without_potentials_is_refused_with_what_to_do() -> None:
    with pytest.raises(DataError, match=r"give it a method potential\(\) -> float, or set reward.potential=false"):
        shape_trajectory(make_attempt([1.0]), Shaping(RewardConfig(potential=True), gamma=1.0))


def test_a_length_penalty_is_a_penalty_on_the_last_turn() -> None:
    attempt = make_attempt([0.0, 1.0], sizes=[3, 6])
    shaped = shape_trajectory(attempt, Shaping(RewardConfig(max_length=10, length_buffer=4, length_penalty=2.0)))
    assert shaped.turns[0].reward_parts == {"outcome": 0.0}
    assert shaped.turns[1].reward_parts == {"outcome": 1.0, "penalty": pytest.approx(-2.0 * 3 / 4)}


def test_turn_decay_makes_an_outcome_that_took_longer_worth_less() -> None:
    short, long = (
        shape_trajectory(make_attempt(r), Shaping(RewardConfig(turn_decay=0.9))) for r in ([1.0], [0.0, 0.0, 1.0])
    )
    assert (short.total_reward, long.total_reward) == pytest.approx((1.0, 0.81))


def test_cut_attempts_can_be_left_out_of_the_loss_and_stay_in_the_baseline() -> None:
    cut = make_attempt([0.5], end_reason=EndReason.MAX_TOKENS)
    group = TrajectoryGroup(task_id="t", trajectories=(cut, make_attempt([1.0], attempt=1)))
    shaped = shape_group(group, Shaping(RewardConfig(on_truncated="mask")))
    assert [t.turns[0].is_trained for t in shaped.trajectories] == [False, True]
    assert shaped.rewards == group.rewards
