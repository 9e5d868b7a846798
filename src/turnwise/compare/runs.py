"""The runs of a comparison, at most `jobs` at a time, each in its own process.

    nursery   one process that has loaded the libraries and forks for every run (`worker.py`)
    job       one run: a directory, a log beside it, and other runs that must finish before

Jobs share threads and GPU memory equally: with eight jobs on sixteen cores, a run uses two threads and an eighth of the
GPU's memory.
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
"""Hides the GPU while libraries load: one that asks torch for a GPU would start CUDA, which breaks after a fork."""
POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrder:
    """How to start a run: new from a config, or resumed from its directory."""

    config: Path | None = None
    resume: Path | None = None


@dataclass(slots=True, kw_only=True)
class GridJob:
    """One run of the grid and its state."""

    name: str
    log: Path
    prepare: Callable[[], RunOrder | None]
    """Called before the run starts; returns None if it is already done."""
    finish: Callable[[], None] | None = None
    """Called when the run has finished."""
    needs: tuple[GridJob, ...] = ()
    """Jobs that must be done before."""
    state: State = "waiting"
    why: str = ""
    """The reason of a failure: the end of the log."""
    started_s: float = field(default=0.0)


class GridProgress(Protocol):
    """A function that is called when a job starts or ends."""

    def changed(self, job: GridJob) -> None: ...

    def tick(self) -> None: ...


class Nursery:
    """The process that forks runs. It is a context manager; at its end, no run is left."""

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
            start_new_session=True,  # this process passes Ctrl-C on to the runs
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
        """Wait for a run to end; returns its name and exit code, or None after the timeout."""
        try:
            answer = self._ended.get(timeout=timeout_s)
        except Empty:
            return None
        if answer is None:
            raise TurnwiseError(
                f"the process that makes the runs ended with code {self._process.wait()}; run the same "
                "command to continue"
            )
        return answer["name"], answer["code"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # tell the running runs to stop, and wait for them
        self._process.wait()
        self._listener.join()

    def _tell(self, order: dict[str, Any]) -> None:
        """Send a message. If the nursery has died, `ended` reports it with its exit code."""
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
    """Run all jobs that are not done, in order; returns False if it was stopped.

    A job waits for the jobs that it needs and fails if they fail. The first Ctrl-C lets every run save its state, a
    second one stops all runs at once.
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
    """Start the jobs that may start; True while jobs are left. Without a nursery, only find the jobs that are done."""
    for job in jobs:
        failed = [needed for needed in job.needs if needed.state in ("failed", "stopped")]
        if job.state != "waiting" or (not failed and any(needed.state != "done" for needed in job.needs)):
            continue
        if failed:
            job.state, job.why = "failed", f"it needs {failed[0].name}, which did not finish"
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
