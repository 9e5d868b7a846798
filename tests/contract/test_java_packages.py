"""The tests of worlds that run in Java, in an environment that has their packages."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from package_python import python_with, run_tests_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the first run installs the packages

FILES = tuple(
    f"tests/unit/envs/adapters/test_{name}.py" for name in ("java_games", "scienceworld", "textworld_express")
)


@pytest.mark.skipif(shutil.which("java") is None, reason="no Java here: apt-get install default-jre-headless")
def test_every_test_of_a_java_world_runs_and_none_is_skipped(tmp_path: Path) -> None:
    python = python_with("java", ["orjson", "prompt-toolkit", "py4j"], alone=["scienceworld", "textworld-express"])
    run_tests_with(python, FILES, tmp_path)
