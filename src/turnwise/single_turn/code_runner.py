"""Runs a response's code against tests, in a process of its own, under limits.

The process is a fresh Python (`-I -S`) with an empty environment, in an empty temporary directory, in a session of its
own that is killed at a wall-clock deadline. CPU seconds, address space, file size and the number of processes are
limited before the code is read (`code_child.py`); started by root, it becomes nobody first. It sends back the values
of the tests' calls, a bounded number of bytes; they are compared here, so the expected ones never enter the process
and printing "passed" passes nothing.

These limits keep a clumsy program from taking the machine along. They are NOT a security boundary: the code can read
files that its user can read and reach the network. Put code that someone may have written with intent into a container
or a virtual machine.
"""

from __future__ import annotations

import ast
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from turnwise.errors import CodeRunnerError, ConfigError

Ending = Literal["finished", "timeout", "crash"]

_CHILD = Path(__file__).with_name("code_child.py")
_START_S = 30.0
_EXIT_S = 1.0
_LINE_BYTES = 1 << 16
"""No line of the child is longer."""


@dataclass(frozen=True, slots=True)
class Test:
    """An expression and the value it should have: `Test("add(2, 3)", 5)`. Values are Python literals."""

    __test__ = False  # pytest: not a test class

    call: str
    expected: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """What one run may use."""

    cpu_s: int = 2
    wall_s: float = 10.0
    memory_bytes: int = 512 << 20
    """Address space; Python itself takes about 30 MB of it."""
    file_bytes: int = 0
    """Largest file that may be written; 0: not a byte."""

    def __post_init__(self) -> None:
        if self.cpu_s < 1 or self.wall_s <= 0 or self.memory_bytes < 1 << 26 or self.file_bytes < 0:
            raise ConfigError(
                f"{self}; expected cpu_s of at least 1, a positive wall_s, memory_bytes of at least {1 << 26}"
            )


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What became of the code."""

    ending: Ending
    """`finished`: every test gave a value or raised. `timeout`: stopped, for its CPU or wall time or for sending too
    much. `crash`: it ended before its tests did."""
    passed: tuple[bool, ...]
    """One per test; all False unless it finished."""
    errors: tuple[str | None, ...]
    """What each test raised."""

    @property
    def num_passed(self) -> int:
        return sum(self.passed)


def run_tests(code: str, tests: Sequence[Test], limits: RunLimits | None = None) -> RunOutcome:
    """Run `code`, then each test's call; code that hangs or crashes passes no test."""
    limits = limits or RunLimits()
    request = {"code": code, "calls": [test.call for test in tests], "limits": asdict(limits)}
    received, returncode = _run_child(json.dumps(request), limits.wall_s, (len(tests) + 1) * _LINE_BYTES)
    ready, *results = _parse_lines(received) or [{}]
    if "ready" not in ready:
        raise CodeRunnerError(
            f"the process for the code was not ready after {_START_S:.0f} s"
            if returncode is None
            else f"the process for the code ended with {returncode} before it was ready; is {sys.executable} intact?"
        )
    if returncode is None or len(results) < len(tests):
        ending = "timeout" if returncode in (None, -signal.SIGXCPU) else "crash"
        return RunOutcome(ending, (False,) * len(tests), (None,) * len(tests))
    passed = tuple(_is_value(result.get("value"), test) for result, test in zip(results, tests, strict=False))
    return RunOutcome("finished", passed, tuple(result.get("error") for result in results[: len(tests)]))


def _run_child(request: str, wall_s: float, max_bytes: int) -> tuple[bytes, int | None]:
    """What the child sent, and its exit code, None when it was stopped; nothing of its process group is left."""
    with tempfile.TemporaryDirectory(prefix="turnwise-code-") as empty, tempfile.TemporaryFile() as stdin:
        stdin.write(request.encode())
        stdin.seek(0)
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(_CHILD)],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=empty,
                env={},
                start_new_session=True,
            )
        except OSError as cause:
            raise CodeRunnerError(f"cannot start {sys.executable}: {cause}") from cause
        with child:
            assert child.stdout is not None
            try:
                received, is_closed = _read(child.stdout.fileno(), wall_s, max_bytes)
                has_ended = is_closed and _has_ended(child.pid)
            finally:
                os.killpg(child.pid, signal.SIGKILL)  # not yet waited for, so the id is still its own
                child.wait()
    return received, child.returncode if has_ended else None


def _read(pipe: int, wall_s: float, max_bytes: int) -> tuple[bytes, bool]:
    """What comes until the pipe is closed (True), or the time is up or more has come than honest results have.

    The code's time starts with the first line, which says that the process is ready: a busy machine may take long to
    start it.
    """
    poll = select.poll()
    poll.register(pipe, select.POLLIN | select.POLLHUP)
    received = bytearray()
    deadline = time.monotonic() + _START_S
    while len(received) <= max_bytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            break
        chunk = os.read(pipe, 1 << 16)
        if not chunk:
            return bytes(received), True
        if b"\n" not in received and b"\n" in chunk:
            deadline = time.monotonic() + wall_s
        received += chunk
    return bytes(received), False


def _has_ended(pid: int) -> bool:
    """Whether a child that closed its pipe exits, as it should, at once; it is left to be waited for."""
    deadline = time.monotonic() + _EXIT_S
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def _parse_lines(received: bytes) -> list[dict[str, Any]]:
    """The whole lines that are JSON objects, up to the first that is not."""
    lines: list[dict[str, Any]] = []
    for line in received.split(b"\n")[:-1]:
        try:
            parsed: Any = json.loads(line)
        except ValueError:
            break
        if not isinstance(parsed, dict):
            break
        lines.append(parsed)  # pyright: ignore[reportUnknownArgumentType]
    return lines


def _is_value(text: object, test: Test) -> bool:
    """Whether a repr that came back is the expected value; what is no literal is no value."""
    if not isinstance(text, str):
        return False
    try:
        return bool(ast.literal_eval(text) == test.expected)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
