"""What a run is doing now, in a small file of its directory that is written about once a second.

The process that trains holds a lock on `run.lock`, and the lock ends with the process, however it ends. So only one
process trains a run at a time, and other processes can tell whether a run is alive or was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from turnwise.errors import ConfigError
from turnwise.runtime.pending_calls import PendingCall

STATUS_FILE = "status.json"
LOCK_FILE = "run.lock"
LOOK_S, LOOKS = 0.05, 6
"""A process that looks whether a run is alive holds its lock for a moment (`is_training`), so a lock that is taken is
tried again a few times."""
SHOWN_CALLS = 20
"""How many of the longest pending calls the file holds."""
OLD_NAMES = {"waits": "pending_calls", "num_waits": "num_pending_calls"}
"""Names in the status files of runs that an earlier version of turnwise trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCall:
    """A pending call as another process can read it."""

    party: str
    what: str
    who: str
    waited_s: float
    deadline_s: float

    @classmethod
    def of(cls, call: PendingCall) -> ShownCall:
        return cls(
            party=call.party,
            what=call.what,
            who=call.who,
            waited_s=round(call.waited_s, 2),
            deadline_s=call.deadline_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of a run at one moment."""

    pid: int
    time: float
    """When the status was written, in seconds since 1970."""
    phase: str
    step: int
    num_steps: int
    version: int
    """Number of weight updates so far."""
    reason: str
    """What the loop waits for now, in words; empty while it computes."""
    pending_calls: tuple[ShownCall, ...] = ()
    """The calls that have been waited for the longest, the longest first."""
    num_pending_calls: int = 0
    """Number of all pending calls."""
    pool: dict[str, int] = field(default_factory=dict[str, int])
    """Number of groups by state, and of attempts that are being played."""
    alarms: tuple[str, ...] = ()
    blocked_s: float = 0.0
    """Seconds for which the event loop has been blocked."""
    memory_mb: float = 0.0


def write_status(directory: Path, status: Status) -> None:
    """Write the whole file or nothing. If the disk is full, the status is lost, but the run goes on."""
    unfinished = directory / f".{STATUS_FILE}"
    with contextlib.suppress(OSError):
        unfinished.write_text(json.dumps(asdict(status)), encoding="utf-8")
        unfinished.replace(directory / STATUS_FILE)


def read_status(directory: Path) -> Status | None:
    """The latest status; None if there is none."""
    try:
        fields: dict[str, Any] = json.loads((directory / STATUS_FILE).read_text(encoding="utf-8"))
        for old in OLD_NAMES.keys() & fields:
            fields[OLD_NAMES[old]] = fields.pop(old)
        calls = tuple(ShownCall(**call) for call in fields.pop("pending_calls"))
        alarms = tuple(fields.pop("alarms"))
        return Status(**fields, alarms=alarms, pending_calls=calls)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def check_can_hold(directory: Path) -> None:
    """Refuse a directory in which nothing can be written, without writing anything."""
    place = next(place for place in (directory.absolute(), *directory.absolute().parents) if place.exists())
    if not place.is_dir():
        what = "it" if place == directory.absolute() else place
        raise ConfigError(f"{directory} cannot hold a run: {what} is a file; choose another run.dir")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{directory} cannot hold a run: {place} is not writable; choose another run.dir")


@contextmanager
def run_lock(directory: Path) -> Generator[None]:
    """Hold the lock that allows only one process to train in a directory."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        opened = (directory / LOCK_FILE).open("a")
    except OSError as cause:
        reason = "it is a file" if directory.is_file() else cause.strerror
        raise ConfigError(f"{directory} cannot hold a run: {reason}; choose another run.dir") from cause
    with opened as file:
        if not _lock_soon(file):
            raise ConfigError(
                f"a process is training in {directory} already: turnwise status {directory} shows it, turnwise stop "
                f"{directory} ends it"
            )
        yield


def is_training(directory: Path) -> bool:
    """Whether a process is training in the directory now."""
    try:
        with (directory / LOCK_FILE).open("r") as file:
            return not _lock(file)
    except OSError:
        return False


def memory_mb() -> float:
    """Memory of this process in MB; 0 if the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def seconds_ago(status: Status) -> float:
    return max(0.0, time.time() - status.time)


def _lock_soon(file: IO[str]) -> bool:
    for _ in range(LOOKS):
        if _lock(file):
            return True
        time.sleep(LOOK_S)
    return False


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
