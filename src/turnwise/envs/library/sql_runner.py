"""Queries in worker processes, from the outside.

    runner = SqlRunner()
    result = await runner.run(path, "SELECT name FROM cats")      # QueryResult, or QueryRefused for the policy to read
    runner.close()

A worker (`sql_worker.py`) serves one query after the other. One that gives no answer in time is killed and replaced.
Few of them are enough: a query of a small database takes less than a millisecond. The event loop never waits.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from turnwise.envs.library import sql_worker
from turnwise.envs.sync import call_in_thread
from turnwise.errors import ConfigError, DataError

Value = None | int | float | str | bytes

MAX_WORKERS = 2
WAIT_FOR_WORKER_S = 60.0
KILL_AFTER_S = 2.0
"""Beyond a query's own limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLimits:
    """What one query may cost."""

    time_limit_s: float = 5.0
    max_steps: int = 50_000_000
    """Of SQLite's virtual machine; a bound that does not depend on how busy the machine is."""
    max_rows: int = 10_000
    max_bytes: int = 2_000_000

    def __post_init__(self) -> None:
        for name in ("time_limit_s", "max_steps", "max_rows", "max_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)}; expected more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryResult:
    """What a query gave."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    is_cut: bool
    """There are more rows than were asked for."""


class QueryRefused(Exception):  # noqa: N818 - it names what happened to a query
    """The query is wrong, not allowed, or too expensive; the text is for the policy."""


class SqlRunner:
    """A few worker processes, started when they are needed."""

    def __init__(self, max_workers: int = MAX_WORKERS) -> None:
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._room = threading.Semaphore(max_workers)
        self._ending = weakref.finalize(self, _stop_all, self._idle)

    async def run(self, path: Path, sql: str, limits: QueryLimits | None = None) -> QueryResult:
        """Run one query without holding up the event loop."""
        return await call_in_thread(self.run_now, path, sql, limits)

    def run_now(self, path: Path, sql: str, limits: QueryLimits | None = None) -> QueryResult:
        """Run one query and wait for it."""
        limits = limits or QueryLimits()
        if not self._room.acquire(timeout=WAIT_FOR_WORKER_S):
            raise TimeoutError(f"no SQL worker was free within {WAIT_FOR_WORKER_S:g} s")
        try:
            worker = self._take()
            try:
                answer = worker.ask(_request(path, sql, limits), limits.time_limit_s + KILL_AFTER_S)
            except BaseException:
                worker.kill()
                raise
            if answer is None:
                worker.kill()
                raise QueryRefused(sql_worker.TOO_LONG)
            with self._lock:
                self._idle.append(worker)
        finally:
            self._room.release()
        return _read_answer(answer, path)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def close(self) -> None:
        """End the workers; a later query starts new ones."""
        _stop_all(self._idle)

    def _take(self) -> _Worker:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    return worker
                worker.kill()
        return _Worker()


class _Worker:
    """One process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(sql_worker.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={},
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the run; the worker ends when its input does
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: str, within_s: float) -> dict[str, Any] | None:
        """The answer; None when it did not come in time or the process died over it."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        end_s = time.monotonic() + within_s
        try:
            stdin.write(request.encode() + b"\n")
        except BrokenPipeError:
            return None
        pieces: list[bytes] = []
        while not pieces or not pieces[-1].endswith(b"\n"):
            ready, _, _ = select.select([stdout], [], [], max(0.0, end_s - time.monotonic()))
            piece = os.read(stdout.fileno(), 1 << 16) if ready else b""
            if not piece:
                return None
            pieces.append(piece)
        return json.loads(b"".join(pieces))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def _stop_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().kill()


def _request(path: Path, sql: str, limits: QueryLimits) -> str:
    return json.dumps(
        {
            "path": str(path),
            "sql": sql,
            "max_rows": limits.max_rows,
            "max_bytes": limits.max_bytes,
            "max_steps": limits.max_steps,
            "time_limit_s": limits.time_limit_s,
        }
    )


def _read_answer(answer: dict[str, Any], path: Path) -> QueryResult:
    if "refused" in answer:
        raise QueryRefused(answer["refused"])
    if "broken" in answer:
        raise DataError(f"{path} cannot be read: {answer['broken']}; expected a SQLite database")
    rows = tuple(tuple(_to_value(value) for value in row) for row in answer["rows"])
    return QueryResult(columns=tuple(answer["columns"]), rows=rows, is_cut=answer["is_cut"])


def _to_value(value: Any) -> Value:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else cast(Value, value)
