"""The tour names every file that runs: a run of `tiny` and a request are traced in processes of their own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from walks import HTTP, SET_UP, STEP

pytestmark = pytest.mark.model

TESTS = Path(__file__).resolve().parents[1]
TOUR = (TESTS.parent / "docs" / "tour.md").read_text(encoding="utf-8")
PARTS = {SET_UP: "Set-up", STEP: "One step", HTTP: "A gradient over HTTP"}
BY_THE_CLOCK = {"training/heartbeat.py", "watch/status.py"}
"""These run about once a second, so a step may go by without them."""


def _stops(part: str) -> set[str]:
    own = _text(part).partition("\n### Passed through")[0]
    return set(re.findall(r"\]\(\.\./src/turnwise/([\w/]+\.py)\)", own))


def _passed(part: str) -> set[str]:
    own = _text(part).partition("\n### Passed through")[2]
    rows = re.findall(r"^\| `([\w./]+/)` \| (.*?) \|", own, re.MULTILINE)
    return {f"{room.removeprefix('./')}{file}" for room, files in rows for file in re.findall(r"`(\w+\.py)`", files)}


def _text(part: str) -> str:
    return TOUR.partition(f"\n## {PARTS[part]}\n")[2].partition("\n## ")[0]


def _again(part: str) -> set[str]:
    """The stops of the set-up that a step comes through again."""
    return _stops(SET_UP) if part == STEP else set()


@cache
def _walk(what: str, directory: Path) -> dict[str, set[str]]:
    done = subprocess.run(
        [sys.executable, str(TESTS / "walks.py"), what, str(directory)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {part: {file for file in files if not file.startswith("engine/ops/")} for part, files in found.items()}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The files that ran, by part."""
    place = tmp_path_factory.mktemp("walks")
    return _walk("run", place / "run") | _walk("http", place / "http")


@pytest.mark.parametrize("part", PARTS)
def test_every_file_that_runs_is_a_stop_or_passed_through(part: str, ran: dict[str, set[str]]) -> None:
    assert ran[part] - _stops(part) - _again(part) - _passed(part) == set()


@pytest.mark.parametrize("part", PARTS)
def test_every_file_of_the_tour_runs(part: str, ran: dict[str, set[str]]) -> None:
    assert (_stops(part) | _passed(part)) - ran[part] - BY_THE_CLOCK == set()


@pytest.mark.parametrize("part", PARTS)
def test_the_tour_states_how_many_files_there_are(part: str, ran: dict[str, set[str]]) -> None:
    stops = _stops(part) - _again(part)
    again = (ran[part] & _again(part)) - _passed(part)
    assert not _passed(part) & (stops | again)
    numbers = re.findall(r"\d+", re.findall(rf"^\| {PARTS[part]} \|(.*)\|$", TOUR, re.MULTILINE)[0])
    counted = [len(stops), len(_passed(part)), *([len(again)] if again else [])]
    assert [int(number) for number in numbers] == [*counted, sum(counted)]
