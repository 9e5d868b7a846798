"""Attempts that fail, and attempts that a limit ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from turnwise.doctor import diagnose
from turnwise.errors import Party
from turnwise.trajectory import EndReason, Failure, Trajectory
from unit.doctor.conftest import WrittenRun, make_attempt

NewRun = Callable[[], WrittenRun]


def _failed(party: Party, detail: str, traceback: str = "", **facts: int | str) -> Trajectory:
    failure = Failure(party=party, detail=detail, traceback=traceback, facts=facts)
    return replace(make_attempt(), end_reason=EndReason.FAILED, failure=failure, is_success=None)


@pytest.mark.parametrize("party", ["env", "tool", "judge", "reward", "sampler", "renderer"])
def test_a_party_that_fails_is_named_with_its_traceback_and_line(new_run: NewRun, party: str) -> None:
    run = new_run()
    run.set(**{f"rollout__failures_{party}": 4.0})
    run.failed = [
        _failed(Party(party), "step: KeyError('x')", "File my_env.py, line 12\nKeyError: 'x'", place="my_env.py:12")
    ]
    (finding,) = diagnose(run.write())
    assert finding.name == f"{party}_fails"
    assert "my_env.py:12" in finding.seen
    assert finding.evidence.endswith("KeyError: 'x'")


def test_one_lost_play_in_a_hundred_is_no_finding(run: WrittenRun) -> None:
    run.set(rollout__failures_env=[1.0] + [0.0] * 9)
    run.failed = [_failed(Party.ENV, "step gave no answer within 60 s")]
    assert run.names == []


def test_a_first_prompt_that_is_too_long_is_no_fault_of_the_env(run: WrittenRun) -> None:
    run.set(rollout__failures_context=16.0)
    run.failed = [_failed(Party.CONTEXT, "the first prompt does not fit", needed_tokens=31, limit_tokens=20)]
    (finding,) = diagnose(run.write())
    assert (finding.name, finding.numbers["needed"], finding.numbers["limit"]) == ("prompt_too_long", 31, 20)
    assert finding.fixes[0].option == "rollout.max_trajectory_tokens=32"


def test_failures_of_an_evaluation_count_where_no_step_was_made(run: WrittenRun) -> None:
    run.steps, run.attempts = [], []
    run.failed = [_failed(Party.ENV, "step: KeyError('x') at my_env.py:12")]
    run.evaluation("start", 0, 0.0, num_failed=64)
    assert run.names == ["env_fails"]


@pytest.mark.parametrize(
    ("name", "metric", "bad", "fine"),
    [
        ("context_full", "rollout__stop_max_tokens_share", 0.5, 0.1),
        ("out_of_time", "rollout__stop_time_limit_share", 0.4, 0.1),
        ("out_of_turns", "rollout__stop_max_turns_share", 1.0, 0.5),
    ],
)
def test_limits_that_end_attempts(new_run: NewRun, name: str, metric: str, bad: float, fine: float) -> None:
    run = new_run()
    run.set(**{metric: bad, "rollout__success_mean": 0.0 if name == "out_of_turns" else 0.5})
    assert run.names == [name]
    other = new_run()
    other.set(**{metric: fine})
    assert other.names == []
