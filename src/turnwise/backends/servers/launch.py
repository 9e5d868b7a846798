"""Starts an inference server for a run, and makes sure that it ends with the run's process.

The server runs in a process group of its own, listens on the loopback device only, and writes to a log file that stays.
It dies with this process, however that ends (`supervisor.py`). A server that does not become ready, or ends by itself,
is an error with the last lines of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from turnwise.backends.servers import supervisor
from turnwise.backends.servers.http import JsonServer
from turnwise.errors import ServiceError
from turnwise.runtime.pending_calls import PENDING_CALLS

POLL_S = 0.25
STOP_S = supervisor.GRACE_S + 5.0
"""How long a supervisor may take to end its server before the group is killed from here."""
NUM_LINES = 15
"""Lines of the log that an error shows."""
MAX_STARTS = 4
"""Most starts of one server in a run, so that a server that keeps dying is given up."""
QUIET_S = 30.0
"""How long a server that runs may leave health checks without an answer before it is killed and started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """How to start one kind of server."""

    name: str
    """What the server is called in messages."""
    arguments: Callable[[int], Sequence[str]]
    """The command, for a port that is free."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables in addition to ours."""
    ready_path: str = "/health"
    """Answers with status 200 when the server can sample."""


class OwnSampler(Protocol):
    """What samples for one run alone, and is started, started again and stopped with it."""

    @property
    def url(self) -> str:
        """Its address, or a name for it."""
        ...

    async def start(self) -> None:
        """Start it, and wait until it is ready."""

    async def revive(self, *, is_stuck: bool = False) -> bool:
        """Start it again if it ended, or if it runs and does not answer, or if it is known to be stuck whatever it
        says. Returns whether it was started."""
        ...

    async def stop(self) -> None:
        """End it, with every process that it started."""


class OwnServer:
    """One server that this process started."""

    def __init__(self, command: ServerCommand, log: Path, *, start_s: float) -> None:
        """Start nothing yet.

        Args:
            log: Where the server's output goes; a second start appends to it.
            start_s: How long the server may take to be ready.
        """
        self._command = command
        self.log = log
        self._start_s = start_s
        self._process: subprocess.Popen[bytes] | None = None
        self._output: BinaryIO | None = None
        self._num_starts = 0
        self._reserved: socket.socket | None = None
        """Keeps the port ours from the moment it is chosen, also between two starts."""

    @property
    def url(self) -> str:
        """The address; the same one after every start."""
        if self._reserved is None:
            self._reserved = _reserve_port()
        return f"http://127.0.0.1:{self._reserved.getsockname()[1]}"

    @property
    def group_id(self) -> int | None:
        """The process group of the server and all that it starts, to look for what is left of them; None when it does
        not run."""
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Start the server, and wait until it is ready."""
        if self._num_starts >= MAX_STARTS:
            raise ServiceError(f"{self._command.name} ended {MAX_STARTS} times in this run; {self._last_words()}")
        self._num_starts += 1
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = list(self._command.arguments(int(self.url.rpartition(":")[2])))
        self._output = self.log.open("ab")
        self._output.write(f"\n$ {' '.join(command)}\n".encode())
        self._output.flush()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(supervisor.__file__).resolve()), *command],
            stdin=subprocess.PIPE,  # we hold its other end: when we die, it closes
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self._command.environment},
            start_new_session=True,
        )
        try:
            with PENDING_CALLS.listed(self._command.name, f"start ({self.log})", self._start_s, is_reason=True):
                await self._until_ready(self._start_s)
        except BaseException:
            if self._num_starts == 1:
                await self.stop()
            else:  # whoever sends requests knows the address: another start may still succeed there
                await self._end(self._process)
            raise

    async def revive(self, *, is_stuck: bool = False) -> bool:
        if self.is_alive and not is_stuck:
            with contextlib.suppress(ServiceError):
                await self._until_ready(QUIET_S)
                return False
        if self._process is not None:
            await self._end(self._process)
        await self.start()
        return True

    async def stop(self) -> None:
        """End the server and every process that it started."""
        if self._process is not None:
            await self._end(self._process)
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    async def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End the processes; the port stays ours."""
        self._process = None
        assert process.stdin is not None
        process.stdin.close()  # the supervisor ends the server, and then its group
        until_s = time.monotonic() + STOP_S
        while process.poll() is None and time.monotonic() < until_s:
            await asyncio.sleep(POLL_S / 5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if self._output is not None:
            self._output.close()

    async def _until_ready(self, deadline_s: float) -> None:
        until_s = time.monotonic() + deadline_s
        server = JsonServer(self.url)
        try:
            while True:
                if not self.is_alive:
                    raise ServiceError(f"{self._command.name} ended before it was ready; {self._last_words()}")
                with contextlib.suppress(ServiceError):
                    await server.get(self._command.ready_path, deadline_s=5.0)
                    return
                if time.monotonic() > until_s:
                    raise ServiceError(
                        f"{self._command.name} was not ready after {deadline_s:g} s (rollout.server_start_s); "
                        f"{self._last_words()}"
                    )
                await asyncio.sleep(POLL_S)
        finally:
            await server.close()

    def _last_words(self) -> str:
        """The end of the log, for an error."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            tail = "\n  ".join(line[:300] for line in lines[-NUM_LINES:])
            return f"its log {self.log} ends with:\n  {tail}"
        return f"its log would be {self.log}"


def _reserve_port() -> socket.socket:
    """Hold a free port without listening on it. A server that reuses addresses, as vLLM and SGLang do, may bind it too;
    nobody who looks for a free port gets it."""
    held = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        held.setsockopt(socket.SOL_SOCKET, option, 1)
    held.bind(("127.0.0.1", 0))
    return held
