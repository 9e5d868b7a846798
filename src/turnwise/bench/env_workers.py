"""Measure env workers: env steps per second of a world that answers late, by the number of worker processes.

Every worker has one place, so a worker is busy while its env waits. What is measured is how far the processes, and the
requests to them, keep out of each other's way.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

from turnwise.bench.async_train import WORLD
from turnwise.bench.slow_world import SlowWorld
from turnwise.envs.base import assistant
from turnwise.envs.remote.client import WorkedWorld


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(model="tiny")
    parser.add_argument("--workers", default="1,2,4,8", help="numbers of worker processes")
    parser.add_argument("--step-s", type=float, default=0.5, help="seconds of every answer of the env")
    parser.add_argument("--steps", type=int, default=6, help="steps of each worker")


def run(args: argparse.Namespace) -> dict[str, Any]:
    counts = [int(count) for count in args.workers.split(",")]
    rates: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(args.rounds):
        for count, own in rates.items():
            own.append(_steps_per_s(args, count))
    medians = {count: statistics.median(own) for count, own in rates.items()}
    return {
        "bench": "env-workers",
        "load": f"one env in each worker, {args.step_s:g} s a step, {args.steps} steps, median of {args.rounds}",
        **{f"{count}_workers_steps_per_s": rate for count, rate in medians.items()},
        "speedup": medians[counts[-1]] / medians[counts[0]],
    }


def _steps_per_s(args: argparse.Namespace, count: int) -> float:
    from turnwise.env_service.processes import LocalEnvWorkers, WorkerSpec

    options = {"median_s": args.step_s, "p99_s": args.step_s, "max_turns": args.steps}
    workers = LocalEnvWorkers(WorkerSpec(env=WORLD, options=options, max_envs=1, deadline_s=60.0), count)
    workers.start()
    try:
        seconds = asyncio.run(_play(WorkedWorld(SlowWorld(**options), workers), count, args.steps))
    finally:
        workers.close()
    return count * args.steps / seconds


async def _play(world: WorkedWorld, count: int, steps: int) -> float:
    """Play an attempt in each worker at the same time; returns the seconds of all their steps."""
    envs = [world.make_env(task, seed) for seed, task in enumerate(world.tasks("train", count, 0))]
    await asyncio.gather(*(env.start() for env in envs))

    async def take_steps(env: Any) -> None:
        for _ in range(steps):
            await env.step(assistant("a"))

    started_s = time.perf_counter()
    await asyncio.gather(*(take_steps(env) for env in envs))
    seconds = time.perf_counter() - started_s
    await asyncio.gather(*(env.close() for env in envs))
    return seconds
