"""The real, unmodified mindlab-toolkit 0.2.0, in its own environment, against a real `turnwise serve` with keys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from service_process import ServerProcess, check_names, run_checks, sdk_python

CHECKS = Path(__file__).parent / "sdk" / "mint_checks.py"


@pytest.fixture(scope="module")
def outcomes(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    assert tiny_dir.is_dir()
    python = sdk_python("mindlab-toolkit", "0.2.0")
    data_dir = tmp_path_factory.mktemp("service")
    key = subprocess.run(
        [sys.executable, "-m", "turnwise.cli", "keys", "create", "mint", "--style", "sk", "--data-dir", str(data_dir)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    with ServerProcess(data_dir) as server:
        found = run_checks(python, CHECKS, server.url, {"MINT_API_KEY": key})
        found["log"], found["key"] = "".join(server.log), key
    return found


@pytest.mark.parametrize("name", check_names(CHECKS))
def test_the_sdk_finds_that(name: str, outcomes: dict[str, Any]) -> None:
    assert outcomes[name] is None, outcomes[name]


def test_the_server_logged_no_error_and_no_key(outcomes: dict[str, Any]) -> None:
    assert "ERROR" not in outcomes["log"], outcomes["log"]
    assert outcomes["key"] not in outcomes["log"]
