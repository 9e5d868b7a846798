"""The campaign that compares the figures of two commits, on packages that print what they are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns.two_commits import CPU, compare, measure, numbers_in

CLI = """
import json, sys, time
while time.process_time() < {cpu_s!r}:
    pass
bench = sys.argv[2]
if bench not in {benches!r}:
    sys.exit(f"invalid choice: {{bench!r}}")
print("not json" if bench == "broken" else json.dumps({figures!r}))
"""


def make_side(folder: Path, benches: list[str], figures: dict[str, object], cpu_s: float = 0.0) -> Path:
    package = folder / "src" / "turnwise"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "cli.py").write_text(CLI.format(benches=benches, figures=figures, cpu_s=cpu_s))
    return folder


def test_what_moved_twice_is_found_and_what_cannot_be_measured_is_named(tmp_path: Path) -> None:
    before = make_side(tmp_path / "before", ["sample", "broken"], {"bench": "x", "rank": 16, "parts": {"speed": 100}})
    after = make_side(
        tmp_path / "after", ["sample", "broken", "new"], {"bench": "x", "rank": 16, "parts": {"speed": 80}}
    )
    commands = {"sample": "--model tiny", "broken": "", "new": ""}
    report = measure(commands, {"before": before, "after": after}, rounds=2, noise=0.03)
    assert [line for line in report.findings if CPU not in line] == ["sample: parts.speed 0.800 [0.800, 0.800]"]
    assert set(report.ratios["sample"]) == {"parts.speed", CPU}  # the rank is the same in all runs: a setting
    assert report.left_out == ["new"]
    (problem,) = report.problems
    assert problem.startswith("broken : ended with 0")


def test_a_side_that_computes_longer_is_found_by_its_cpu_seconds(tmp_path: Path) -> None:
    before = make_side(tmp_path / "before", ["sample"], {"speed": 1}, cpu_s=0.2)
    after = make_side(tmp_path / "after", ["sample"], {"speed": 1}, cpu_s=1.0)
    report = measure({"sample": ""}, {"before": before, "after": after}, rounds=2, noise=0.03)
    (finding,) = report.findings
    assert finding.startswith(f"sample: {CPU} ")
    assert report.ratios["sample"][CPU].before < 0.6 < 1.0 <= report.ratios["sample"][CPU].after


def test_a_ratio_is_taken_within_a_round_and_has_moved_only_beyond_noise() -> None:
    before = [{"speed": 100.0, "share": -1.0}, {"speed": 50.0, "share": 1.0}, {"speed": 80.0, "share": 1.0}]
    after = [{"speed": 110.0, "share": 1.0}, {"speed": 55.0, "share": 1.0}, {"speed": 84.0, "share": 2.0}]
    ratios = compare(before, after)
    assert list(ratios) == ["speed"]  # a number below 0 has no ratio
    speed = ratios["speed"]
    assert (speed.median, speed.low, speed.high) == pytest.approx((1.1, 1.05, 1.1))
    assert (speed.moved(0.03), speed.moved(0.2)) == (1, 0)
    assert compare(after, before)["speed"].moved(0.03) == -1
    assert compare([{"s": 1.0}, {"s": 1.0}], [{"s": 1.2}, {"s": 0.99}])["s"].moved(0.03) == 0


def test_numbers_are_found_in_dicts_and_lists_but_truth_is_no_number() -> None:
    assert dict(numbers_in({"a": [1, {"b": 2.5}], "c": True, "d": "text"})) == {"a.0": 1.0, "a.1.b": 2.5}
