"""The vectors of the algorithms' specification that are about groups, turns and rewards, by their names there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from turnwise.credit.advantages import (
    center_by_group,
    divide_by_mean,
    leave_one_out,
    normalise_by_group,
    outcome_plus_turn,
    reward_to_go,
    step_advantages,
    whiten,
)
from turnwise.credit.shaping import potential_rewards, soft_overlong
from turnwise.methods.gigpo import Gigpo
from turnwise.methods.mt_grpo import MtGrpo
from turnwise.methods.reinforce import Reinforce
from unit.credit.groups import make_attempt, make_group

VECTOR_FILE = Path(__file__).parents[1] / "engine" / "training" / "algorithm_vectors.json"
VECTORS = json.loads(VECTOR_FILE.read_text())
REWARDS = [1.0, 0.0, 0.5, 1.0]
GIGPO_STATES = [["s0", "s1", "s2"], ["s0", "s1", "s1"], ["s0", "s2"]]
GIGPO_REWARDS = [[0, 0, 1.0], [0, 0, 0.0], [0, 1.0]]


@pytest.mark.parametrize(
    ("key", "baseline"),
    [("grpo_centered", center_by_group), ("rloo", leave_one_out), ("maxrl", divide_by_mean)],
)
def test_group_baselines(key: str, baseline) -> None:
    assert baseline(REWARDS) == pytest.approx(VECTORS[key], abs=1e-6)


def test_grpo_divides_by_the_unbiased_deviation_not_the_populations() -> None:
    std, expected = VECTORS["grpo_std_unbiased"]
    assert np.std(REWARDS, ddof=1) == pytest.approx(std, abs=1e-6)
    assert normalise_by_group(REWARDS) == pytest.approx(expected, abs=1e-6)
    assert normalise_by_group(REWARDS) != pytest.approx(VECTORS["grpo_std_pop"][1], abs=1e-2)


def test_a_baseline_counts_attempts_and_not_their_turns() -> None:
    """`trap_rowwise_mean_when_steps_are_rows`: attempts of 2, 5, 3 and 2 turns; each counts once."""
    wrong_mean, wrong = VECTORS["trap_rowwise_mean_when_steps_are_rows"]
    group = make_group(*[[0.0] * (n - 1) + [r] for n, r in zip([2, 5, 3, 2], REWARDS, strict=True)])
    assert np.average(REWARDS, weights=[2, 5, 3, 2]) == pytest.approx(wrong_mean, abs=1e-6)
    assert center_by_group(group.rewards) == pytest.approx(VECTORS["grpo_centered"])
    assert center_by_group(group.rewards) != pytest.approx(wrong, abs=1e-2)


def test_reward_to_go_crosses_observations_and_is_not_reset_there() -> None:
    expected = VECTORS["reward_to_go_skip_obs"]
    first, second = reward_to_go([0.0, 1.0])
    assert [first, first, 0.0, 0.0, second, second] == expected
    assert expected != VECTORS["reinforcepp_reset_at_obs(TRAP)"]


def test_mt_grpo() -> None:
    outcomes, turns = [1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]
    found = outcome_plus_turn([[t, o] for t, o in zip(turns, outcomes, strict=True)])
    assert [own[0] for own in found] == pytest.approx(VECTORS["mt_grpo turn1"], abs=1e-6)
    assert [own[1] for own in found] == pytest.approx(VECTORS["mt_grpo last"], abs=1e-6)
    method = MtGrpo(loss_fn="importance_sampling", loss_config={})
    group = make_group(*[[t, o] for t, o in zip(turns, outcomes, strict=True)])
    assert [own.tolist() for own in method.advantages(group)] == [own.tolist() for own in found]


def test_gigpo() -> None:
    vector = VECTORS["gigpo"]
    returns = [reward_to_go(own, discount=0.95) for own in GIGPO_REWARDS]
    assert [own.tolist() for own in returns] == [pytest.approx(own) for own in vector["returns"]]
    steps = step_advantages(returns, GIGPO_STATES)
    assert [own.tolist() for own in steps] == [pytest.approx(own, abs=1e-6) for own in vector["A_S"]]
    group = make_group(*GIGPO_REWARDS, states=GIGPO_STATES)
    assert center_by_group(group.rewards) == pytest.approx(vector["A_E"], abs=1e-6)
    found = Gigpo(loss_fn="importance_sampling", loss_config={}).advantages(group)
    assert [own.tolist() for own in found] == [pytest.approx(own, abs=1e-6) for own in vector["A"]]


def test_rebn() -> None:
    returns = np.concatenate([reward_to_go(own, discount=0.95) for own in GIGPO_REWARDS])
    assert whiten(returns) == pytest.approx(VECTORS["rebn"], abs=1e-6)
    method = Reinforce(loss_fn="importance_sampling", loss_config={}, counts_tokens=False, gamma=0.95)
    (found,) = method.advantages([make_group(*GIGPO_REWARDS)])
    assert np.concatenate(found) == pytest.approx(VECTORS["rebn"], abs=1e-6)


def test_a_shared_trained_token_gets_nothing_in_sum() -> None:
    total = center_by_group(REWARDS).sum()
    assert total == pytest.approx(VECTORS["tree: sum of group advantages on a shared prefix token"], abs=1e-12)


def test_potential_based_shaping() -> None:
    shaping, shaped, total = VECTORS["pbrs F, shaped, sums"]
    changes = potential_rewards([0.1, 0.25, 0.5, 0.0], gamma=1.0)
    assert changes == pytest.approx(shaping)
    assert np.array([0.0, 0.0, 1.0]) + changes == pytest.approx(shaped)
    assert 1.0 + changes.sum() == pytest.approx(total)


def test_turn_decay_is_the_discounted_return() -> None:
    assert reward_to_go([0, 0, 1.0], discount=0.9) == pytest.approx(VECTORS["turn decay r*g^(T-i)"])


def test_soft_overlong() -> None:
    found = [soft_overlong(length, 100, 20) for length in (80, 85, 95, 100, 101)]
    assert found == pytest.approx(VECTORS["soft overlong 80,85,95,100,101"])
    assert soft_overlong(101, 100, 0) == -1.0
    assert soft_overlong(100, 100, 0) == 0.0


def test_reinforce_pp_counts_every_token() -> None:
    """Two attempts with returns 0 and 1 in replies of 1 and 3 tokens: mean 3/4, variance 3/16."""
    method = Reinforce(loss_fn="importance_sampling", loss_config={}, counts_tokens=True)
    group = make_group([0.0], [1.0])
    group = type(group)(
        task_id="t", trajectories=(make_attempt([0.0], sizes=[1]), make_attempt([1.0], attempt=1, sizes=[3]))
    )
    ((low,), (high,)) = method.advantages([group])[0]
    assert [low, high] == pytest.approx([-0.75 / np.sqrt(3 / 16), 0.25 / np.sqrt(3 / 16)])
