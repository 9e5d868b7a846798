"""The progress of a comparison: a panel in a terminal, otherwise lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from turnwise.compare.runs import GridJob
from turnwise.errors import TurnwiseError
from turnwise.runlog.reader import RunReader, is_run
from turnwise.training.progress import num_drawn_tokens
from turnwise.watch.status import read_status
from turnwise.watch.terminal import format_duration

REDRAW_S = 2.0
TOLD_EVERY_S = 60.0
"""Seconds between progress lines without a terminal."""


class GridView:
    """Shows what `run_jobs` reports. It is a context manager that restores the terminal."""

    def __init__(self, jobs: Sequence[GridJob], places: dict[str, Path]) -> None:
        """`places` are the run directories by the job's name."""
        self._jobs = jobs
        self._places = places
        self._started_s = self._drawn_s = time.monotonic()
        self._live = None
        if sys.stdout.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(highlight=False), refresh_per_second=4, transient=True)

    def __enter__(self) -> GridView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def changed(self, job: GridJob) -> None:
        if job.state in ("failed", "stopped"):
            self.say(f"{job.state}  {job.name}" + (f"  {job.why} (log: {job.log})" if job.why else ""))
        elif job.state == "done" and job.started_s:
            self.say(f"done  {job.name}  {format_duration(time.monotonic() - job.started_s)}  {self.summary()}")
        self._draw()

    def tick(self) -> None:
        if time.monotonic() - self._drawn_s > (REDRAW_S if self._live is not None else TOLD_EVERY_S):
            self._draw()
            if self._live is None:
                self.say("\n".join([self.summary(), *self._running()]))

    def say(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, markup=False)
        else:
            print(text, flush=True)

    def summary(self) -> str:
        counts = {state: sum(job.state == state for job in self._jobs) for state in ("done", "running", "failed")}
        took = format_duration(time.monotonic() - self._started_s)
        return (
            f"{counts['done']}/{len(self._jobs)} done, {counts['running']} running, {counts['failed']} failed, {took}"
        )

    def _draw(self) -> None:
        self._drawn_s = time.monotonic()
        if self._live is not None:
            self._live.update("\n".join([self.summary(), *self._running()]))

    def _running(self) -> list[str]:
        return [f"  {job.name}  {_how_far(self._places[job.name])}" for job in self._jobs if job.state == "running"]


def _how_far(place: Path) -> str:
    status = read_status(place)
    if status is None or not is_run(place):
        return "starting"
    try:
        with RunReader(place) as run:
            tokens = num_drawn_tokens(run, status.step)
    except TurnwiseError:
        return status.phase
    return f"{status.phase}, step {status.step}, {tokens:,} tokens sampled"
