"""Advantages over a critic's values, against the vectors of the specification and against themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.credit.gae import Gae, bilevel_gae, gae, length_adaptive_lambda, token_gae, turn_gae, whiten
from turnwise.credit.values import TrajectoryValues
from turnwise.errors import DataError
from turnwise.trajectory import EndReason, Message, Trajectory, Turn

VECTOR_FILE = Path(__file__).parents[1] / "engine" / "training" / "algorithm_vectors.json"
VECTORS: dict[str, Any] = json.loads(VECTOR_FILE.read_text())
VALUES = [np.array([0.2, 0.3]), np.array([0.4, 0.5])]
"""Of the spec's V6: two turns of two tokens; its observations have values of their own, which nobody is asked for."""
ACTIONS = [0, 1, 4, 5]


def actions_of(name: str) -> list[float]:
    return [VECTORS[name][at] for at in ACTIONS]


def flat(turns: tuple[np.ndarray, ...]) -> list[float]:
    return np.concatenate(turns).tolist()


def trajectory(rewards: list[float], lengths: list[int], stop: EndReason = EndReason.TERMINATED) -> Trajectory:
    turns = tuple(
        Turn(
            prompt_ids=(1,),
            sampled_ids=(2,) * length,
            sampler_logprobs=(-1.0,) * length,
            policy_version=1,
            reply=Message(role="assistant", content="x"),
            reward_parts={"outcome": reward},
        )
        for reward, length in zip(rewards, lengths, strict=True)
    )
    return Trajectory(task_id="t", attempt=0, seed=0, turns=turns, end_reason=stop)


def values_of(values: list[np.ndarray], bootstrap: float = 0.0) -> TrajectoryValues:
    return TrajectoryValues(turns=tuple(values), bootstrap=bootstrap)


@pytest.mark.parametrize(("lam", "name"), [(0.95, "gae_skip_l.95"), (1.0, "gae_skip_l1")])
def test_token_gae_skips_what_the_env_says(lam: float, name: str) -> None:
    assert flat(token_gae([0.0, 1.0], VALUES, gamma=1.0, lam=lam)) == pytest.approx(actions_of(name), abs=1e-6)


def test_token_gae_is_not_the_one_that_takes_observations_for_steps() -> None:
    got = flat(token_gae([0.0, 1.0], VALUES, gamma=1.0, lam=0.95))
    assert got != pytest.approx(actions_of("gae_plain_l.95(TRAP)"), abs=1e-3)
    same = flat(token_gae([0.0, 1.0], VALUES, gamma=1.0, lam=1.0))
    assert same == pytest.approx(actions_of("gae_plain_l1")), "with neither discount nor lambda both are return - value"


def test_the_recursion_gives_the_vector_with_a_discount_per_token() -> None:
    got = gae([0, 0, 0, 1], np.concatenate(VALUES), discounts_N=0.9, lam=1.0)
    assert got.tolist() == pytest.approx(actions_of("gae_skip_g.9_l1"), abs=1e-6)
    assert got.tolist() != pytest.approx(actions_of("gae_plain_g.9_l1(TRAP)"), abs=1e-3)


def test_the_reward_of_an_earlier_turn_is_not_lost_at_the_observations_after_it() -> None:
    """In the vector it stands on an observation, which the recursion skips: nothing of it arrives."""
    lost = actions_of("gae_reward_on_obs_lost(TRAP)")
    assert lost == pytest.approx(flat(token_gae([0.0, 1.0], VALUES, gamma=1.0, lam=1.0)))
    got = flat(token_gae([0.5, 1.0], VALUES, gamma=1.0, lam=1.0))
    assert np.subtract(got, lost) == pytest.approx([0.5, 0.5, 0.0, 0.0])


def test_the_discount_counts_turns_not_tokens() -> None:
    assert flat(token_gae([0.0, 1.0], VALUES, gamma=0.9, lam=1.0)) == pytest.approx([0.7, 0.6, 0.6, 0.5])


