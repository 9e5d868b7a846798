"""The adapters' tests that need the large libraries, in an environment that has them.

They drag in 390 MB, so the extra `dev` leaves them out and those tests are skipped where they are collected. Here they
run in `.venvs/adapters-...` (`tests/package_python.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from environments import Environment, make_environment
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
OLDER = (
    "aiolimiter==1.3.0",
    "datasets==5.2.0",
    "mcp==1.30.0",
    "openai==3.51.0",
    "openai-agents==0.24.0",
    "setproctitle==1.3.8",
    "verifiers==0.3.1",
)
"""The last release with verifiers' older envs, and what it needs beside the libraries above: 34 MB."""


def test_every_test_of_a_large_library_runs_and_none_is_skipped(tmp_path: Path) -> None:
    run_tests_with(python_with("adapters", LIBRARIES), FILES, tmp_path, "-k", CHOSEN)


def test_the_older_envs_of_verifiers_are_played_with_the_package_itself(tmp_path: Path) -> None:
    libraries = Environment(python_with("adapters", LIBRARIES).parents[1])

    def fill(environment: Environment) -> None:
        environment.end_with(libraries.site_packages)
        environment.install_missing(*OLDER)

    # Named after the environment behind it, whose name says which packages it has.
    python = make_environment(f"{OLDER[-1]}-on-{libraries.folder.name}", fill)
    run_tests_with(python, ["tests/unit/envs/adapters/test_verifiers_classic_package.py"], tmp_path)
