"""The tests of worlds that other packages bring, in an environment that has these packages.

They are installed without most of what they ask for: the worlds do not use it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from package_python import python_with, run_tests_with

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the first run installs the packages

PACKAGES = (
    "hashids",
    "mementos",
    "more-itertools",
    "mpmath",
    "networkx",
    "prompt-toolkit",
    "tatsu",
    "termcolor",
    "tqdm",
    "wcwidth",
)
ALONE = ("bfcl-eval", "jericho", "textworld")
FILES = ("tests/unit/envs/adapters/test_bfcl.py", "tests/unit/envs/adapters/test_textworld.py")


def test_every_test_of_a_package_runs_and_none_is_skipped(tmp_path: Path) -> None:
    run_tests_with(python_with("worlds", PACKAGES, alone=ALONE), FILES, tmp_path)
