"""A real `turnwise view` process for tests, and scripts that look at it in a real Chromium."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from environments import ROOT, run_in
from service_process import sdk_python

BROWSER_SCRIPTS = ROOT / "tests" / "e2e" / "browser"
PLAYWRIGHT = "1.65.0"
START_S = 120.0
CHECKS_S = 500.0


def find_chromium() -> str | None:
    """The path of a Chromium, however it is called here."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    return None


def turnwise(*arguments: str | Path | int) -> list[str]:
    return [sys.executable, "-m", "turnwise.cli", *map(str, arguments)]


@contextmanager
def viewer(place: Path, *, folder: Path = ROOT) -> Iterator[str]:
    """A `turnwise view` process; its address. At the end it gets a Ctrl-C and must end cleanly."""
    command = turnwise("view", place, "--no-browser", "--port", "0")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder)
    assert process.stderr is not None
    said: list[str] = []
    try:
        while not (found := re.search(r"open (http://\S+)", "".join(said))):
            line = process.stderr.readline()
            assert line, f"the viewer ended: {said}"
            said.append(line)
        yield found[1]
    finally:
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=START_S)[1]
    assert process.returncode == 0, rest
    assert "Traceback" not in rest, rest


def in_browser(script: Path, *arguments: str, url: str, more: dict[str, str] | None = None) -> str:
    env = {**os.environ, "PYTHONPATH": "", "VIEW_URL": url, **(more or {})}
    return run_in(sdk_python("playwright", PLAYWRIGHT), str(script), *arguments, env=env, timeout_s=CHECKS_S)
