"""Runs Python code against tests, in a sandbox.

A test with an expected value is checked outside the sandbox: the sandbox sends back the value of the call and never
sees the expected one, so code cannot cheat by printing "passed". A test that is a statement (`assert ...`) is checked
inside, where the code could tamper with it. `statement_to_test` turns most asserts into the first kind.
"""

from __future__ import annotations

import ast
import json
import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from turnwise.envs.sandbox.limits import SIGNALLED, Limits, SandboxResult
from turnwise.envs.sandbox.sandbox import Sandbox, SandboxKind
from turnwise.errors import CodeRunnerError

TestsEnding = Literal["finished", "timeout", "crash"]

CODE_LIMITS = Limits(cpu_s=2, wall_s=10.0, processes=1, file_bytes=0, output_bytes=1 << 20)
"""Limits for small functions. They may not write to files."""

_CHILD = Path(__file__).with_name("python_child.py")
_ARGV = ("python3", "-I", "-S", "-B", "/work/.run.py")
_LINE_BYTES = 1 << 16
"""The longest line that the child sends, unless the code tampers with it."""


@dataclass(frozen=True, slots=True)
class CallTest:
    """An expression and the value it should have: `CallTest("add(2, 3)", 5)`. Values are Python literals."""

    __test__ = False  # tells pytest that this is not a test class

    call: str
    expected: Any

    def __str__(self) -> str:
        return f"{self.call} == {self.expected!r}"


@dataclass(frozen=True, slots=True)
class StatementTest:
    """Statements that raise when the code is wrong."""

    statements: str

    def __str__(self) -> str:
        return self.statements


PythonTest = CallTest | StatementTest


@dataclass(frozen=True, slots=True, kw_only=True)
class TestsOutcome:
    """The result of running code against its tests."""

    __test__ = False  # tells pytest that this is not a test class

    ending: TestsEnding
    """`finished`: every test returned a value or raised. `timeout`: the code was stopped because it took too long, used
    too much memory or sent too much. `crash`: the process ended before its tests did."""
    passed: tuple[bool, ...]
    """One per test. All are False unless the run finished."""
    errors: tuple[str | None, ...]
    """The exception that each test raised."""
    values: tuple[str | None, ...]
    """The repr of the value that each call returned."""
    printed: str
    """What the code wrote to its standard streams."""
    verdict: str
    """How the run was stopped. Empty if it finished."""

    @property
    def num_passed(self) -> int:
        return sum(self.passed)


async def run_python_tests(
    sandbox: Sandbox, code: str, tests: Sequence[PythonTest], limits: Limits = CODE_LIMITS
) -> TestsOutcome:
    """Run `code`, then each test. Code that hangs or crashes passes no test."""
    files = {".run.py": child_source()}
    result = await sandbox.run(
        _argv(sandbox), stdin=_request(sandbox, code, tests), files=files, limits=_with_room(limits, tests)
    )
    return _read_outcome(result, tests)


def run_python_tests_blocking(
    sandbox: Sandbox, code: str, tests: Sequence[PythonTest], limits: Limits = CODE_LIMITS
) -> TestsOutcome:
    """Do the same as `run_tests`, for code that is not async."""
    files = {".run.py": child_source()}
    result = sandbox.run_blocking(
        _argv(sandbox), stdin=_request(sandbox, code, tests), files=files, limits=_with_room(limits, tests)
    )
    return _read_outcome(result, tests)


@cache
def default_sandbox(kind: SandboxKind = "bubblewrap") -> Sandbox:
    """The shared sandbox of callers that do not bring their own."""
    return Sandbox(kind)


@cache
def child_source() -> bytes:
    """The program that runs inside the sandbox."""
    return _CHILD.read_bytes()


def _argv(sandbox: Sandbox) -> tuple[str, ...]:
    return _ARGV if sandbox.kind == "bubblewrap" else (*_ARGV[:-1], ".run.py")


def _with_room(limits: Limits, tests: Sequence[PythonTest]) -> Limits:
    return replace(limits, output_bytes=max(limits.output_bytes, (len(tests) + 1) * _LINE_BYTES))


def _request(sandbox: Sandbox, code: str, tests: Sequence[PythonTest]) -> str:
    pairs = [("call", test.call) if isinstance(test, CallTest) else ("statement", test.statements) for test in tests]
    return json.dumps({"code": code, "tests": pairs, "become_nobody": sandbox.kind == "subprocess"})


def _read_outcome(result: SandboxResult, tests: Sequence[PythonTest]) -> TestsOutcome:
    ready, *lines = _parse_lines(result.stdout) or [{}]
    if "ready" not in ready and result.ending == "finished":
        raise CodeRunnerError(
            f"the program that runs the code ended with {result.exit_code} before it was ready: {result.stderr[-200:]}"
        )
    if result.ending != "finished" or len(lines) < len(tests):
        is_late = result.ending != "finished" or result.exit_code == SIGNALLED + signal.SIGXCPU
        nothing = (None,) * len(tests)
        return TestsOutcome(
            ending="timeout" if is_late else "crash",
            passed=(False,) * len(tests),
            errors=nothing,
            values=nothing,
            printed=result.stderr,
            verdict=result.verdict() or "the program ended before its tests did",
        )
    lines = lines[: len(tests)]
    return TestsOutcome(
        ending="finished",
        passed=tuple(_is_passed(line, test) for line, test in zip(lines, tests, strict=True)),
        errors=tuple(_text(line.get("error")) for line in lines),
        values=tuple(_text(line.get("value")) for line in lines),
        printed=result.stderr,
        verdict="",
    )


def _parse_lines(received: str) -> list[dict[str, Any]]:
    """Parse complete lines as JSON objects, up to the first line that is not one."""
    lines: list[dict[str, Any]] = []
    for line in received.split("\n")[:-1]:
        try:
            parsed: object = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(parsed, dict):
            break
        lines.append(cast(dict[str, Any], parsed))
    return lines


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _is_passed(line: dict[str, Any], test: PythonTest) -> bool:
    """Whether the returned value is the expected one. A repr that is not a Python literal never is."""
    if isinstance(test, StatementTest):
        return line.get("passed") is True
    text = line.get("value")
    if not isinstance(text, str):
        return False
    try:
        value = ast.literal_eval(text)
        return bool(value == test.expected) or _is_close(value, test.expected)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return False


def _is_close(value: object, expected: object) -> bool:
    """Compare floats with a tolerance; bools and ints are not floats."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isinstance(expected, float):
        return False
    return math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-12)


def statement_to_test(statement: str) -> PythonTest:
    """Turn `assert f(1) == [2]` into a call with an expected value. Any other text stays a statement."""
    try:
        (node,) = ast.parse(statement.strip()).body
    except (SyntaxError, ValueError):
        return StatementTest(statement)
    if not isinstance(node, ast.Assert):
        return StatementTest(statement)
    match node.test:
        case ast.Compare(left=call, ops=[ast.Eq()], comparators=[right]):
            try:
                return CallTest(ast.unparse(call), ast.literal_eval(right))
            except (ValueError, TypeError, SyntaxError, RecursionError):
                return StatementTest(statement)
        case ast.Call():
            return CallTest(f"bool({ast.unparse(node.test)})", True)
        case ast.UnaryOp(op=ast.Not(), operand=ast.Call() as call):
            return CallTest(f"bool({ast.unparse(call)})", False)
        case _:
            return StatementTest(statement)
