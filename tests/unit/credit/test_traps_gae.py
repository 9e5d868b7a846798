"""Traps T10 to T13 of the specification, each as a claim. That no policy step happens while a critic is pre-trained
(T13) is in tests/e2e/test_ppo.py, with real weights.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from turnwise.credit.gae import Gae, length_adaptive_lambda
from turnwise.credit.values import TrajectoryValues, read_values, value_sequences
from turnwise.trajectory import EndReason, Message, Trajectory, Turn


def turn(prompt: list[int], sampled: list[int], reward: float) -> Turn:
    return Turn(
        prompt_ids=tuple(prompt),
        sampled_ids=tuple(sampled),
        sampler_logprobs=(-1.0,) * len(sampled),
        policy_version=1,
        reply=Message(role="assistant", content="x"),
        reward_parts={"outcome": reward},
    )


def played(rewards: tuple[float, float], stop: EndReason = EndReason.TERMINATED) -> Trajectory:
    """Two turns of two tokens, with two tokens of observation between them: the spec's V6."""
    turns = (turn([1], [2, 3], rewards[0]), turn([1, 2, 3, 4, 5], [6, 7], rewards[1]))
    return Trajectory(task_id="t", attempt=0, seed=0, turns=turns, end_reason=stop)


V6 = TrajectoryValues(turns=(np.array([0.2, 0.3]), np.array([0.4, 0.5])))


def flat(turns: tuple[np.ndarray, ...]) -> list[float]:
    return np.concatenate(turns).tolist()


def test_t10_values_at_observations_have_no_effect() -> None:
    one = played((0.0, 1.0))
    sequences = value_sequences(one)
    # Positions 0, 1, 4, 5 hold the states that tokens were drawn in; 2 and 3 belong to what the env said.
    answers = [0.2, 0.3, 0.9, 0.9, 0.4, 0.5]
    found = [
        Gae(policy_lambda=0.95).credit(one, read_values(one, sequences, [[*answers[:2], at2, at3, *answers[4:]]]))
        for at2, at3 in ((0.9, 0.9), (-1e6, 1e6))
    ]
    assert flat(found[0].advantages) == flat(found[1].advantages)
    assert flat(found[0].advantages) == pytest.approx([0.713937, 0.64625, 0.575, 0.5], abs=1e-6)


def test_t10_without_discount_and_lambda_an_advantage_is_return_minus_value() -> None:
    found = Gae(policy_lambda=1.0).credit(played((0.0, 1.0)), V6)
    assert flat(found.advantages) == pytest.approx([0.8, 0.7, 0.6, 0.5])


def test_t10_a_reward_always_stands_on_a_sampled_token() -> None:
    """A reward belongs to a turn, and comes with its last token; every unit of it arrives at the first state."""
    for rewards in ((1.0, 0.0), (0.0, 1.0), (0.3, 0.7)):
        returns = Gae().returns(played(rewards), V6)
        assert returns[0].tolist() == pytest.approx([1.0, 1.0])
        assert returns[1].tolist() == pytest.approx([rewards[1]] * 2)


def test_t10_a_truncated_end_is_bootstrapped_and_a_terminated_one_is_not() -> None:
    cut = played((0.0, 0.0), EndReason.MAX_TURNS)
    left_at = replace(V6, bootstrap=0.6)
    assert flat(Gae(gamma=0.9).returns(cut, left_at)) == pytest.approx([0.9 * 0.9 * 0.6] * 2 + [0.9 * 0.6] * 2)
    over = played((0.0, 0.0))
    assert flat(Gae(gamma=0.9).returns(over, V6)) == [0.0] * 4
    with pytest.raises(ValueError, match="nothing comes after that"):
        Gae().credit(over, left_at)


def test_t10_returns_cross_observations() -> None:
    """V5: the wrong way gives [0, 0] to the first turn."""
    assert flat(Gae().returns(played((0.0, 1.0)), V6)) == [1.0, 1.0, 1.0, 1.0]


def test_t11_turns_end_where_turns_end_and_not_where_a_reward_is() -> None:
    for level in ("token", "turn", "bilevel"):
        gae = Gae(level=level, gamma=0.9, policy_lambda=1.0)
        for rewards in ((0.0, 1.0), (1.0, 0.0), (0.0, 0.0)):
            found = gae.credit(played(rewards), V6)
            first = rewards[0] + 0.9 * rewards[1]
            base = V6.turns if level != "turn" else (np.full(2, 0.2), np.full(2, 0.4))
            want = [*(first - base[0]), *(rewards[1] - base[1])]
            assert flat(found.advantages) == pytest.approx(want), (level, rewards)


def test_t12_the_adaptive_lambda_stays_between_0_and_1() -> None:
    assert length_adaptive_lambda(10, 0.05) == 0.0  # the raw formula gives -1
    for length in (1, 2, 19, 20):
        assert length_adaptive_lambda(length, 0.05) == 0.0
    assert 0.0 < length_adaptive_lambda(21, 0.05) < length_adaptive_lambda(10**9, 0.05) <= 1.0


def test_t12_it_counts_sampled_tokens_and_not_the_length_of_the_sequence() -> None:
    short = played((0.0, 1.0))
    long_prompts = replace(
        short,
        turns=(
            turn([9] * 500, [2, 3], 0.0),
            turn([9] * 500 + [2, 3] + [9] * 500, [6, 7], 1.0),
        ),
    )
    lambdas = {Gae().credit(one, V6).policy_lambda for one in (short, long_prompts)}
    assert lambdas == {1 - 1 / (1.5 * 4)}


def test_t13_the_critics_targets_are_plain_returns_whatever_lambda_the_policy_has() -> None:
    for level in ("token", "turn", "bilevel"):
        for gae in (Gae(level=level), Gae(level=level, alpha=0.05), Gae(level=level, policy_lambda=0.0)):
            for values in (V6, TrajectoryValues(turns=(np.full(2, 7.0), np.full(2, -3.0)))):
                assert flat(gae.credit(played((0.25, 1.0)), values).returns) == pytest.approx([1.25, 1.25, 1.0, 1.0])


def test_t13_a_critic_lambda_below_1_leans_on_values() -> None:
    returns = Gae(critic_lambda=0.0).returns(played((0.0, 1.0)), V6)
    assert flat(returns) == pytest.approx([0.3, 0.4, 0.5, 1.0])
