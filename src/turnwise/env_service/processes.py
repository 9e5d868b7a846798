"""Env workers as processes of this machine: started with a run, watched, started again when one dies, ended with it.

The run holds the listening socket of every worker and hands it down, so a worker that is started again has the address
of the one that died, and whoever connects meanwhile waits instead of being refused. A worker reads its standard input,
a pipe that nobody writes to after the first line: it ends when the run does, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from turnwise.envs.remote.workers import EnvWorker, EnvWorkers, WorkerGone, WorkerRefused, request_now
from turnwise.errors import ConfigError
from turnwise.runtime.network import open_port

START_S = 120.0
"""Seconds for a worker to make its world."""
LOOK_S = 0.05
CHECK_S = 5.0
"""Seconds between two health checks of a worker, and for its answer."""
HUNG_S = 60.0
"""Seconds without an answer to a health check after which a worker is ended and replaced."""
END_S = 3.0
MAX_QUICK_DEATHS = 5
"""How often a worker may die in a row, each time within `QUICK_S`, before it is not started again."""
QUICK_S = 10.0
BACKLOG = 512
TAIL_BYTES = 4000
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker process serves."""

    env: str
    options: dict[str, Any]
    max_envs: int
    deadline_s: float


@dataclass(slots=True, eq=False)
class _Process:
    number: int
    listener: socket.socket
    worker: EnvWorker
    popen: subprocess.Popen[bytes]
    words: IO[bytes]
    started_s: float = field(default_factory=time.monotonic)
    num_quick_deaths: int = 0

    def last_words(self) -> str:
        self.words.seek(0, os.SEEK_END)
        self.words.seek(max(0, self.words.tell() - TAIL_BYTES))
        said = self.words.read().decode(errors="replace").strip().splitlines()
        return said[-1] if said else "it said nothing"


class WorkerLife(Protocol):
    """A process or an actor, from its start to its end."""

    def kill(self) -> None: ...


class WatchedEnvWorkers(EnvWorkers):
    """Workers that threads of this process watch, so that one that dies or hangs is replaced."""

    def __init__(self, workers: Sequence[EnvWorker], key: str = "") -> None:
        super().__init__(workers, key)
        self.num_restarts = 0
        self.on_restart: Callable[[str], None] = lambda _: None
        """Told about every worker that died or hangs, in a thread that watches."""
        self._ending = threading.Event()
        self._watches: list[threading.Thread] = []
        self._heard: dict[int, tuple[WorkerLife, float]] = {}
        """When each worker answered last, and which life of it did."""

    @abstractmethod
    def life_of(self, number: int) -> tuple[WorkerLife, float]:
        """Who serves as this worker now, and when that one was started."""

    def _begin_watch(self, look: Callable[[], None], every_s: float) -> None:
        """Call `look` again and again, and check the health of all workers beside it, until `_end_watch`.

        All workers are ready when this is called.
        """

        def watch(look: Callable[[], None], every_s: Callable[[], float]) -> None:
            while not self._ending.wait(every_s()):
                look()

        self._ending.clear()
        self._heard = {number: (self.life_of(number)[0], time.monotonic()) for number in range(len(self.workers))}
        for one, pause in ((look, lambda: every_s), (self._check_health, lambda: CHECK_S)):
            thread = threading.Thread(target=watch, args=(one, pause), name="turnwise-env-workers", daemon=True)
            self._watches.append(thread)
            thread.start()

    def _end_watch(self) -> None:
        self._ending.set()
        watches, self._watches = self._watches, []
        for thread in watches:
            thread.join()

    def _check_health(self) -> None:
        """Leave out workers that do not answer, and end those that have not for long: then they are seen as dead."""
        for number, worker in enumerate(self.workers):
            if worker.is_given_up or self._ending.is_set():
                continue
            life, started_s = self.life_of(number)
            try:
                request_now(worker.address, "GET", "/health", None, headers=self._headers, wait_s=CHECK_S)
            except WorkerGone as cause:
                self.leave_out(worker, str(cause), 2 * CHECK_S)
            except WorkerRefused:
                self._heard[number] = life, time.monotonic()
            else:
                self._heard[number] = life, time.monotonic()
                worker.down_until_s = 0.0
            answered, heard_s = self._heard.get(number, (None, 0.0))
            since_s = heard_s if answered is life else started_s + START_S - HUNG_S
            if time.monotonic() - since_s > HUNG_S and self.life_of(number)[0] is life:
                self.on_restart(
                    f"env worker {number} ({worker.address}) has not answered for {HUNG_S:g} s; it is ended"
                )
                life.kill()


