"""Runs a response's code against tests in a sandbox (docs/sandbox.md), and comes back in time whatever the code does.

The process has no network, no files, no environment and no processes of the host. It sends back the values of the
tests' calls; they are compared here, so the expected ones never enter the process and printing "passed" passes nothing.
Without bubblewrap nothing is run; `sandbox="subprocess"` asks for limits without walls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.envs.sandbox import Limits, Sandbox
from turnwise.envs.sandbox.python_tests import CallTest as Test
from turnwise.envs.sandbox.python_tests import TestsEnding as Ending
from turnwise.envs.sandbox.python_tests import TestsOutcome as RunOutcome
from turnwise.envs.sandbox.python_tests import default_sandbox, run_python_tests_blocking
from turnwise.errors import CodeRunnerError, ConfigError, SandboxError

__all__ = ["Ending", "RunLimits", "RunOutcome", "Test", "run_tests"]


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

    def to_sandbox(self) -> Limits:
        return Limits(
            cpu_s=self.cpu_s,
            wall_s=self.wall_s,
            memory_bytes=self.memory_bytes,
            file_bytes=self.file_bytes,
            processes=1,
        )


def run_tests(
    code: str, tests: Sequence[Test], limits: RunLimits | None = None, sandbox: Sandbox | None = None
) -> RunOutcome:
    """Run `code`, then each test's call; code that hangs or crashes passes no test."""
    sandbox = sandbox or default_sandbox()
    try:
        return run_python_tests_blocking(sandbox, code, tests, (limits or RunLimits()).to_sandbox())
    except SandboxError as cause:
        raise CodeRunnerError(f"the sandbox failed: {cause}") from cause
