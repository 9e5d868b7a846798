"""Starts one program in a sandbox, watches it until it ends or must be killed, and removes all of its processes.

Everything here blocks; `sandbox.py` has the async side. The thread that starts a program must live as long as the
program, because the kernel kills the program when that thread ends (`--die-with-parent`).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol

from turnwise.envs.sandbox.limits import Ending, Limits, SandboxResult
from turnwise.envs.sandbox.members import ProcessHandle, descendants, memory_bytes
from turnwise.errors import SandboxError

START_S = 30.0
"""Time limit for a sandbox to start. On a busy machine this is slow; it does not count as the program's time."""
END_S = 10.0

_FIRST_LOOK_S, _LATER_LOOKS_S = 0.02, 0.1
_CHUNK = 1 << 16

run_slots = threading.BoundedSemaphore(max(4, 2 + (os.cpu_count() or 1)))
"""Number of programs at the same time. More would only slow each other down, and a late answer counts as wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxJob:
    """What to run."""

    argv: tuple[str, ...]
    limits: Limits = field(default_factory=Limits)
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Contents of files, by path in the working directory."""
    directory: Path | None = None
    """A folder of the host to use as the working directory, instead of `files`."""
    base: Path | None = None
    """A folder of the host whose files lie below those of `directory`, which then holds only what was changed."""
    scratch: Path | None = None
    """An empty folder of the host for the kernel, if there is a `base`."""
    tmp: Path | None = None
    """A folder of the host to use as /tmp."""
    packages: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Modules that can be imported besides the standard library, by name."""
    shown: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Readable files and folders of the host, by their path in the sandbox. `subprocess` does not move them."""
    user_id: int | None = None
    """None draws a user id for this job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The command on the host that runs a job."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    directory: str
    pass_fds: tuple[int, ...] = ()
    status_fd: int | None = None
    """The file descriptor to which bubblewrap writes its state. None without bubblewrap."""
    close_after_start: tuple[int, ...] = ()
    user_id: int | None = None
    """All processes of this user are killed at the end. Set if there is no pid namespace that ends them."""


class Backend(Protocol):
    """Turns jobs into commands."""

    @property
    def has_own_pids(self) -> bool: ...

    @property
    def has_overlay(self) -> bool:
        """Whether jobs may have a `base`, as far as the program that makes sandboxes is concerned."""
        ...

    def launch(self, job: SandboxJob, stack: ExitStack) -> Launch: ...

    def draw_user_id(self) -> int: ...


class Cancel:
    """Tells a run in another thread to stop."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._lock = threading.Lock()

    def set(self) -> None:
        with self._lock:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        with self._lock:
            os.close(self.fd)
            self.fd = -1


def data_to_fd(data: bytes, stack: ExitStack) -> int:
    """Put the data into a file in memory and return its descriptor."""
    descriptor = os.memfd_create("sandbox")
    stack.callback(os.close, descriptor)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


