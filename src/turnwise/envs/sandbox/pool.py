"""Keeps sessions by id, closes forgotten ones when their lease ends, and removes what dead processes left.

Each process owns a folder below one root, and a lock file beside it. The kernel releases the lock when the process
ends, however it ends. Every new pool removes the folders whose lock is free, and kills the shells noted in them.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from turnwise.envs.sandbox.areas import BaseLayer, WorkArea
from turnwise.envs.sandbox.files import FileTree
from turnwise.envs.sandbox.members import start_time
from turnwise.envs.sandbox.process import Backend, SandboxJob, run_job
from turnwise.envs.sandbox.session import Session, SessionTerms, area_job
from turnwise.errors import ConfigError, SandboxError, SessionClosedError

SHELL = ("bash", "--noprofile", "--norc")


class SandboxPool:
    """The sessions of this process."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or Path(tempfile.gettempdir(), f"turnwise-sandbox-{os.geteuid()}")
        _make_private(self._root)
        self.num_collected = self._collect()
        self._place, self._lock_fd = self._claim()
        self._sessions: dict[str, Session] = {}
        self._changed = threading.Condition()
        self._overlay_works: bool | None = None
        self._is_closed = False
        self._owner_pid = os.getpid()
        self._reaper: threading.Thread | None = None
        atexit.register(self.close)

    def open(self, backend: Backend, job: SandboxJob, files: Mapping[str, bytes], lease_s: float) -> Session:
        """Open a session and write its files. Its shell starts with the first command."""
        if lease_s <= 0:
            raise ConfigError(f"lease_s={lease_s}; expected more than 0 seconds")
        user_id = backend.draw_user_id()
        area = self._make_area(backend, job, user_id, files)
        return self._enter(backend, replace(job, argv=SHELL, files={}), area, SessionTerms(lease_s=lease_s))

    def fork(self, backend: Backend, job: SandboxJob, area: WorkArea, terms: SessionTerms) -> Session:
        """Open a session whose files are a copy of `area`. Nothing may be running there."""
        return self._enter(backend, job, area.copy_to(self.new_place(), backend.draw_user_id()), terms)

    def new_place(self) -> Path:
        """The path of a folder that is removed with this pool. It is not made yet."""
        return self._place / secrets.token_hex(8)

    def _make_area(self, backend: Backend, job: SandboxJob, user_id: int, files: Mapping[str, bytes]) -> WorkArea:
        place, owner = self.new_place(), user_id if os.geteuid() == 0 else None
        if self._has_overlay(backend, job):
            base = BaseLayer(folder=self._place / f"base-{place.name}", user_id=user_id)
            base.folder.mkdir()
            if owner is not None:
                os.chown(base.folder, owner, owner)
            FileTree(base.folder, owner).write_all(files)
            return WorkArea(place, user_id, base)
        area = WorkArea(place, user_id, None)
        if os.geteuid() == 0 and not backend.has_own_pids:  # the shell enters its folder by itself
            for folder in (place, self._place, self._root):
                folder.chmod(0o711)
        FileTree(area.upper, owner).write_all(files)
        return area

    def _has_overlay(self, backend: Backend, job: SandboxJob) -> bool:
        """Whether this kernel lays folders of this pool over each other. It is tried once."""
        if not backend.has_overlay:
            return False
        with self._changed:
            if self._overlay_works is None:
                user_id = backend.draw_user_id()
                base = BaseLayer(folder=self._place / "base-trial", user_id=user_id)
                base.folder.mkdir()
                area = WorkArea(self._place / "trial", user_id, base)
                trial = replace(area_job(job, area), argv=("sh", "-c", "echo hi > x && cat x"))
                try:
                    self._overlay_works = run_job(backend, trial).stdout == "hi\n"
                except SandboxError:
                    self._overlay_works = False
                finally:
                    area.remove()
            return self._overlay_works

    def _enter(self, backend: Backend, job: SandboxJob, area: WorkArea, terms: SessionTerms) -> Session:
        identity = area.place.name
        session = Session(identity=identity, area=area, backend=backend, job=job, terms=terms)
        session.pool = self
        session.on_close = lambda: self._forget(identity)
        with self._changed:
            self._sessions[identity] = session
            if self._reaper is None:
                self._reaper = threading.Thread(target=self._reap, name="turnwise-sandbox-leases", daemon=True)
                self._reaper.start()
            self._changed.notify_all()
        return session

    def get(self, identity: str) -> Session:
        with self._changed:
            session = self._sessions.get(identity)
        if session is None or session.is_closed:
            raise SessionClosedError(f"no session {identity!r}; it was closed, or its lease ran out")
        return session

    @property
    def ids(self) -> tuple[str, ...]:
        with self._changed:
            return tuple(identity for identity, session in self._sessions.items() if not session.is_closed)

    def close(self) -> None:
        """Close every session and remove the folder."""
        if os.getpid() != self._owner_pid or self._is_closed:
            return  # a forked child does not own the folder
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for session in list(self._sessions.values()):
            session.close_blocking("the pool was closed")
        shutil.rmtree(self._place, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            _lock_path(self._place).unlink()
        os.close(self._lock_fd)
        atexit.unregister(self.close)

    def _forget(self, identity: str) -> None:
        with self._changed:
            self._sessions.pop(identity, None)
            self._changed.notify_all()

    def _reap(self) -> None:
        """Close sessions whose lease has ended. Return when no session is left."""
        while True:
            with self._changed:
                if self._is_closed or not self._sessions:
                    self._reaper = None
                    return
                now = time.monotonic()
                late = [session for session in self._sessions.values() if session.expires_at <= now]
                if not late:
                    nearest = min(session.expires_at for session in self._sessions.values())
                    self._changed.wait(nearest - now)
                    continue
            for session in late:
                session.close_blocking(f"its lease of {session.lease_s:g} s ran out")

    def _claim(self) -> tuple[Path, int]:
        """Make a folder for this process, and lock it for as long as the process lives."""
        while True:
            place = self._root / secrets.token_hex(8)
            lock = os.open(_lock_path(place), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:  # otherwise another process removed it before we had locked it
                place.mkdir(mode=0o700)
                return place, lock
            os.close(lock)

    def _collect(self) -> int:
        """Remove what dead processes left. Return the number of those processes."""
        count = 0
        for path in self._root.glob("*.lock"):
            with contextlib.suppress(OSError), path.open("rb+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if the owner is alive
                place = path.with_suffix("")
                for note in place.glob("*/process.json"):
                    _kill_noted(note)
                shutil.rmtree(place, ignore_errors=True)
                path.unlink()
                count += 1
        return count


@cache
def default_pool() -> SandboxPool:
    """The pool of this process, made when it is first needed."""
    return SandboxPool()


def _lock_path(place: Path) -> Path:
    return place.with_suffix(".lock")


def _make_private(root: Path) -> None:
    """Make the root folder for this user only. Below /tmp, another user could have made it first."""
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    info = root.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise ConfigError(f"{root} belongs to another user or is no folder; remove it, or set TMPDIR to another place")


def _kill_noted(note: Path) -> None:
    """Kill a noted process, unless its pid now belongs to another process."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        process = json.loads(note.read_text(encoding="utf-8"))
        pid = int(process["pid"])
        if start_time(pid) == process["start_time"]:
            os.killpg(pid, signal.SIGKILL)
