"""Measure what the sandbox adds to the time of a program, against a bare subprocess."""

from __future__ import annotations

import argparse
import asyncio
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from turnwise.envs.sandbox import Sandbox

PROGRAM = ("-I", "-S", "-c", "print(6 * 7)")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--executions", type=int, default=50, help="number of runs of each kind; the kinds take turns")
    parser.add_argument("--parallel", type=int, default=8, help="programs at the same time, for the throughput")


def run(args: argparse.Namespace) -> dict[str, Any]:
    sandbox = Sandbox()
    bare, walled, tested = [], [], []
    for _ in range(args.executions + 1):
        bare.append(
            _seconds(lambda: subprocess.run([sys.executable, *PROGRAM], check=True, capture_output=True, env={}))
        )
        walled.append(_seconds(lambda: sandbox.run_blocking(["python3", *PROGRAM])))
        tested.append(_seconds(lambda: sandbox.run_blocking(["true"])))
    bare_s, walled_s, true_s = (statistics.median(each[1:]) for each in (bare, walled, tested))
    return {
        "bench": "sandbox",
        "model": "none",
        "machine": f"{platform.machine()} CPU",
        "load": f"{args.executions} executions of a Python that prints one line",
        "bare_ms": 1000 * bare_s,
        "sandbox_ms": 1000 * walled_s,
        "overhead_ms": 1000 * (walled_s - bare_s),
        "smallest_program_ms": 1000 * true_s,
        "session_command_ms": 1000 * asyncio.run(_session_command(sandbox, args.executions)),
        "executions_per_s": asyncio.run(_throughput(sandbox, args.executions, args.parallel)),
    }


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


async def _session_command(sandbox: Sandbox, count: int) -> float:
    """Time one command in a shell that is already running."""
    session = sandbox.open()
    try:
        await session.run("true")
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            await session.run("true")
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)
    finally:
        await session.close()


async def _throughput(sandbox: Sandbox, count: int, parallel: int) -> float:
    waiting = asyncio.Semaphore(parallel)

    async def one() -> None:
        async with waiting:
            await sandbox.run(["python3", *PROGRAM])

    start = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    return count / (time.perf_counter() - start)
