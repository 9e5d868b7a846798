"""The adapters' tests that need the large libraries, in an environment that has them.

They drag in 390 MB, so the extra `dev` leaves them out and those tests are skipped where they are collected. Here they
run in `.venvs/adapters-...` (`tests/package_python.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from package_python import python_with, run_tests_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the first run installs the libraries

LIBRARIES = ("openenv-core", "reasoning-gym", "verifiers")
FILES = (
    "tests/unit/envs/adapters/test_openenv.py",
    "tests/unit/envs/adapters/test_reasoning_gym.py",
    "tests/unit/envs/adapters/test_verifiers.py",
    "tests/contract/test_adapters_check.py",
    "tests/e2e/test_adapters.py",
)
CHOSEN = "openenv or reasoning_gym or verifiers"


def test_every_test_of_a_large_library_runs_and_none_is_skipped(tmp_path: Path) -> None:
    run_tests_with(python_with("adapters", LIBRARIES), FILES, tmp_path, "-k", CHOSEN)
