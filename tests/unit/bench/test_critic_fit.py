from __future__ import annotations

from dataclasses import replace

import pytest

from turnwise.bench.critic_fit import returns_of, row, values_by_state
from turnwise.errors import ConfigError
from turnwise.trajectory import EndReason, Message, Trajectory, Turn


def attempt(states: str, reward: float) -> Trajectory:
    """One turn of two tokens in each state; the reward comes with the last."""
    turns = tuple(
        Turn(
            prompt_ids=(1, 2),
            sampled_ids=(3, 4),
            sampler_logprobs=(-1.0, -1.0),
            policy_version=0,
            reply=Message(role="assistant", content="x"),
            reward_parts={"outcome": reward if place + 1 == len(states) else 0.0},
            env_state=state,
        )
        for place, state in enumerate(states)
    )
    start = (Message(role="user", content="go"),)
    return Trajectory(task_id="t", attempt=0, seed=0, start=start, turns=turns, end_reason=EndReason.TERMINATED)


WON, LOST = attempt("aw", 1.0), attempt("al", 0.0)


def test_the_table_knows_what_a_state_decides_and_no_more() -> None:
    attempts = [WON] * 30 + [LOST] * 30
    values = values_by_state(attempts)
    assert [len(turn_S) for turn_S in values[0]] == [2, 2]
    assert values[0][0] == pytest.approx(0.5, abs=0.02)  # the first state is the same, whatever comes
    assert values[0][1] == pytest.approx(1.0, abs=0.03)
    assert values[-1][1] == pytest.approx(0.0, abs=0.03)
    shares = [float(cell) for cell in row("table", attempts, values).split("|")[2:-1]]
    assert shares[1] == pytest.approx(0.0, abs=0.01)  # the first fifth
    assert shares[4] == pytest.approx(1.0, abs=0.01)  # four tokens: the last fifth is empty


def test_an_attempt_is_not_in_the_table_that_judges_it() -> None:
    attempts = [LOST] * 20
    attempts[7] = attempt("aw", 1.0)
    assert values_by_state(attempts)[7][0] == pytest.approx(0.0)


def test_a_world_that_does_not_name_its_states_is_told_so() -> None:
    nameless = replace(WON, turns=tuple(replace(turn, env_state=None) for turn in WON.turns))
    with pytest.raises(ConfigError, match="state_key"):
        values_by_state([nameless, LOST])


def test_returns_are_plain_sums_of_what_comes_after() -> None:
    assert [due_S.tolist() for due_S in returns_of(WON)] == [[1.0, 1.0], [1.0, 1.0]]
