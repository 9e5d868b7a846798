"""The limits of one run, and its result in words that a policy can act on."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from turnwise.errors import ConfigError

Ending = Literal[
    "finished", "timeout", "output_limit", "memory_limit", "process_limit", "disk_limit", "cancelled", "shell_died"
]

SIGNALLED = 128
"""A higher exit code is 128 plus the number of the signal that ended the program."""

_MEGABYTE = 1 << 20
_MIN_MEMORY_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much one run may use. What it can reach (network, files, processes) is decided by the kind of sandbox."""

    wall_s: float = 10.0
    """Seconds from the moment the sandbox has started until everything in it is killed."""
    cpu_s: int = 10
    """CPU seconds of each process."""
    memory_bytes: int = 512 * _MEGABYTE
    """Address space of each process, and resident memory of all of them together."""
    processes: int = 64
    """Processes and threads at the same time."""
    file_bytes: int = 16 * _MEGABYTE
    """Size of the largest file."""
    disk_bytes: int = 64 * _MEGABYTE
    """Size of all files in the working directory, and of those in /tmp. A session counts what it wrote to both."""
    output_bytes: int = _MEGABYTE
    """Size of standard output, and of standard error."""

    def __post_init__(self) -> None:
        for name in ("wall_s", "cpu_s", "processes", "disk_bytes", "output_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"Limits: {name}={getattr(self, name)}; expected more than 0")
        if self.memory_bytes < _MIN_MEMORY_BYTES:
            raise ConfigError(f"Limits: memory_bytes={self.memory_bytes}; expected at least {_MIN_MEMORY_BYTES}")
        if self.file_bytes < 0:
            raise ConfigError(f"Limits: file_bytes={self.file_bytes}; expected 0 (nothing may be written) or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """The result of one run. A failed program is a result too; a failed sandbox raises `SandboxError`."""

    ending: Ending
    exit_code: int | None
    """None if the program was stopped from outside."""
    stdout: str
    """In a session, this holds standard output and standard error, in order."""
    stderr: str
    wall_s: float
    limits: Limits

    @property
    def is_ok(self) -> bool:
        return self.ending == "finished" and self.exit_code == 0

    def verdict(self) -> str:
        """One line that says how the program ended. Empty if it finished with exit code 0."""
        match self.ending:
            case "timeout":
                return f"stopped: not done after {self.limits.wall_s:g} s; it was killed with all of its processes"
            case "output_limit":
                return f"stopped: more than {_size(self.limits.output_bytes)} of output"
            case "memory_limit":
                return f"stopped: more than {_size(self.limits.memory_bytes)} of memory"
            case "process_limit":
                return f"stopped: more than {self.limits.processes} processes"
            case "disk_limit":
                return f"stopped: more than {_size(self.limits.disk_bytes)} in files"
            case "cancelled":
                return "stopped: cancelled from outside"
            case "shell_died":
                code = "was killed" if self.exit_code is None else f"ended with exit code {self.exit_code}"
                return f"the shell {code}; a new one was started: files are kept, variables are not"
            case "finished":
                return self._exit_verdict()

    def _exit_verdict(self) -> str:
        code = self.exit_code or 0
        if code == SIGNALLED + signal.SIGXCPU:
            return f"stopped: more than {self.limits.cpu_s} s of CPU time"
        if code == SIGNALLED + signal.SIGXFSZ:
            return f"stopped: a file larger than {_size(self.limits.file_bytes)}"
        if SIGNALLED < code < SIGNALLED + 65:
            name = signal.Signals(code - SIGNALLED).name if code - SIGNALLED in _SIGNALS else f"signal {code - 128}"
            return f"ended by {name}"
        return f"exit code {code}" if code else ""

    def to_text(self, max_chars: int = 2000) -> str:
        """Output and verdict as text for a message. The middle of a long output is left out."""
        output = self.stdout + (f"\n{self.stderr}" if self.stdout and self.stderr else self.stderr)
        output = shorten_middle(output.replace("\0", "\ufffd").strip("\n"), max_chars)
        verdict = self.verdict()
        parts = [output] if output else []
        parts += [f"[{verdict}]"] if verdict else []
        return "\n".join(parts) or "[no output]"


def shorten_middle(text: str, max_chars: int) -> str:
    """Keep the beginning and the end, because an error's cause is often at the start and its message at the end."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n... [{len(text) - 2 * half} characters left out] ...\n{text[-half:]}"


_SIGNALS = {int(number) for number in signal.Signals}


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _MEGABYTE:g} MB" if num_bytes >= _MEGABYTE else f"{num_bytes} bytes"
