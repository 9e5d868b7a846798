"""Drift: numerics at lag 0 and staleness at lag 1 and more are two numbers, and the worst token has an address."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from turnwise.rollout.certify import Certificate, certify
from turnwise.rollout.drift import MAX_LAG, DriftReport, measure_drift
from turnwise.trajectory import EndReason, Message, Trajectory, Turn
from turnwise.watch.catalogue import check_names


def _turn(version: int, *logprobs: float, is_trained: bool = True) -> Turn:
    return Turn(
        prompt_ids=(1,),
        sampled_ids=tuple(range(10, 10 + len(logprobs))),
        sampler_logprobs=logprobs,
        policy_version=version,
        reply=Message(role="assistant", content=""),
        is_trained=is_trained,
    )


def _attempt(number: int, *turns: Turn) -> Trajectory:
    return Trajectory(task_id="task", attempt=number, seed=0, turns=turns, end_reason=EndReason.TERMINATED)


def test_the_gap_of_older_weights_does_not_count_as_drift() -> None:
    attempt = _attempt(3, _turn(4, -1.0, -2.0), _turn(6, -1.0, -3.0), _turn(6, -5.0, is_trained=False))
    report = measure_drift([(attempt, [(-1.5, -2.0), (-1.0, -3.02), None])], version=6)
    assert [(one.lag, one.num_tokens) for one in report.by_lag] == [(0, 2), (2, 2)]
    metrics = report.metrics()
    check_names(metrics)
    assert metrics["drift/k2"] == pytest.approx(0.02**2 / 4)
    assert metrics["drift/abs_mean"] == pytest.approx(0.01)
    assert metrics["drift/abs_max"] == pytest.approx(0.02)
    assert metrics["drift/beyond_share"] == 0
    assert metrics["drift/lag_2_k2"] == pytest.approx(0.5**2 / 4)
    assert report.worst is not None
    assert (report.worst.attempt, report.worst.turn, report.worst.token, report.worst.token_id) == (3, 1, 1, 11)


def test_without_tokens_of_the_newest_weights_there_is_no_drift_to_report() -> None:
    report = measure_drift([(_attempt(0, _turn(1, -1.0)), [(-9.0,)])], version=2)
    assert (report.now, report.worst) == (None, None)
    assert set(report.metrics()) == {"drift/lag_1_k2", "drift/lag_1_tokens"}
    far = measure_drift([(_attempt(0, _turn(0, -1.0)), [(-1.0,)])], version=MAX_LAG + 5)
    check_names(far.metrics())
    assert "drift/lag_later_k2" in far.metrics()


def test_tokens_beyond_the_bound_are_a_share_and_broken_ones_are_counted_apart() -> None:
    attempt = _attempt(0, _turn(0, -1.0, -1.0, -1.0, -1.0))
    report = measure_drift([(attempt, [(-1.2, -1.0, math.nan, -0.95)])], version=0)
    metrics = report.metrics()
    check_names(metrics)
    assert metrics["drift/beyond_share"] == pytest.approx(1 / 3)
    assert (metrics["drift/tokens"], metrics["drift/broken_tokens"]) == (3, 1)
    assert any("1 tokens have no finite logprob" in line for line in report.lines())


def test_a_certificate_keeps_the_drift_and_older_ones_without_it_are_read() -> None:
    attempt = _attempt(0, _turn(0, -1.0, -2.0))
    certificate = certify([attempt], lambda datums: [[-1.0, -2.03] for _ in datums])
    report = measure_drift([(attempt, [(-1.0, -2.03)])], version=0)
    text = replace(certificate, drift=report).to_json()
    again = Certificate.from_json(text)
    assert again.drift == report
    assert DriftReport.from_json(json.loads(text)["drift"]) == report
    printed = "\n".join(again.lines())
    assert "lag 0 (numerics): mean k2 2.25e-04, mean |gap| 1.50e-02, worst 3.00e-02" in printed
    assert "worst token: task attempt 0, turn 0, token 1 (id 11): sampler -2.0000, trainer -2.0300" in printed
    old = {key: value for key, value in json.loads(text).items() if key != "drift"}
    assert Certificate.from_json(json.dumps(old)).drift is None


def test_a_turn_in_which_the_weights_changed_is_stale_to_its_last_token() -> None:
    mixed = replace(_turn(5, -1.0, -1.0, -1.0), token_versions=(5, 6, 6))
    report = measure_drift([(_attempt(0, mixed, _turn(6, -1.0)), [(-3.0, -2.0, -2.0), (-1.0,)])], version=6)
    assert [(one.lag, one.num_tokens) for one in report.by_lag] == [(0, 1), (1, 3)]
    assert report.metrics()["drift/abs_max"] == 0
