"""Trains ahead for a long time and watches its memory: `python -m turnwise.bench.soak --minutes 120`.

The run is a separate process; its memory is read from its status. The result compares the second half of the run with
the first, and says whether every step has its row of metrics.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnwise.runlog.reader import RunReader
from turnwise.training.steer import give_order
from turnwise.watch.status import is_training, read_status

WORLD = "turnwise.bench.slow_world:SlowWorld"
WARM_SHARE = 0.2
"""Share of the run that is not compared, because caches fill up in it."""
STOP_S = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m turnwise.bench.soak", description="Train for a long time, and watch the memory."
    )
    parser.add_argument("--minutes", type=float, default=120.0, help="how long to train (default 120)")
    parser.add_argument("--model", default="tiny", help="a model of the store, the hub or a directory")
    parser.add_argument("--lag", type=int, default=2, help="how many updates old the data may be (default 2)")
    parser.add_argument("--every-s", type=float, default=2.0, help="seconds between two readings of the memory")
    parser.add_argument("--run-dir", help="directory of the run; the run is kept there")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as place:
        figure = soak(options, Path(options.run_dir or Path(place) / "run"))
    print(json.dumps(figure, indent=2))
    return 0 if figure["is_flat"] and not figure["missing_steps"] else 1


def soak(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    settings = {
        "model": options.model,
        "train.max_staleness": options.lag,
        "train.steps": 1_000_000,
        "train.tasks_per_step": 2,
        "train.max_empty_steps": 1_000_000,
        "rollout.group_size": 4,
        "rollout.same_start": False,  # delays come from the seed, so every attempt has other ones
        "env.options.median_s": 0.02,
        "env.options.p99_s": 0.5,
        "eval.tasks": 0,
        "run.max_size_mb": 16,
        "run.dir": directory,
    }
    command = [sys.executable, "-m", "turnwise.cli", "train", WORLD, *(f"{k}={v}" for k, v in settings.items())]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    memory = _watch(process, directory, options)
    if is_training(directory):
        give_order(directory, stop="graceful")
    try:
        code = process.wait(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    with RunReader(directory) as run:
        steps = [step for step, _ in run.metric("time/step_s")]
    settled = memory[int(WARM_SHARE * len(memory)) :] or [0.0]
    half = len(settled) // 2 or 1
    first, second = statistics.median(settled[:half]), statistics.median(settled[half:] or settled)
    growth = second / first - 1 if first else 0.0
    return {
        "bench": "soak",
        "minutes": options.minutes,
        "exit_code": code,
        "steps": len(steps),
        "missing_steps": len(set(range(1, max(steps, default=0) + 1)) - set(steps)),
        "memory_first_mb": round(first, 1),
        "memory_second_mb": round(second, 1),
        "memory_max_mb": round(max(memory, default=0.0), 1),
        "growth": round(growth, 4),
        "is_flat": growth < 0.05,
        "run_db_mb": round((directory / "run.db").stat().st_size / 1e6, 1),
    }


def _watch(process: subprocess.Popen[bytes], directory: Path, options: argparse.Namespace) -> list[float]:
    memory: list[float] = []
    ends_s = time.monotonic() + 60 * options.minutes
    while time.monotonic() < ends_s and process.poll() is None:
        time.sleep(options.every_s)
        status = read_status(directory)
        if status is not None and status.step:
            memory.append(status.memory_mb)
    return memory


if __name__ == "__main__":
    raise SystemExit(main())
