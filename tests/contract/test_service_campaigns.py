"""The campaigns against the service, small enough for every run; `make campaign` runs them in full."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from campaigns.service_abuse import run_abuse
from campaigns.service_faults import run_kills
from campaigns.service_load import run_load
from service_process import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tiny_dir")]


def test_clients_under_load_lose_nothing_and_get_their_share(tmp_path: Path) -> None:
    report = run_load(tmp_path, clients=8, seconds=5.0, processes=2, max_reference=12)
    assert report.problems() == []
    assert min(report.steps) >= 3
    assert sum(client["num_samples"] for client in report.clients) >= 16
    alone = report.alone["losses"]
    assert len(set(alone)) == len(alone), "each step has a loss of its own, so one that is missing or doubled shows"


def test_a_server_that_is_killed_under_load_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    report = run_kills(tmp_path, kills=2, clients=2, processes=1, seed=5, settle_s=1.0, max_reference=20)
    assert report.problems() == []
    assert min(report.load.steps) >= 3
    assert report.disks[-1].num_checkpoints >= 2
    assert report.disks[-1].num_snapshots >= 2


def test_a_full_disk_is_said_and_breaks_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "campaigns.service_faults", "disk"],
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert any("No space left on device" in error for error in report["errors"]), "saving says why"
    assert any("503 the server cannot write to its disk" in error for error in report["errors"]), "training too"


def test_wrong_requests_are_refused_and_nothing_else_happens(tmp_path: Path) -> None:
    report = run_abuse(tmp_path / "data", num_requests=500, seed=3)
    assert report.problems == []
    assert report.num_sent >= 500
    assert report.operations >= 60
    assert set(report.statuses) & {"400", "404", "413", "422"} == {"400", "404", "413", "422"}
