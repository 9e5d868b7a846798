"""Runs programs that a policy wrote, safely. See docs/sandbox.md."""

from turnwise.envs.sandbox.limits import Limits, SandboxResult
from turnwise.envs.sandbox.sandbox import Sandbox, SandboxKind, SandboxWarning
from turnwise.envs.sandbox.session import Session, Snapshot
from turnwise.envs.sandbox.worker import Worker, WorkerDiedError

__all__ = [
    "Limits",
    "Sandbox",
    "SandboxKind",
    "SandboxResult",
    "SandboxWarning",
    "Session",
    "Snapshot",
    "Worker",
    "WorkerDiedError",
]
