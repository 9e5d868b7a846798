"""Some rows of the table in docs/doctor.md, in real runs; the campaign `doctor_table` makes all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns.doctor_table import HEALTHY, PLANTED, run_case


@pytest.mark.model
@pytest.mark.parametrize("name", ["replies_unparsable", "tool_fails", "rate_too_low", "gradient_clipped"])
def test_a_planted_failure_is_named(name: str, tmp_path: Path) -> None:
    (case,) = [case for case in PLANTED if case.expected == name]
    found, _, _ = run_case(case, tmp_path / "run")
    assert name in [finding.name for finding in found]


@pytest.mark.model
def test_nothing_is_found_in_a_run_that_learns(tmp_path: Path) -> None:
    found, _, end = run_case(HEALTHY[0], tmp_path / "run")
    assert (found, end) == ([], "finished")


def test_at_least_twenty_failures_and_ten_healthy_runs_are_in_the_table() -> None:
    assert len(PLANTED) >= 20
    assert len({case.expected for case in PLANTED}) == len(PLANTED)
    assert len(HEALTHY) >= 10
