"""The sandbox: `run` runs one program, `open` opens a shell that lives through a dialogue, and `start_worker` starts a
program of ours that answers many untrusted requests.

sandbox = Sandbox()                                   # refuses when bubblewrap is missing, with what to install
result = await sandbox.run(["python3", "main.py"], files={"main.py": "print(6 * 7)"})
result.to_text()                                      # "42"

session = sandbox.open(files={"notes.txt": "hello"})
await session.run("cd /tmp; X=1")
(await session.run("echo $X in $PWD")).stdout         # "1 in /tmp"
await session.close()
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from turnwise.envs.sandbox.bubblewrap import BubblewrapBackend
from turnwise.envs.sandbox.detect import find_bubblewrap
from turnwise.envs.sandbox.files import check_names
from turnwise.envs.sandbox.limits import Limits, SandboxResult
from turnwise.envs.sandbox.packages import find_packages
from turnwise.envs.sandbox.plain import PlainBackend
from turnwise.envs.sandbox.pool import SandboxPool, default_pool
from turnwise.envs.sandbox.process import Cancel, SandboxJob, run_job
from turnwise.envs.sandbox.session import Session
from turnwise.envs.sandbox.worker import Worker
from turnwise.envs.sync import call_in_thread
from turnwise.errors import ConfigError

SandboxKind = Literal["bubblewrap", "subprocess"]

DEFAULT_LEASE_S = 900.0
MAX_FILES = 200
"""Most files of one run. A session takes any number."""


class SandboxWarning(UserWarning):
    """Programs run without isolation, because the user asked for it."""


class Sandbox:
    """A kind of sandbox with its default limits. Threads and event loops may share it."""

    def __init__(
        self,
        kind: SandboxKind = "bubblewrap",
        *,
        limits: Limits | None = None,
        packages: Sequence[str] = (),
        pool: SandboxPool | None = None,
    ) -> None:
        """Check that the sandbox works here. `ConfigError` says what to install.

        Args:
            packages: Installed distributions that programs may import, together with their requirements.
        """
        if kind == "bubblewrap":
            self._backend = BubblewrapBackend(find_bubblewrap())
        elif kind == "subprocess":
            warnings.warn(
                "sandbox: subprocess gives programs limits but no walls: they can read this user's files and reach "
                "the network; use bubblewrap for code that you have not read",
                SandboxWarning,
                stacklevel=2,
            )
            self._backend = PlainBackend()
        else:
            raise ConfigError(f"sandbox={kind!r}; expected bubblewrap or subprocess")
        self.kind: SandboxKind = kind
        self.limits = limits or Limits()
        self._packages = find_packages(packages)
        self._pool = pool

    @property
    def can_fork(self) -> bool:
        """Whether sessions can fork and go back to snapshots."""
        return self._backend.has_own_pids

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
    ) -> SandboxResult:
        """Run one program in a new working directory. Cancelling the task kills the program."""
        job = self._job(argv, stdin, files, limits)
        cancel = Cancel()

        def work() -> SandboxResult:
            try:
                return run_job(self._backend, job, cancel)
            finally:
                cancel.close()

        try:
            return await call_in_thread(work)
        except asyncio.CancelledError:
            cancel.set()
            raise

    def run_blocking(
        self,
        argv: Sequence[str],
        *,
        stdin: str | bytes = b"",
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
    ) -> SandboxResult:
        """Do the same as `run`, for code that is not async. (Its parameters are repeated so that both are typed.)"""
        return run_job(self._backend, self._job(argv, stdin, files, limits))

    def open(
        self,
        *,
        files: Mapping[str, str | bytes] | None = None,
        limits: Limits | None = None,
        lease_s: float = DEFAULT_LEASE_S,
    ) -> Session:
        """Open a shell in a new working directory. Close it, or it is closed when its lease ends."""
        job = SandboxJob(argv=(), limits=limits or self.limits, packages=self._packages)
        pool = self._pool or default_pool()
        return pool.open(self._backend, job, check_names(files or {}), lease_s)

    def start_worker(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, str | bytes] | None = None,
        shown: Mapping[str, Path] | None = None,
        limits: Limits | None = None,
    ) -> Worker:
        """Start a program that answers line by line, and wait until it is ready. The caller must end it.

        Args:
            shown: Files and folders of the host that it may read, by their absolute path in the sandbox. With
                `subprocess` they stay at their own path.
            limits: `wall_s` is ignored; `cpu_s` counts over the whole life of the program.
        """
        return Worker(self._backend, replace(self._job(argv, b"", files, limits), shown=dict(shown or {})))

    def _job(
        self,
        argv: Sequence[str],
        stdin: str | bytes,
        files: Mapping[str, str | bytes] | None,
        limits: Limits | None,
    ) -> SandboxJob:
        checked = check_names(files or {})
        if not argv:
            raise ConfigError("argv is empty; expected a program and its arguments")
        if len(checked) > MAX_FILES:
            raise ConfigError(f"{len(checked)} files; a run takes at most {MAX_FILES}, a session any number")
        data = stdin.encode("utf-8", "surrogateescape") if isinstance(stdin, str) else stdin
        job = SandboxJob(argv=tuple(argv), limits=limits or self.limits, packages=self._packages)
        return replace(job, stdin=data, files=checked)