class Running:
    """A running program, as a context manager. When the block is left, all of its processes have ended."""

    def __init__(self, backend: Backend, job: SandboxJob, *, stdin: int | None, merge_output: bool = False) -> None:
        """Start the program. `stdin=None` opens a pipe to it."""
        self.job = job
        self._stack = ExitStack()
        try:
            self._launch = backend.launch(job, self._stack)
            self._process = subprocess.Popen(
                self._launch.argv,
                stdin=subprocess.PIPE if stdin is None else stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if merge_output else subprocess.PIPE,
                env=dict(self._launch.environment),
                cwd=self._launch.directory,
                pass_fds=self._launch.pass_fds,
                start_new_session=True,
            )
        except OSError as cause:
            self._stack.close()
            raise SandboxError(f"cannot start {self._launch.argv[0]}: {cause}") from cause
        except BaseException:
            self._stack.close()
            raise
        for descriptor in self._launch.close_after_start:
            os.close(descriptor)
        self._outer = ProcessHandle(self._process.pid)
        self._init: ProcessHandle | None = None
        self._status = b""
        self._exit_code: int | None = None
        self.outputs: dict[int, bytearray] = {}
        self.stdout_fd = self._open_output(self._process.stdout)
        self.stderr_fd = -1 if merge_output else self._open_output(self._process.stderr)

    def _open_output(self, pipe: IO[bytes] | None) -> int:
        assert pipe is not None, "the process was started with pipes"
        descriptor = pipe.fileno()
        os.set_blocking(descriptor, False)
        self.outputs[descriptor] = bytearray()
        return descriptor

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def init_pid(self) -> int | None:
        """The host's pid of the sandbox's first process."""
        return self._init.pid if self._init is not None else None

    @property
    def outer_pid(self) -> int:
        return self._process.pid

    @property
    def stdin_fd(self) -> int:
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    @property
    def has_ended(self) -> bool:
        return self._outer.wait(0)

    @property
    def exit_code(self) -> int | None:
        """The exit code of a program that ended by itself. Read it after `end`."""
        return self._exit_code

    def wait_until_up(self) -> None:
        """Return when the sandbox has started and the program's time begins."""
        if self._launch.status_fd is None:
            return
        deadline = time.monotonic() + START_S
        poll = select.poll()
        poll.register(self._launch.status_fd, select.POLLIN)
        while self._init is None and self._exit_code is None:  # a fast program may have ended before we saw it
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise SandboxError(f"the sandbox was not up after {START_S:g} s")
            poll.poll(left_s * 1000)
            if not self._read_status() and self._init is None and self._exit_code is None:
                raise SandboxError(f"the sandbox did not come up: {self.complaint()}")

    def pump(self, timeout_s: float, cancel: Cancel | None = None) -> bool:
        """Read output for up to `timeout_s`, or until something happens. Return False if the run was cancelled."""
        poll = select.poll()
        for descriptor in self.outputs:
            poll.register(descriptor, select.POLLIN)
        poll.register(self._outer.fd, select.POLLIN)
        if cancel is not None:
            poll.register(cancel.fd, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(max(timeout_s, 0) * 1000)}
        for descriptor in ready & set(self.outputs):
            self._take(descriptor)
        return cancel is None or cancel.fd not in ready

    def _take(self, descriptor: int) -> bool:
        """Read one chunk of output. Return False at the end. Output far beyond the limit is dropped."""
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self._silence(descriptor)
            return False
        kept = self.outputs[descriptor]
        if len(kept) <= self.job.limits.output_bytes:
            kept += chunk
        return True

    def _silence(self, descriptor: int) -> None:
        """Replace a closed pipe, which would always be ready to read, by one that is never ready."""
        silent_read, silent_write = os.pipe()
        os.dup2(silent_read, descriptor, inheritable=False)
        os.set_blocking(descriptor, False)
        os.close(silent_read)
        self._stack.callback(os.close, silent_write)

    def broken_limit(self) -> Ending | None:
        """The limit that the program has broken, of those that are watched from outside."""
        if any(len(kept) > self.job.limits.output_bytes for kept in self.outputs.values()):
            return "output_limit"
        if self.init_pid is not None and memory_bytes(self.init_pid) > self.job.limits.memory_bytes:
            return "memory_limit"
        if self.init_pid is not None and self.job.base is not None:  # sessions with the same base count together
            return "process_limit" if len(descendants(self.init_pid)) > self.job.limits.processes else None
        return None

    def text(self, descriptor: int) -> str:
        return bytes(self.outputs[descriptor][: self.job.limits.output_bytes]).decode("utf-8", errors="replace")

    def end(self) -> None:
        """Kill what is left, wait for it, and read the last output. A second call does nothing."""
        if self._process.returncode is not None:
            return
        try:
            if self._outer.wait(0) and self._launch.status_fd is not None:
                self._read_status()  # it ended by itself and has an exit code
            self._kill()
            for descriptor in self.outputs:
                while self._take(descriptor):
                    pass
        finally:
            self._outer.close()
            if self._init is not None:
                self._init.close()
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
            self._stack.close()

    def complain_unless_it_ran(self) -> None:
        """Raise `SandboxError` if the sandbox ended before its program began."""
        if self._launch.status_fd is not None and self._exit_code is None:
            raise SandboxError(f"the sandbox ended before its program did: {self.complaint()}")

    def _kill(self) -> None:
        if self._init is None and self._launch.status_fd is not None:
            self._read_status()
        if self._init is not None:
            self._init.kill()  # this ends the whole namespace; bubblewrap waits for it and ends too
            if not self._init.wait(END_S):
                raise SandboxError(f"processes of a sandbox are still there {END_S:g} s after they were killed")
            self._outer.wait(END_S)
        self._outer.kill()
        if self._launch.status_fd is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # not yet waited for, so the pid is still its own
            _kill_user(self._launch.user_id)
        code = self._process.wait(END_S)
        if self._launch.status_fd is None and code >= 0:
            self._exit_code = code
        elif self._launch.status_fd is None and code != -signal.SIGKILL:
            self._exit_code = 128 - code

    def _read_status(self) -> bool:
        """Read what bubblewrap reports. Return False when it will report no more."""
        assert self._launch.status_fd is not None
        poll = select.poll()
        poll.register(self._launch.status_fd, select.POLLIN)
        is_open = True
        while is_open and poll.poll(0):
            chunk = os.read(self._launch.status_fd, _CHUNK)
            is_open = bool(chunk)
            self._status += chunk
        *lines, self._status = self._status.split(b"\n")
        for line in lines:
            report = json.loads(line)
            if "child-pid" in report and self._init is None:
                with contextlib.suppress(ProcessLookupError):
                    self._init = ProcessHandle(report["child-pid"])
            self._exit_code = report.get("exit-code", self._exit_code)
        return is_open

    def complaint(self) -> str:
        """The last output, for an error message."""
        for descriptor in self.outputs:
            self._take(descriptor)
        said = b" ".join(bytes(kept) for kept in self.outputs.values()).decode("utf-8", errors="replace")
        return said.strip()[-300:] or "it said nothing"


