"""A shell that lives through a dialogue. Its current folder, variables and files stay from command to command.

When a command is done, or at its deadline, all processes except the shell are killed. If the shell itself dies (`exit`,
a signal, a command that does not stop), the result says so and a new shell is started. It keeps the files and the
current folder, but not the variables. `fork` opens a second session that goes on from the same point, `snapshot` and
`restore` go back to one; both keep files, /tmp, folder and everything that the shell knows (`areas.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shlex
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

from turnwise.envs.sandbox.areas import WorkArea
from turnwise.envs.sandbox.files import FileTree
from turnwise.envs.sandbox.limits import Ending, Limits, SandboxResult
from turnwise.envs.sandbox.members import descendants, kill_below, start_time
from turnwise.envs.sandbox.process import START_S, Backend, Cancel, Running, SandboxJob, run_slots
from turnwise.envs.sync import CallThread
from turnwise.errors import DataError, SandboxError, SessionClosedError

MAX_COMMAND_BYTES = 48_000
"""Longest command. It must fit into a pipe, which holds 64 KB."""

_MARK_BYTES = 8192
"""More than an end mark with its folder has."""
_GRACE_S = 1.0
_LOOK_S = 0.1
_MARK_FD = 251
_CAPTURE_S = 5.0
_TELL_STATE = (
    "builtin declare -p; builtin declare -f; builtin alias -p; builtin trap -p; builtin umask -p; builtin shopt -p; "
    "builtin set +o"
)

_FIXED = re.compile(
    r"^declare -\S+ (?:BASH\w*|DIRSTACK|EUID|EPOCH\w+|FUNCNAME|GROUPS|HISTCMD|LINENO|PIPESTATUS|PPID|S?RANDOM|SECONDS|"
    r"SHELLOPTS|UID|COMP_WORDBREAKS|_)(?:=.*)?\n",
    re.MULTILINE,
)
"""Variables that a shell sets by itself. Setting some of them ends the script."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellState:
    """What a shell knows: its folder, and a script that sets its variables, functions, aliases, options and traps."""

    script: str = ""
    folder: str | None = None

    def to_input(self) -> bytes:
        """The script as a shell reads it. Variables that no shell lets anyone set are left out."""
        script = _FIXED.sub("", self.script)
        return f"{{\n:\n{script}\n}} >/dev/null 2>&1\n".encode("utf-8", "replace") if script else b""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTerms:
    """How a session begins and how long it is kept."""

    lease_s: float
    state: ShellState = field(default_factory=ShellState)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Files and shell state of a session at one moment."""

    session_id: str
    area: WorkArea
    state: ShellState

    def close(self) -> None:
        self.area.remove()


class SessionForks(Protocol):
    """The part of the pool that a session needs."""

    def fork(self, backend: Backend, job: SandboxJob, area: WorkArea, terms: SessionTerms) -> Session: ...

    def new_place(self) -> Path: ...


def area_job(job: SandboxJob, area: WorkArea) -> SandboxJob:
    """The job with its files in this area."""
    is_layered = area.base is not None
    return replace(
        job,
        directory=area.upper,
        base=area.base.folder if area.base is not None else None,
        scratch=area.scratch if is_layered else None,
        tmp=area.tmp,
        user_id=area.user_id,
    )


def _write_all(descriptor: int, data: bytes) -> None:
    """Write more than fits into the pipe; the shell reads it meanwhile."""
    with contextlib.suppress(BrokenPipeError):  # the shell is dead; the mark that follows will not come
        while data:
            data = data[os.write(descriptor, data) :]


class Session:
    """Made by `Sandbox.open`. Closed by `close`, by its pool, or when its lease ends."""

    def __init__(
        self, *, identity: str, area: WorkArea, backend: Backend, job: SandboxJob, terms: SessionTerms
    ) -> None:
        self.id = identity
        self.lease_s = terms.lease_s
        self.num_restarts = 0
        self._area = area
        self._backend = backend
        self._job = area_job(job, area)
        self._lock = threading.RLock()
        self._thread = CallThread()
        self._cancel: Cancel | None = None
        self._shell: Running | None = None
        self._shell_pid = -1
        self._full_bytes = 0
        self._state = terms.state
        self._folder = terms.state.folder
        self._closed_because = ""
        self._expires_at = time.monotonic() + terms.lease_s
        self.pool: SessionForks | None = None
        self.on_close: Callable[[], None] = lambda: None

    @property
    def files(self) -> FileTree:
        """The files of /work, read and written from outside. With an overlay, the shell is started for it, and this
        waits for a command that runs; a coroutine uses `with_files`."""
        if self._area.base is None:
            return self._tree()
        return self._in_thread(self._tree)

    async def with_files(self, work: Callable[[FileTree], T]) -> T:
        """Read or write the files of /work in the session's own thread, while the event loop goes on."""
        self._check_open()
        result: T = await self._thread.run(self._locked, lambda: work(self._tree()))
        self.renew()
        return result

    @property
    def has_overlay(self) -> bool:
        """Whether a snapshot copies only what was changed."""
        return self._area.base is not None

    @property
    def expires_at(self) -> float:
        """When the lease ends, on the clock of `time.monotonic`. Every command renews it."""
        return self._expires_at

    @property
    def is_closed(self) -> bool:
        return bool(self._closed_because)

    @property
    def limits(self) -> Limits:
        return self._job.limits

    def renew(self) -> None:
        self._expires_at = time.monotonic() + self.lease_s

    async def run(self, command: str, deadline_s: float | None = None) -> SandboxResult:
        """Run one command. `stdout` holds all of its output. A failing command does not raise."""
        wall_s = deadline_s if deadline_s is not None else self._job.limits.wall_s
        if "\0" in command or len(command.encode("utf-8", "replace")) > MAX_COMMAND_BYTES:
            raise DataError(f"the command has a NUL byte or more than {MAX_COMMAND_BYTES} bytes; write a file instead")
        self._check_open()
        self._expires_at = time.monotonic() + self.lease_s + wall_s
        cancel = Cancel()

        def work() -> SandboxResult:
            try:
                return self._run(command, wall_s, cancel)
            finally:
                cancel.close()

        try:
            return await self._thread.run(work)
        except asyncio.CancelledError:
            cancel.set()
            raise

    async def close(self) -> None:
        """End the shell and remove its files. It may be called twice."""
        await asyncio.get_running_loop().run_in_executor(None, self.close_blocking, "it was closed")

    def close_blocking(self, reason: str) -> None:
        if self._closed_because:
            return
        self._closed_because = reason
        if self._cancel is not None:
            self._cancel.set()
        with self._lock:
            if self._shell is not None:
                self._shell.end()
                self._shell = None
        self._thread.stop()
        self._area.remove()
        self.on_close()

    def fork(self) -> Session:
        """Open an independent session that goes on from here: same files, folder, variables and functions."""
        self._check_can_fork()
        return self._in_thread(self._fork)

    def snapshot(self) -> Snapshot:
        """Keep the files and the shell's state as they are now, for `restore`. Close it when it is not needed."""
        self._check_can_fork()
        return self._in_thread(self._snapshot)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this session."""
        if snapshot.session_id != self.id:
            raise DataError(f"the snapshot is of session {snapshot.session_id}, this is {self.id}; restore its own")
        self._in_thread(lambda: self._restore(snapshot))

    def _check_can_fork(self) -> None:
        if not self._backend.has_own_pids:
            raise DataError(
                "sandbox=subprocess cannot fork: its folder has another name in every session; use bubblewrap"
            )

    def _in_thread(self, work: Callable[[], T]) -> T:
        """Run something in the session's own thread, after the command that runs there, and wait for it."""
        self._check_open()
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                outcome.set_result(self._locked(work))
            except BaseException as error:  # noqa: BLE001 - whoever waits gets it
                outcome.set_exception(error)

        self._thread.post(run)
        result = outcome.result()
        self.renew()
        return result

    def _locked(self, work: Callable[[], T]) -> T:
        with self._lock, run_slots:
            self._check_open()
            return work()

    def _tree(self) -> FileTree:
        if self._area.base is None:
            return FileTree(self._area.upper, self._area.owner)
        shell = self._ensure_shell()
        return FileTree(Path(f"/proc/{shell.init_pid}/root/work"), self._area.owner)

    def _fork(self) -> Session:
        assert self.pool is not None
        terms = SessionTerms(lease_s=self.lease_s, state=self._capture())
        return self.pool.fork(self._backend, self._job, self._area, terms)

    def _snapshot(self) -> Snapshot:
        assert self.pool is not None
        state = self._capture()
        area = self._area.copy_to(self.pool.new_place(), self._area.user_id)
        return Snapshot(session_id=self.id, area=area, state=state)

    def _restore(self, snapshot: Snapshot) -> None:
        if self._shell is not None:
            self._shell.end()
            self._shell = None
        self._area.replace_by(snapshot.area)
        self._state, self._folder = snapshot.state, snapshot.state.folder

    def _capture(self) -> ShellState:
        """What the shell knows, as a script that makes another shell know it too."""
        if self._shell is None or self._shell.has_ended:
            return ShellState(script=self._state.script, folder=self._folder)
        cancel = Cancel()
        try:
            result = self._run_in(self._shell, _TELL_STATE, _CAPTURE_S, cancel)
        finally:
            cancel.close()
        if result.ending != "finished":
            raise SandboxError(f"the shell of session {self.id} does not tell its state: {result.verdict()}")
        return ShellState(script=result.stdout, folder=self._folder)

    def _check_open(self) -> None:
        if self._closed_because:
            raise SessionClosedError(f"session {self.id} is gone: {self._closed_because}; open another one")

    def _run(self, command: str, wall_s: float, cancel: Cancel) -> SandboxResult:
        """Run one command. This runs in the session's own thread, which lives longer than the shell that it starts."""
        with self._lock, run_slots:
            self._check_open()
            self._cancel = cancel
            try:
                shell = self._ensure_shell()
                return self._run_in(shell, command, wall_s, cancel)
            finally:
                self._cancel = None
                self.renew()

    def _run_in(self, shell: Running, command: str, wall_s: float, cancel: Cancel) -> SandboxResult:
        started = time.monotonic()
        mark = self._send(shell, command)
        ending, found = self._follow(shell, mark, started + wall_s, cancel)
        exit_code = int(found[1]) if found else None
        output = shell.text(shell.stdout_fd)
        if found:
            output = output[: output.rindex(f"\n{mark} ")] if f"\n{mark} " in output else output
            self._folder = found[2].decode("utf-8", errors="replace")
        elif ending == "finished":  # the end mark did not come, because the shell ended
            shell.end()
            self._shell, ending, exit_code = None, "shell_died", shell.exit_code
            output = shell.text(shell.stdout_fd)
        else:
            output = self._interrupt(shell, mark, output)
        limits = replace(self._job.limits, wall_s=wall_s)
        return SandboxResult(
            ending=ending,
            exit_code=exit_code,
            stdout=output,
            stderr="",
            wall_s=time.monotonic() - started,
            limits=limits,
        )

    def _send(self, shell: Running, command: str) -> str:
        """Write the command to the shell's input. Return the mark that the shell will print at its end."""
        mark = f"turnwise-{secrets.token_hex(8)}"
        shell.outputs[shell.stdout_fd].clear()
        # Kill everything in the namespace except the shell. Bash would report these deaths during the next command, so
        # it waits for them here and then disowns them: after `wait` alone, it may still report the last one.
        kill_all = "{ builtin kill -9 -1; builtin wait; builtin disown -a; } 2>/dev/null; "
        sweep = kill_all if self._backend.has_own_pids else ""
        tell = f'builtin printf \'\\n%s %s %s\\n\' {mark} "$__code" "$PWD" >&{_MARK_FD}'
        script = f"eval {shlex.quote(command)} </dev/null >&{_MARK_FD} 2>&1 {_MARK_FD}>&-\n__code=$?; {sweep}{tell}\n"
        with contextlib.suppress(BrokenPipeError):  # the shell is dead; `_follow` notices that
            os.write(shell.stdin_fd, script.encode("utf-8", "replace"))
        return mark

    def _follow(
        self, shell: Running, mark: str, deadline: float, cancel: Cancel | None
    ) -> tuple[Ending, re.Match[bytes] | None]:
        """Read output until the mark comes, the shell dies, or a limit is reached."""
        pattern = re.compile(rf"\n{mark} (\d+) ([^\n]*)\n".encode())
        next_look = time.monotonic() + _LOOK_S
        while True:
            found = pattern.search(shell.outputs[shell.stdout_fd])
            if found:
                return ("disk_limit" if self._is_too_full() else "finished"), found
            if len(shell.outputs[shell.stdout_fd]) > self._job.limits.output_bytes:
                return "output_limit", None
            now = time.monotonic()
            if shell.has_ended:
                return "finished", None
            if now >= deadline:
                return "timeout", None
            if now >= next_look:
                broken = shell.broken_limit()
                if broken is None and self._is_too_full():
                    broken = "disk_limit"
                if broken is not None:
                    return broken, None
                next_look = now + _LOOK_S
            if not shell.pump(min(deadline, next_look) - now, cancel):
                return "cancelled", None

    def _is_too_full(self) -> bool:
        """Whether there is more on disk than allowed, and more than before: a command may remove files one by one."""
        used = self._area.num_bytes()
        is_too_full = used > max(self._job.limits.disk_bytes, self._full_bytes)
        self._full_bytes = used if used > self._job.limits.disk_bytes else 0
        return is_too_full

    def _interrupt(self, shell: Running, mark: str, output: str) -> str:
        """Stop the command but keep the shell. If the shell itself does not stop, replace it."""
        found = None
        if shell.init_pid is not None:
            shell.outputs[shell.stdout_fd].clear()
            deadline, ending = time.monotonic() + _GRACE_S, "timeout"
            # Again and again: the shell may only now begin what it was told, or go on to the next part of it. What a
            # flood left in the pipe may be longer than a reply may be.
            while found is None and ending in ("timeout", "output_limit") and time.monotonic() < deadline:
                kill_below(shell.init_pid, spare=self._shell_pid)
                del shell.outputs[shell.stdout_fd][: -min(_MARK_BYTES, self._job.limits.output_bytes)]
                ending, found = self._follow(shell, mark, min(deadline, time.monotonic() + _LOOK_S), None)
        if found is None:
            shell.end()
            self._shell = None
            output += "\n[the shell was restarted: files are kept, variables are not]"
        return output

    def _ensure_shell(self) -> Running:
        if self._shell is not None and not self._shell.has_ended:
            return self._shell
        if self._shell is not None:
            self._shell.end()
        is_restart = self._shell_pid >= 0
        self._area.let_shell_in()
        shell = Running(self._backend, self._job, stdin=None, merge_output=True)
        try:
            shell.wait_until_up()
            os.write(shell.stdin_fd, f"exec {_MARK_FD}>&1; cd -- {shlex.quote(self._folder or '.')}\n".encode())
            _write_all(shell.stdin_fd, self._state.to_input())
            self._state = ShellState()
            mark = self._send(shell, ":")
            _, found = self._follow(shell, mark, time.monotonic() + START_S, None)
            if found is None:
                raise SandboxError(f"the shell of session {self.id} does not answer: {shell.text(shell.stdout_fd)!r}")
        except BaseException:
            shell.end()
            raise
        members = descendants(shell.init_pid) if shell.init_pid is not None else []
        self._shell_pid = members[0] if members else shell.outer_pid
        self.num_restarts += is_restart
        self._shell = shell
        self._note_process(shell.outer_pid)
        return shell

    def _note_process(self, pid: int) -> None:
        """Note which process to kill, for the pool that cleans up if this process dies."""
        note = json.dumps({"pid": pid, "start_time": start_time(pid)})
        (self._area.place / "process.json").write_text(note, encoding="utf-8")
