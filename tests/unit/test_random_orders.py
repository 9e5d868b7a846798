"""`make campaign NAME=random_orders`: every test that fails in a run is reported, and where it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns import random_orders

REVERSED = """
def pytest_addoption(parser):
    parser.addoption("--random-order", type=int)

def pytest_collection_modifyitems(config, items):
    if config.getoption("--random-order"):
        items.reverse()
"""
TESTS = """
seen = []

def test_leaves_something():
    seen.append(1)

def test_needs_what_another_leaves():
    assert seen

def test_is_red():
    assert False

def test_is_green():
    pass
"""


def test_a_test_that_fails_in_the_order_of_the_files_is_a_problem_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (tmp_path / "conftest.py").write_text(REVERSED, encoding="utf-8")
    (tmp_path / "test_some.py").write_text(TESTS, encoding="utf-8")
    monkeypatch.setattr(random_orders, "ROOT", tmp_path)
    report = random_orders.run_orders(["test_some.py"], orders=1, parallel=1)
    assert [run.num_tests for run in report.runs] == [4, 4]
    assert sorted(report.problems) == [
        "test_some.py::test_is_red fails in the order of the files and with seeds [1]",
        "test_some.py::test_needs_what_another_leaves fails with seeds [1]",
    ]
    assert all(finding.fails_alone for finding in report.findings)