def _kill_user(user_id: int | None) -> None:
    """Kill every process of a user id that was drawn for one job."""
    if user_id is None:
        return
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if place.stat().st_uid == user_id:
                os.kill(int(place.name), signal.SIGKILL)


def run_job(backend: Backend, job: SandboxJob, cancel: Cancel | None = None) -> SandboxResult:
    """Run one program until it ends or is killed."""
    with run_slots, ExitStack() as stack:
        stdin = data_to_fd(job.stdin, stack)
        with Running(backend, job, stdin=stdin) as running:
            running.wait_until_up()
            started = time.monotonic()
            ending = follow(running, started + job.limits.wall_s, cancel)
            wall_s = time.monotonic() - started
        if ending == "finished":
            running.complain_unless_it_ran()
        return SandboxResult(
            ending=ending,
            exit_code=running.exit_code if ending == "finished" else None,
            stdout=running.text(running.stdout_fd),
            stderr=running.text(running.stderr_fd),
            wall_s=wall_s,
            limits=job.limits,
        )


def follow(running: Running, deadline: float, cancel: Cancel | None) -> Ending:
    """Read output until the program ends or must be killed."""
    look_s = _FIRST_LOOK_S
    next_look = time.monotonic() + look_s
    while not running.has_ended:
        now = time.monotonic()
        if now >= deadline:
            return "timeout"
        if not running.pump(min(deadline, next_look) - now, cancel):
            return "cancelled"
        if any(len(kept) > running.job.limits.output_bytes for kept in running.outputs.values()):
            return "output_limit"
        if time.monotonic() >= next_look:
            broken = running.broken_limit()
            if broken is not None:
                return broken
            look_s = _LATER_LOOKS_S
            next_look = time.monotonic() + look_s
    return "finished"
