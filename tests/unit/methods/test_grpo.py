"""GRPO's arithmetic: what each turn gets, which groups go, and how tokens share a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from attempts import rewarded
from turnwise.credit.advantages import leave_one_out
from turnwise.credit.weights import Normalisation, weighting
from turnwise.methods.base import datums_of
from turnwise.methods.grpo import COMPARISONS, Grpo
from turnwise.trajectory import TrajectoryGroup


def _group(*rewards: Sequence[float], is_trained: bool = True) -> TrajectoryGroup:
    return TrajectoryGroup(task_id="t", trajectories=tuple(rewarded(r, is_trained=is_trained) for r in rewards))


def _grpo(**more: object) -> Grpo:
    return Grpo(loss_fn="importance_sampling", loss_config={}, **more)  # pyright: ignore[reportArgumentType]


def test_every_turn_of_an_attempt_gets_its_centred_return() -> None:
    advantages = _grpo().advantages(_group([0, 1], [0], [0.5, 0, 0], [1]))
    assert [a.tolist() for a in advantages] == [[0.375] * 2, [-0.625], [-0.125] * 3, [0.375]]


def test_reward_to_go_credits_a_turn_with_what_comes_after() -> None:
    first, second = _grpo(per_turn=True).advantages(_group([1, 0], [0, 1]))
    assert first.tolist() == [0.0, -0.5]
    assert second.tolist() == [0.0, 0.5]


def test_reward_to_go_equals_the_trajectorys_when_only_the_end_counts_and_lengths_agree() -> None:
    group = _group([0, 0, 1], [0, 0, 0], [0, 0, 0.5])
    for ours, theirs in zip(_grpo(per_turn=True).advantages(group), _grpo().advantages(group), strict=True):
        np.testing.assert_allclose(ours, theirs)


def test_an_attempt_that_is_over_counts_as_zero_in_later_baselines() -> None:
    short, long = _grpo(per_turn=True).advantages(_group([1.0], [0.0, 1.0]))
    assert short.tolist() == [0.0]
    assert long.tolist() == [0.0, 0.5], "alone at turn 1, it is compared with the other's 0, not with itself"


def test_the_per_turn_gradient_is_unbiased_with_variable_lengths() -> None:
    """A policy that stops or goes on: the mean of sum_k grad log pi * A is (1 - 1/G) times the true gradient."""
    rng = np.random.default_rng(0)
    p, reward_now, reward_later, group_size = 0.4, 0.3, 1.0, 4
    true = (reward_later - reward_now) * p * (1 - p)  # d/d logit of p * later + (1 - p) * now
    method, total, num_groups = _grpo(per_turn=True), 0.0, 4000
    for _ in range(num_groups):
        goes_on = rng.random(group_size) < p
        group = _group(*([0.0, reward_later] if on else [reward_now] for on in goes_on))
        for on, advantages in zip(goes_on, method.advantages(group), strict=True):
            total += (float(on) - p) * advantages[0]
    estimate = total / (num_groups * group_size)
    assert estimate == pytest.approx(true * (1 - 1 / group_size), abs=0.01)


def test_constant_groups_are_dropped_and_counted() -> None:
    kept = _grpo().keep([_group([1], [0]), _group([1], [1]), _group([0.1 + 0.2], [0.3]), _group([1])])
    assert kept.reasons == (None, "constant", "constant", "too_small")
    assert kept.dropped == {"constant": 2, "too_small": 1}
    assert len(kept.groups) == 1


def test_equal_returns_with_other_timing_still_teach_per_turn() -> None:
    group = _group([1, 0], [0, 1])
    assert _grpo().keep([group]).dropped == {"constant": 1}
    assert _grpo(per_turn=True).keep([group]).dropped == {}


def test_a_group_without_trained_turns_is_dropped() -> None:
    assert _grpo().keep([_group([1], [0], is_trained=False)]).dropped == {"masked": 1}


def test_trained_tokens_of_a_step_share_its_weight() -> None:
    lessons = _grpo().lessons([_group([0, 1], [0])])
    weights = [w for datum in datums_of(lessons) for w in datum.loss_fn_inputs["weights"].tolist()]
    assert sum(weights) == pytest.approx(1.0)
    assert sorted(set(weights)) == [0.0, pytest.approx(1 / 6)]


def test_lessons_keep_the_order_of_attempts() -> None:
    group = _group([0, 1], [0], [0.5])
    lessons = _grpo(compare=COMPARISONS["leave_one_out"]).lessons([group])
    assert [lesson.trajectory for lesson in lessons] == list(group.trajectories)
    assert [lesson.advantages[0] for lesson in lessons] == leave_one_out(group.rewards).tolist()
    assert all(len(lesson.datums) == 1 for lesson in lessons)


@pytest.mark.parametrize(("name", "total"), [("token_mean", 1.0), ("seq_mean", 1.0), ("const", 6 / (2 * 8))])
def test_every_normalisation_has_its_total_weight(name: Normalisation, total: float) -> None:
    lessons = _grpo(weigh=weighting(name, max_tokens=8)).lessons([_group([0, 1], [0])])
    weights = [w for datum in datums_of(lessons) for w in datum.loss_fn_inputs["weights"].tolist()]
    assert sum(weights) == pytest.approx(total)
