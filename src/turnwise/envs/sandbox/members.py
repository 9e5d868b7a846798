"""Watches the processes of a sandbox from outside: lists them, adds up their memory, and kills them.

Orphans in a pid namespace become children of its first process. So all processes of a sandbox are descendants of that
process. When it dies, the kernel kills the others before anyone can finish waiting for it.
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
    """All processes below `pid`, parents before children. Empty if `pid` has ended."""
    found: list[int] = []
    places = [pid]
    while places and len(found) < _MAX_MEMBERS:
        children = _children(places.pop(0))
        found += children
        places += children
    return found


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):  # a process may end meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                text = (thread / "children").read_text(encoding="ascii")
                children += [int(child) for child in text.split()]
    return children


def memory_bytes(pid: int) -> int:
    """Resident memory of all processes below `pid`, without mapped files. Pages shared by a fork count twice."""
    return sum(_resident(member) for member in descendants(pid))


def _resident(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    lines = (line.split() for line in status.splitlines() if line.startswith(_HELD))
    return sum(int(words[1]) * 1024 for words in lines)


def kill_below(pid: int, *, spare: int) -> None:
    """Kill everything below `pid` except `spare`. Repeat it a few times, because a process may fork before it dies."""
    for _ in range(5):
        victims = [member for member in descendants(pid) if member != spare]
        if not victims:
            return
        for victim in victims:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(victim, signal.SIGKILL)


def start_time(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; pid and start time together are unique. None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


class ProcessHandle:
    """A process by pidfd. A signal never reaches another process, even if the pid is used again."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.fd = os.pidfd_open(pid)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.fd, signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the process to end. Return whether it ended in time."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
