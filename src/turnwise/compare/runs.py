"""The runs of a comparison, at most `jobs` at a time, each a process of its own.

    nursery   one process that has loaded the libraries and forks for every run (`compare_worker.py`)
    job       one run: a directory, a log beside it, perhaps another run that has to be done before

Threads and the GPU's memory are split: with eight jobs on sixteen cores a run computes with two threads, and plans with
an eighth of the card.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol, Self

from turnwise.engine.device_info import GPU_SHARE_VARIABLE
from turnwise.errors import TurnwiseError
from turnwise.runtime.exit_codes import ExitCode

State = Literal["waiting", "running", "done", "failed", "stopped"]
THREADS_VARIABLE = "OMP_NUM_THREADS"
NO_CUDA_AT_IMPORT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""A library that asks torch for a GPU while it is loaded would start CUDA, and no fork survives that."""
POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrder:
    """How a run is begun: anew from a config, or from where its directory stands."""

    config: Path | None = None
    resume: Path | None = None


@dataclass(slots=True, kw_only=True)
class GridJob:
    """One run of the grid, and what became of it."""

    name: str
    log: Path
    prepare: Callable[[], RunOrder | None]
    """Called when its turn has come; None: it is done already."""
    finish: Callable[[], None] | None = None
    """Called when the run came to its end."""
    needs: tuple[GridJob, ...] = ()
    """Jobs that have to be done before."""
    state: State = "waiting"
    why: str = ""
    """Of a failure: what the log ends with."""
    started_s: float = field(default=0.0)


class GridProgress(Protocol):
    """Told what happens to jobs."""

    def changed(self, job: GridJob) -> None: ...

    def tick(self) -> None: ...


class Nursery:
    """The process that forks runs; a context, at whose end no run is left."""

    def __init__(self, *, jobs: int) -> None:
        threads = max(1, num_cores() // jobs)
        environment = {**os.environ, GPU_SHARE_VARIABLE: str(1 / jobs), **NO_CUDA_AT_IMPORT}
        environment.setdefault(THREADS_VARIABLE, str(threads))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "turnwise.compare.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
        self._ended = SimpleQueue[dict[str, Any] | None]()
        self._listener = threading.Thread(target=self._listen, name="turnwise-compare", daemon=True)
        self._listener.start()

    def start(self, job: GridJob, order: RunOrder) -> None:
        told = {"config": order.config, "resume": order.resume, "log": job.log}
        self._tell({"start": job.name, **{key: str(value) for key, value in told.items() if value is not None}})

    def stop(self, how: Literal["gently", "now"]) -> None:
        self._tell({"stop": how})

    def ended(self, timeout_s: float) -> tuple[str, int] | None:
        """The name and the exit code of a run that ended; None: none did for so long."""
        try:
            answer = self._ended.get(timeout=timeout_s)
        except Empty:
            return None
        if answer is None:
            raise TurnwiseError(
                f"the process that makes the runs ended with code {self._process.wait()}; the same command goes on "
                "where they stopped"
            )
        return answer["name"], answer["code"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # runs that go on are told to stop, and waited for
        self._process.wait()
        self._listener.join()

    def _tell(self, order: dict[str, Any]) -> None:
        """A nursery that died is told by `ended`, with its exit code."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout:
            for line in self._process.stdout:
                self._ended.put(json.loads(line))
        self._ended.put(None)


def run_jobs(jobs: Sequence[GridJob], *, at_once: int, progress: GridProgress) -> bool:
    """Run what is not done yet, in order; true: nobody stopped it.

    A job whose needs are not met waits, and fails with them. Ctrl-C lets every run save what it has, a second one
    stops them at once.
    """
    if not _begin(jobs, at_once, progress, None):
        return True
    with Nursery(jobs=at_once) as nursery:
        try:
            while _begin(jobs, at_once, progress, nursery):
                _take(jobs, nursery.ended(POLL_S), progress)
            return True
        except KeyboardInterrupt:
            _stop(jobs, nursery, progress)
            return False


def _begin(jobs: Sequence[GridJob], at_once: int, progress: GridProgress, nursery: Nursery | None) -> bool:
    """Begin what may begin; true while something is left. Without a nursery, find out what is done already."""
    for job in jobs:
        failed = [needed for needed in job.needs if needed.state in ("failed", "stopped")]
        if job.state != "waiting" or (not failed and any(needed.state != "done" for needed in job.needs)):
            continue
        if failed:
            job.state, job.why = "failed", f"it needs {failed[0].name}, which did not come to its end"
            progress.changed(job)
            continue
        if nursery is not None and sum(job.state == "running" for job in jobs) >= at_once:
            break
        order = job.prepare()
        if order is None:
            job.state = "done"
        elif nursery is None:
            return True
        else:
            job.state, job.started_s = "running", time.monotonic()
            nursery.start(job, order)
        progress.changed(job)
    return any(job.state in ("waiting", "running") for job in jobs)


def _take(jobs: Sequence[GridJob], ended: tuple[str, int] | None, progress: GridProgress) -> None:
    progress.tick()
    if ended is None:
        return
    name, code = ended
    job = next(job for job in jobs if job.name == name)
    job.state = "done" if code == ExitCode.OK else "stopped" if code == ExitCode.INTERRUPTED else "failed"
    if job.state == "failed":
        job.why = f"exit code {code}: {last_line(job.log)}"
    if job.state == "done" and job.finish is not None:
        job.finish()
    progress.changed(job)


def _stop(jobs: Sequence[GridJob], nursery: Nursery, progress: GridProgress) -> None:
    nursery.stop("gently")
    while any(job.state == "running" for job in jobs):
        try:
            _take(jobs, nursery.ended(POLL_S), progress)
        except KeyboardInterrupt:
            nursery.stop("now")


def last_line(log: Path) -> str:
    try:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return "it left no log"
    return next((line for line in reversed(lines) if line), "its log is empty")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
