"""The processes of a sandbox, seen from outside: who they are, what memory they hold, and how to end them.

A pid namespace keeps its orphans: they become children of its first process. So the descendants of that process are all
there is, and when it dies the kernel kills the rest before it lets anyone wait for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

_MAX_MEMBERS = 4096
_HELD = ("RssAnon:", "RssShmem:")


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents before children; empty when it is gone."""
    found: list[int] = []
    places = [pid]
    while places and len(found) < _MAX_MEMBERS:
        children = _children(places.pop(0))
        found += children
        places += children
    return found


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):  # it may end while we look
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                text = (thread / "children").read_text(encoding="ascii")
                children += [int(child) for child in text.split()]
    return children


def memory_bytes(pid: int) -> int:
    """Resident memory below `pid` that is not a mapped file; pages that a fork shares count twice."""
    return sum(_resident(member) for member in descendants(pid))


def _resident(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    lines = (line.split() for line in status.splitlines() if line.startswith(_HELD))
    return sum(int(words[1]) * 1024 for words in lines)


def kill_below(pid: int, *, spare: int) -> None:
    """Kill everything below `pid` except `spare`; a few passes, since what is killed last may have forked."""
    for _ in range(5):
        victims = [member for member in descendants(pid) if member != spare]
        if not victims:
            return
        for victim in victims:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(victim, signal.SIGKILL)


def start_time(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; with the pid it names a process for good. None: not there."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


class ProcessHandle:
    """A process by pidfd: signals reach that process or nobody, whatever becomes of its number."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.fd = os.pidfd_open(pid)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.fd, signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended, within the time."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
