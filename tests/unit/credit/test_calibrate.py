"""Values that are corrected by the other attempts of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from attempts import rewarded
from turnwise.credit.calibrate import calibrate, calibrate_by_world
from turnwise.credit.gae import Gae
from turnwise.credit.values import TrajectoryValues
from turnwise.trajectory import WORLD_LABEL, EndReason, Trajectory

GAE = Gae(policy_lambda=1.0)


def constant(attempts: Sequence[Trajectory], value: float = 0.0) -> list[TrajectoryValues]:
    return [TrajectoryValues(turns=tuple(np.full(2, value) for _ in one.turns)) for one in attempts]


def right(attempt: Trajectory) -> TrajectoryValues:
    """What a critic says that knows the future."""
    return TrajectoryValues(turns=GAE.returns(attempt, constant([attempt])[0]))


def test_a_new_critic_is_given_the_mean_of_what_comes_at_each_turn() -> None:
    attempts = [rewarded([0.5, 0.5]) for _ in range(200)]
    first, last = calibrate(constant(attempts), attempts, GAE)[0].turns
    assert first == pytest.approx([1.0, 1.0], abs=0.02), "the ridge leaves a little"
    assert last == pytest.approx([0.5, 0.5], abs=0.02)


def test_what_came_of_an_attempt_does_not_change_its_own_values() -> None:
    others = [rewarded([0.2, 0.4]), rewarded([0.0, 1.0]), rewarded([0.3])]
    found = [
        calibrate(constant([*others, one]), [*others, one], GAE)[-1] for one in (rewarded([0.0, 0.0]), rewarded([1, 9]))
    ]
    for ours, theirs in zip(found[0].turns, found[1].turns, strict=True):
        assert ours == pytest.approx(theirs)
    longer = [*others, rewarded([0.0] * 9)]
    assert calibrate(constant(longer), longer, GAE)[-1].turns[0] == pytest.approx(found[0].turns[0])


def test_by_turns_only_the_states_count_that_the_critic_learns() -> None:
    """At the other tokens of a turn it says anything; what it says at the first ones is right, and stays."""
    by_turn, rng = Gae(policy_lambda=1.0, level="turn"), np.random.default_rng(0)
    attempts = [rewarded([0.0, float(number % 2)]) for number in range(6)]
    values = [
        TrajectoryValues(turns=tuple(np.array([turn[0], rng.normal(0, 5)]) for turn in right(one).turns))
        for one in attempts
    ]
    for found, known in zip(calibrate(values, attempts, by_turn), values, strict=True):
        assert [turn[0] for turn in found.turns] == [turn[0] for turn in known.turns]


def test_a_critic_that_is_right_stays_as_it_is() -> None:
    attempts = [rewarded([0.0, float(number % 2)]) for number in range(6)]
    values = [right(one) for one in attempts]
    assert calibrate(values, attempts, GAE) == values


def test_a_critic_that_only_makes_noise_is_believed_less() -> None:
    rng = np.random.default_rng(0)
    attempts = [rewarded([0.0, float(rng.random() < 0.5)]) for _ in range(64)]
    noise = [TrajectoryValues(turns=tuple(rng.normal(0, 2, 2) for _ in one.turns)) for one in attempts]

    def error(values: Sequence[TrajectoryValues]) -> float:
        gaps = [right(one).turns[0] - known.turns[0] for one, known in zip(attempts, values, strict=True)]
        return float(np.mean(np.square(gaps)))

    assert error(calibrate(noise, attempts, GAE)) < 0.4
    assert error(noise) > 2


def test_a_limit_moves_the_value_after_the_last_turn_too() -> None:
    cut = replace(rewarded([0.0]), end_reason=EndReason.MAX_TURNS)
    attempts = [*(rewarded([1.0, 1.0]) for _ in range(50)), cut]
    assert calibrate(constant(attempts), attempts, GAE)[-1].bootstrap == pytest.approx(1.0, abs=0.05)
    ended = [*attempts[:-1], rewarded([0.0])]
    assert calibrate(constant(ended), ended, GAE)[-1].bootstrap == 0


def test_a_single_attempt_has_nothing_to_be_compared_with() -> None:
    values = constant([rewarded([1.0])], 0.3)
    assert calibrate(values, [rewarded([1.0])], GAE) == values


def test_each_world_of_a_mix_is_corrected_by_itself() -> None:
    attempts = [
        replace(rewarded([paid]), labels={WORLD_LABEL: world}) for world, paid in (("a", 1.0), ("b", 0.0)) * 100
    ]
    found = calibrate_by_world(constant(attempts), attempts, GAE)
    assert found[0].turns[0] == pytest.approx([1.0, 1.0], abs=0.02)
    assert found[1].turns[0].tolist() == [0, 0], "there the critic was right"