def test_a_turn_may_be_cut_into_any_number_of_tokens() -> None:
    """With lambda 1 the advantage of a turn's first token does not depend on how many tokens follow it."""
    short = token_gae([0.0, 1.0], [np.array([0.2]), np.array([0.4])], gamma=0.9, lam=1.0)
    long = token_gae([0.0, 1.0], [np.array([0.2, 0.9, 0.1]), np.array([0.4, 0.3])], gamma=0.9, lam=1.0)
    assert [turn[0] for turn in long] == pytest.approx([turn[0] for turn in short])


def test_turn_gae_gives_the_vectors() -> None:
    values = [np.array([0.2, 9.0]), np.array([0.4, 9.0, 9.0])]
    got = turn_gae([0.0, 1.0], values, gamma=0.95, lam=0.9)
    want = VECTORS["turn_gae r=[0,1] V=[.2,.4] g=.95 l=.9"]
    assert [turn.tolist() for turn in got] == [pytest.approx([want[0]] * 2), pytest.approx([want[1]] * 3)]
    got = turn_gae([0.0, 0.0], values, gamma=0.95, lam=0.9, bootstrap=0.5)
    assert [turn[0] for turn in got] == pytest.approx(VECTORS["turn_gae truncated bootstrap .5"])


@pytest.mark.parametrize(("rewards", "name"), [([1.0, 1.0], "bilevel r=[1,1]"), ([0.0, 1.0], "bilevel sparse r=[0,1]")])
def test_bilevel_gae_gives_the_vectors(rewards: list[float], name: str) -> None:
    values = np.arange(1, 11) / 10
    got = bilevel_gae(rewards, [values[:5], values[5:]], gamma=0.95, turn_lam=1.0, token_lams=[1.0, 1.0])
    assert flat(got) == pytest.approx(VECTORS[name], abs=1e-6)


def test_decoupled_gae_gives_policy_and_critic_their_own() -> None:
    found = Gae(policy_lambda=0.95).credit(trajectory([0.0, 1.0], [2, 2]), values_of(VALUES))
    policy, critic = VECTORS["decoupled: policy A(l.95)/critic target(l1)"]
    assert flat(found.advantages) == pytest.approx([policy[at] for at in ACTIONS], abs=1e-6)
    assert flat(found.returns) == pytest.approx([critic[at] for at in ACTIONS], abs=1e-6)


def test_length_adaptive_lambda_gives_the_tables() -> None:
    lengths = (10, 20, 40, 100, 1000, 10000)
    got = [length_adaptive_lambda(length, 0.05) for length in lengths]
    assert got == pytest.approx(VECTORS["lambda_LA a=.05 l=10,20,40,100,1000,10000"], abs=1e-6)
    got = [length_adaptive_lambda(length, 1.5) for length in lengths if length in (10, 100, 1000)]
    assert got == pytest.approx(VECTORS["lambda_LA a=1.5 l=10,100,1000"], abs=1e-6)


def test_its_weights_add_up_to_a_share_of_the_length() -> None:
    for length in (40, 400):
        lam = length_adaptive_lambda(length, 0.5)
        assert sum(lam**k for k in range(100 * length)) == pytest.approx(0.5 * length, rel=1e-3)


def test_a_fixed_lambda_forgets_the_end_of_a_long_attempt() -> None:
    assert VECTORS["0.95^100"] == pytest.approx(0.95**100, abs=1e-6)
    zeros = [np.zeros(101)]
    fixed = token_gae([1.0], zeros, gamma=1.0, lam=0.95)[0][0]
    adaptive = token_gae([1.0], zeros, gamma=1.0, lam=length_adaptive_lambda(101, 1.5))[0][0]
    assert fixed == pytest.approx(0.95**100)
    assert adaptive > 0.5


@pytest.mark.parametrize("level", ["token", "turn", "bilevel"])
def test_lambda_one_without_discount_gives_return_minus_value(level: Any) -> None:
    found = Gae(level=level, policy_lambda=1.0).credit(
        trajectory([0.25, 1.0], [2, 3]), values_of([*VALUES[:1], np.ones(3)])
    )
    for k, reward_to_go in enumerate([1.25, 1.0]):
        values_S = [VALUES[0], np.ones(3)][k]
        base = values_S[0] if level == "turn" else values_S
        assert found.advantages[k].tolist() == pytest.approx((reward_to_go - base * np.ones(len(values_S))).tolist())
        assert found.returns[k].tolist() == pytest.approx([reward_to_go] * len(values_S))


