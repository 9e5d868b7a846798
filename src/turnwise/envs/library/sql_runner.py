"""Runs SQL queries in worker processes.

    runner = SqlRunner([path])                                    # refuses when bubblewrap is missing
    result = await runner.run(path, "SELECT name FROM cats")      # QueryResult, or QueryRefused for the policy to read
    runner.close()

A worker (`sql_worker.py`) runs one query after the other, in a sandbox that shows it the databases and no other file of
yours. A worker that does not answer in time is killed and replaced. A few workers are enough, because a query of a
small database takes less than a millisecond. The event loop is never blocked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from turnwise.envs.library import sql_worker
from turnwise.envs.library.sql_worker import QueryRefused
from turnwise.envs.sandbox import Limits, Sandbox, SandboxKind, Worker, WorkerDiedError
from turnwise.envs.sync import call_in_thread
from turnwise.errors import ConfigError, DataError
from turnwise.runtime.per_loop import PerLoop

Value = None | int | float | str | bytes

MAX_WORKERS = max(2, min(8, (os.cpu_count() or 2) // 2))
"""Number of queries at the same time. The rest of the machine is left to sampling and training."""
WAIT_FOR_WORKER_S = 60.0
KILL_AFTER_S = 2.0
"""A worker is killed this many seconds after its query's own time limit."""
MAX_READ_AT_ONCE = 1 << 16
"""An answer of more bytes is parsed in a thread, not in the event loop."""

