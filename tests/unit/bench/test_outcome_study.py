from __future__ import annotations

from pathlib import Path

from turnwise.bench.outcome_study import read_all, read_run, table


def test_a_line_tells_the_lowest_agreement_too() -> None:
    learned = {
        "run": "on_the_model",
        "seed": 1,
        "accuracy": 0.97,
        "success": [0.25, 0.75],
        "alarms": 0,
        "score": [0.3, 0.2, 0.8],
        "agreement": [0.98, 0.91, 0.95],
    }
    verified = {"run": "verified", "seed": 1, "accuracy": 1.0, "success": [0.25, 1.0], "alarms": 0}
    lines = table([verified, learned]).splitlines()
    assert lines[2] == "| verified | 1 | 100.0% |  |  | 25.0% to 100.0% | 0 |"
    assert lines[3] == "| on_the_model | 1 | 97.0% | 0.30 to 0.80 | 0.98, 0.91, 0.95 | 25.0% to 75.0% | 0 |"


def test_what_has_not_begun_is_left_out(tmp_path: Path) -> None:
    assert read_run("verified", 1, tmp_path / "verified") is None
    assert read_all(tmp_path, [1, 2]) == []