@pytest.mark.parametrize("level", ["token", "turn", "bilevel"])
def test_perfect_values_leave_nothing_to_learn_at_any_lambda(level: Any) -> None:
    values = values_of([np.full(2, 0.81 * 1.0), np.full(3, 0.9), np.full(1, 1.0)])
    played = trajectory([0.0, 0.0, 1.0], [2, 3, 1])
    for lam in (0.0, 0.3, 1.0, None):
        found = Gae(level=level, gamma=0.9, policy_lambda=lam).credit(played, values)
        assert flat(found.advantages) == pytest.approx([0.0] * 6, abs=1e-12)


def test_the_adaptive_lambda_counts_tokens_or_turns() -> None:
    played, values = trajectory([0.0, 1.0], [20, 30]), values_of([np.zeros(20), np.zeros(30)])
    assert Gae(level="token").credit(played, values).policy_lambda == pytest.approx(1 - 1 / (1.5 * 50))
    assert Gae(level="turn").credit(played, values).policy_lambda == pytest.approx(1 - 1 / (1.5 * 2))
    assert Gae(level="token", policy_lambda=0.3).credit(played, values).policy_lambda == 0.3


@given(
    st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=4), min_size=1, max_size=4),
    st.data(),
)
def test_token_gae_equals_the_definition_as_a_double_sum(turns: list[list[float]], data: st.DataObject) -> None:
    """A_t = sum over l of (product of gamma lambda between) delta_{t+l}."""
    rewards = [data.draw(st.floats(-3, 3)) for _ in turns]
    gamma, lam = data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1))
    bootstrap = data.draw(st.floats(-3, 3))
    values = [v for turn in turns for v in turn]
    ends = {sum(map(len, turns[: k + 1])) - 1: k for k in range(len(turns))}
    discounts = [gamma if t in ends else 1.0 for t in range(len(values))]
    after = [*values[1:], bootstrap]
    deltas = [
        (rewards[ends[t]] if t in ends else 0.0) + discounts[t] * after[t] - values[t] for t in range(len(values))
    ]
    want = [
        sum(
            float(np.prod([discounts[s] * lam for s in range(t, later)])) * deltas[later]
            for later in range(t, len(values))
        )
        for t in range(len(values))
    ]
    got = token_gae(rewards, [np.array(turn) for turn in turns], gamma=gamma, lam=lam, bootstrap=bootstrap)
    assert flat(got) == pytest.approx(want, abs=1e-9)


def test_whitened_advantages_have_mean_0_and_deviation_1_over_the_turns_that_are_trained() -> None:
    advantages = [(np.array([1.0, 2.0]), np.array([50.0])), (np.array([4.0]),)]
    white = whiten(advantages, [[True, False], [True]])
    trained = np.concatenate([white[0][0], white[1][0]])
    assert trained.mean() == pytest.approx(0.0, abs=1e-9)
    assert trained.std() == pytest.approx(1.0, abs=1e-6)
    assert whiten([(np.array([3.0, 3.0]),)], [[True]])[0][0].tolist() == [0.0, 0.0]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DataError, match="2 rewards for 1 turns"):
        token_gae([0.0, 1.0], VALUES[:1], gamma=1.0, lam=1.0)
    with pytest.raises(DataError, match="turn 1 has no values"):
        token_gae([0.0, 1.0], [VALUES[0], np.zeros(0)], gamma=1.0, lam=1.0)
    with pytest.raises(DataError, match=r"lambda=1\.5"):
        gae([0.0], [0.0], discounts_N=1.0, lam=1.5)
    with pytest.raises(DataError, match="an alpha above 0"):
        length_adaptive_lambda(10, 0.0)
    with pytest.raises(DataError, match=r"values for turns of \[2, 2\] tokens"):
        Gae().credit(trajectory([0.0, 1.0], [2, 3]), values_of(VALUES))