_WORKER_LIMITS = Limits(
    cpu_s=10**7,  # for the worker's whole life; the worker limits each query itself
    memory_bytes=sql_worker.MAX_MEMORY_BYTES,
    processes=1,
    file_bytes=sql_worker.MAX_FILE_BYTES,
    disk_bytes=sql_worker.MAX_FILE_BYTES,
    output_bytes=64 << 20,  # far more than `QueryLimits.max_bytes` becomes as JSON
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLimits:
    """How much one query may use."""

    time_limit_s: float = 5.0
    max_steps: int = 50_000_000
    """Steps of SQLite's virtual machine. This limit does not depend on how busy the machine is."""
    max_rows: int = 10_000
    max_bytes: int = 2_000_000

    def __post_init__(self) -> None:
        for name in ("time_limit_s", "max_steps", "max_rows", "max_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)}; expected more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryResult:
    """The result of a query."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    is_cut: bool
    """Whether rows beyond `max_rows` were left out."""


class SqlRunner:
    """A few worker processes, started when they are needed."""

    def __init__(
        self, databases: Sequence[Path], *, sandbox: SandboxKind = "bubblewrap", max_workers: int = MAX_WORKERS
    ) -> None:
        """Check that the sandbox works. `ConfigError` says what to install.

        Args:
            databases: Everything that may be queried: SQLite files, and folders that will hold some.
        """
        self._sandbox = Sandbox(sandbox, limits=_WORKER_LIMITS)
        self._places = _place_databases(databases)
        self._idle: list[Worker] = []
        self._lock = threading.Lock()
        self._slots = PerLoop(lambda: asyncio.Semaphore(max_workers))
        self._ending = weakref.finalize(self, _stop_all, self._idle)

    async def run(self, path: Path, sql: str, limits: QueryLimits | None = None) -> QueryResult:
        """Run one query without blocking the event loop."""
        limits = limits or QueryLimits()
        request = _request(self._find(path), sql, limits)
        async with self._slot():
            answer = await self._ask(request, limits.time_limit_s + KILL_AFTER_S)
        if answer is None:
            raise QueryRefused(sql_worker.TOO_LONG)
        read = await call_in_thread(json.loads, answer) if len(answer) > MAX_READ_AT_ONCE else json.loads(answer)
        return _read_answer(read, path)

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncGenerator[None, None]:
        """Wait until this event loop may run another query."""
        slots = self._slots.get()
        try:
            async with asyncio.timeout(WAIT_FOR_WORKER_S):
                await slots.acquire()
        except TimeoutError as cause:
            raise TimeoutError(f"no SQL worker was free within {WAIT_FOR_WORKER_S:g} s") from cause
        try:
            yield
        finally:
            slots.release()

    async def _ask(self, request: bytes, within_s: float) -> bytes | None:
        """Ask a worker; if it dies, ask another, since the first may die by chance. None if late or dead again."""
        for _ in range(2):
            worker = self._find_idle() or await self._start_async()
            answer = None
            try:
                answer = await worker.ask_async(request, within_s)
            except WorkerDiedError:
                continue
            finally:
                if answer is None:
                    await call_in_thread(worker.end)
                else:
                    self._give_back(worker)
            return answer
        return None

    @property
    def idle_pids(self) -> tuple[int, ...]:
        """The pids of workers that wait for a query: a look for processes that were left behind takes them off."""
        with self._lock:
            return tuple(worker.pid for worker in self._idle)

    def close(self) -> None:
        """End the workers. A later query starts new ones."""
        _stop_all(self._idle)

    async def _start_async(self) -> Worker:
        """Start a worker. If the query is cancelled meanwhile, the worker serves another one."""
        starting = asyncio.ensure_future(call_in_thread(self._start))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._keep_started)
            raise

    def _keep_started(self, starting: asyncio.Future[Worker]) -> None:
        if not starting.cancelled() and starting.exception() is None:
            self._give_back(starting.result())

    def _find_idle(self) -> Worker | None:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    return worker
                worker.end()
        return None

    def _give_back(self, worker: Worker) -> None:
        with self._lock:
            self._idle.append(worker)

    def _start(self) -> Worker:
        script = Path(sql_worker.__file__)
        argv = ("python3", "-I", "-S", "-B", script.name)
        shown = {inside: place for inside, place in _with_journals(self._places) if place.exists()}
        return self._sandbox.start_worker(argv, files={script.name: script.read_bytes()}, shown=shown)

    def _find(self, path: Path) -> str:
        """The path of a database inside the sandbox."""
        path = path.absolute()
        for place, name in ((path, ""), (path.parent, f"/{path.name}")):
            if place in self._places:
                if not path.is_file():
                    raise DataError(f"{path} is not there; expected a SQLite database")
                return f"{self._places[place]}{name}" if self._sandbox.kind == "bubblewrap" else str(path)
        raise DataError(f"{path} is not among the databases that this runner was made for")


def _place_databases(databases: Sequence[Path]) -> dict[Path, str]:
    """The paths inside the sandbox. They are numbered, so that a worker sees no path of the host."""
    places = list(dict.fromkeys(database.absolute() for database in databases))
    return {
        place: f"/databases/{number}" if place.is_dir() else f"/databases/{number}/database.sqlite"
        for number, place in enumerate(places)
    }


def _with_journals(places: Mapping[Path, str]) -> Iterator[tuple[str, Path]]:
    """Add the journals beside a database that was not closed properly. Without them a query would see older data."""
    for place, inside in places.items():
        for suffix in ("", *sql_worker.JOURNALS):
            yield f"{inside}{suffix}", place.with_name(f"{place.name}{suffix}")


def _stop_all(workers: list[Worker]) -> None:
    while workers:
        workers.pop().end()


def _request(path: str, sql: str, limits: QueryLimits) -> bytes:
    return json.dumps(
        {
            "path": path,
            "sql": sql,
            "max_rows": limits.max_rows,
            "max_bytes": limits.max_bytes,
            "max_steps": limits.max_steps,
            "time_limit_s": limits.time_limit_s,
        }
    ).encode()


def _read_answer(answer: dict[str, Any], path: Path) -> QueryResult:
    if "refused" in answer:
        raise QueryRefused(answer["refused"])
    if "broken" in answer:
        raise DataError(f"{path} cannot be read: {answer['broken']}; expected a SQLite database")
    rows = tuple(tuple(_to_value(value) for value in row) for row in answer["rows"])
    return QueryResult(columns=tuple(answer["columns"]), rows=rows, is_cut=answer["is_cut"])


def _to_value(value: Any) -> Value:
    return bytes.fromhex(cast(dict[str, str], value)["hex"]) if isinstance(value, dict) else cast(Value, value)