class LocalEnvWorkers(WatchedEnvWorkers):
    """Workers that this process starts. Addresses are known before they start."""

    def __init__(self, spec: WorkerSpec, count: int) -> None:
        self._spec = spec
        self._count = count
        self._processes: list[_Process] = []
        super().__init__([EnvWorker("", spec.max_envs) for _ in range(count)])

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of the workers that run now."""
        return [process.popen.pid for process in self._processes]

    def life_of(self, number: int) -> tuple[WorkerLife, float]:
        process = self._processes[number]
        return process.popen, process.started_s

    def start(self) -> None:
        """Start the workers and wait until each has made its world."""
        try:
            for number, worker in enumerate(self.workers):
                listener = open_port(HOST, 0, BACKLOG)
                worker.address = f"http://{HOST}:{listener.getsockname()[1]}"
                self._processes.append(_Process(number, listener, worker, *_launch(self._spec, listener)))
            for process in self._processes:
                self._wait_until_ready(process)
        except BaseException:
            self.close()
            raise
        self._begin_watch(self._restart_dead, LOOK_S)

    def close(self) -> None:
        """End the workers: ask first, then kill."""
        self._end_watch()
        for process in self._processes:
            process.listener.close()
            _hang_up(process.popen)
        for process in self._processes:
            try:
                process.popen.wait(END_S)
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()
            process.words.close()
        self._processes = []

    def _wait_until_ready(self, process: _Process) -> None:
        give_up_s = time.monotonic() + START_S
        while time.monotonic() < give_up_s:
            with contextlib.suppress(WorkerGone, WorkerRefused):
                request_now(process.worker.address, "GET", "/health", None, headers={}, wait_s=1.0)
                return
            code = process.popen.poll()
            if code is not None and code < 0:  # somebody killed it, which says nothing about the world
                self._restart(process, code)
            elif code is not None:
                raise ConfigError(
                    f"env worker {process.number} ended before it served {self._spec.env}: {process.last_words()}"
                )
        raise ConfigError(f"env worker {process.number} did not serve {self._spec.env} within {START_S:g} s")

    def _restart_dead(self) -> None:
        for process in self._processes:
            code = process.popen.poll()
            if code is not None and not process.worker.is_given_up:
                self._restart(process, code)

    def _restart(self, process: _Process, code: int) -> None:
        is_quick = time.monotonic() - process.started_s < QUICK_S
        process.num_quick_deaths = process.num_quick_deaths + 1 if is_quick else 0
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        what = f"env worker {process.number} (process {process.popen.pid}) ended with {how}"
        if process.num_quick_deaths >= MAX_QUICK_DEATHS:
            process.listener.close()  # whoever connects is refused, instead of waiting
            why = f"{what}, {MAX_QUICK_DEATHS} times in a row; given up. Its last words: {process.last_words()}"
            process.worker.give_up(why)
            self.on_restart(why)
            return
        process.words.close()
        _hang_up(process.popen)
        process.popen, process.words = _launch(self._spec, process.listener)
        process.started_s = time.monotonic()
        self.num_restarts += 1
        self.on_restart(f"{what}; started again as process {process.popen.pid}")


def _launch(spec: WorkerSpec, listener: socket.socket) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    words = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
    popen = subprocess.Popen(
        [sys.executable, "-m", "turnwise.env_service.process", str(listener.fileno())],
        stdin=subprocess.PIPE,
        stdout=words,
        stderr=words,
        pass_fds=[listener.fileno()],
        start_new_session=True,  # Ctrl-C is for the run, which ends its workers
    )
    assert popen.stdin is not None, "it is a pipe"
    fields = {"env": spec.env, "options": spec.options, "max_envs": spec.max_envs, "deadline_s": spec.deadline_s}
    with contextlib.suppress(OSError):  # it died already; the watcher sees it
        popen.stdin.write(json.dumps(fields).encode() + b"\n")
        popen.stdin.flush()
    return popen, words


def _hang_up(popen: subprocess.Popen[bytes]) -> None:
    if popen.stdin is not None:
        with contextlib.suppress(OSError):
            popen.stdin.close()
