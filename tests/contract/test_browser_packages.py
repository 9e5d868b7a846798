"""The tests of pages in a real Chromium, in an environment that has Playwright and the pages of MiniWoB++."""

from __future__ import annotations

from pathlib import Path

import pytest

from package_python import python_with, run_tests_with
from viewer_process import find_chromium

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the first run installs the packages

FILES = tuple(f"tests/e2e/test_{name}.py" for name in ("browser", "browser_hostile", "browser_plain"))


@pytest.mark.skipif(find_chromium() is None, reason="no Chromium here: apt-get install chromium")
def test_every_test_of_pages_runs_and_none_is_skipped(tmp_path: Path) -> None:
    python = python_with("browser", ["playwright"], alone=["miniwob"])
    run_tests_with(python, FILES, tmp_path)
