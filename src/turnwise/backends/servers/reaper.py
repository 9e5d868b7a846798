"""Ends processes that must not outlive whoever started this script: `python reaper.py VARIABLE=VALUE`.

The starter holds the other end of our standard input. When that closes, because the starter closed it or because it
died in whatever way, every process whose environment has this variable is killed. A library that starts processes of
its own inside the starter thus leaves none behind. It needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

GONE_S = 30.0
"""How long killed processes may take to be gone."""


def kill_marked(mark: str) -> bool:
    """Kill every process that was started with this variable; returns whether there was one. Python's resource tracker,
    which serves all processes of the starter, ends with them by itself."""
    wanted, found = mark.encode(), False
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            is_marked = wanted in file.read_bytes().split(b"\0")
            if is_marked and b"resource_tracker" not in file.with_name("cmdline").read_bytes():
                found = True
                os.kill(int(file.parts[2]), signal.SIGKILL)
    return found


if __name__ == "__main__":
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, signal.SIG_IGN)  # the end comes through standard input
    while os.read(0, 1024):
        pass
    until_s = time.monotonic() + GONE_S
    while kill_marked(sys.argv[1]) and time.monotonic() < until_s:  # the starter waits for us, and then none is left
        time.sleep(0.02)
