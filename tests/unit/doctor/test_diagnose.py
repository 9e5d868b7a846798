"""The engine itself: a healthy run is left alone, and findings travel as text and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnwise.cli import main
from turnwise.doctor import DIAGNOSES, Finding, diagnose, finding_lines
from unit.doctor.conftest import WrittenRun, make_attempt, make_turn


def test_nothing_is_found_in_a_run_that_learns(run: WrittenRun) -> None:
    assert run.names == []


def test_a_run_before_its_first_step_has_no_findings(run: WrittenRun) -> None:
    run.steps, run.attempts = [], []
    assert run.names == []


def test_the_command_prints_what_is_seen_why_and_the_option(
    run: WrittenRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.overrides = ["rollout.max_tokens_per_turn=4"]
    run.set(rollout__success_mean=0.0, method__groups_trained=0.0)
    run.attempts = [make_attempt(make_turn("I th", is_cut=True, ids=(5, 6, i, 8)), attempt=i) for i in range(8)]
    directory = run.write()
    assert main(["doctor", str(directory)]) == 1
    shown = capsys.readouterr().out
    assert "replies_cut: 100% of 8 replies were cut at their limit of 4 tokens" in shown
    assert "fix  rollout.max_tokens_per_turn=0: take the world's own limit" in shown
    assert "'I th'" in shown
    assert main(["doctor", str(directory), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    again = [Finding.from_json(one) for one in told["findings"]]
    assert finding_lines(again) == finding_lines(diagnose(directory))
    assert told["steps"] == 10


def test_the_command_says_that_nothing_was_found_and_ends_well(
    run: WrittenRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(run.write())]) == 0
    assert "nothing found in 10 steps" in capsys.readouterr().out


def test_the_command_refuses_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err


def test_every_diagnosis_says_what_it_looks_for() -> None:
    assert all(diagnosis.__doc__ for diagnosis in DIAGNOSES)
