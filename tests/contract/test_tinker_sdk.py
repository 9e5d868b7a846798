"""The real, unmodified tinker 0.36.0 SDK, in its own environment, against a real `turnwise serve` process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service_process import ServerProcess, check_names, run_checks, sdk_python

CHECKS = Path(__file__).parent / "sdk" / "tinker_checks.py"


@pytest.fixture(scope="module")
def outcomes(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    assert tiny_dir.is_dir()
    python = sdk_python("tinker", "0.36.0")
    with ServerProcess(tmp_path_factory.mktemp("service")) as server:
        found = run_checks(python, CHECKS, server.url, {"TINKER_API_KEY": "tml-contract", "TINKER_PROJECT_ID": "p"})
        found["log"] = "".join(server.log)
    return found


@pytest.mark.parametrize("name", check_names(CHECKS))
def test_the_sdk_finds_that(name: str, outcomes: dict[str, Any]) -> None:
    assert outcomes[name] is None, outcomes[name]


def test_the_server_logged_no_error_and_no_key(outcomes: dict[str, Any]) -> None:
    assert "ERROR" not in outcomes["log"], outcomes["log"]
    assert "tml-contract" not in outcomes["log"]
