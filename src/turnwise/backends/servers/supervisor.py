"""Runs a command for as long as whoever started this script lives: `python supervisor.py COMMAND ...`.

The starter holds the other end of our standard input. When that closes, because the starter closed it or because it
died in whatever way, the command is asked to end and then killed, with every process of its group. The same happens to
what is left of the group when the command itself ends. Start this script in a session of its own. It needs the
standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 5.0
"""How long the command may take to end after it was asked to."""
POLL_S = 0.2
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent, the supervisor, is killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def supervise(command: list[str]) -> None:
    """Run the command; ends with this process and its whole group."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end comes through standard input, or with SIGKILL
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: (signal.signal(signal.SIGTERM, signal.SIG_DFL), die_with_parent()),  # noqa: PLW1509
    )
    while child.poll() is None:
        if select.select([0], [], [], POLL_S)[0] and not os.read(0, 1024):
            child.terminate()
            until_s = time.monotonic() + GRACE_S
            while child.poll() is None and time.monotonic() < until_s:
                time.sleep(POLL_S / 4)
            break
    print(f"the server ended with status {child.poll()}", flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    supervise(sys.argv[1:])
