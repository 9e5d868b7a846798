"""Compare `turnwise cluster simulate` with real runs on this machine: seconds of a step, predicted and measured.

Runs with slow envs are predicted from the rates of the synchronous one: another lag, or a sampler in a process of its
own. The synchronous runs are repeated from their own rates. Every round makes all runs, one after the other, so that
other work on the machine disturbs all of them alike; numbers are medians over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turnwise.bench.async_train import WORLD, slow_run_options


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCase:
    """A real run, and the run whose rates predict it."""

    name: str
    rates_of: str
    is_slow: bool = True
    lag: int = 0
    is_separate: bool = False


CASES = (
    SimulatedCase(name="sync_quick_envs", rates_of="sync_quick_envs", is_slow=False),
    SimulatedCase(name="sync", rates_of="sync"),
    SimulatedCase(name="lag_1", rates_of="sync", lag=1),
    SimulatedCase(name="lag_2", rates_of="sync", lag=2),
    SimulatedCase(name="lag_2_own_sampler", rates_of="sync", lag=2, is_separate=True),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(model="tiny")
    parser.add_argument("--steps", type=int, default=16, help="training steps of each run")
    parser.add_argument("--tasks", type=int, default=4, help="groups per step")
    parser.add_argument("--group-size", type=int, default=4, help="attempts per group")
    parser.add_argument("--median-s", type=float, default=0.2, help="median time of a slow env's answer, in seconds")
    parser.add_argument("--p99-s", type=float, default=2.0, help="99th percentile of that time, in seconds")


def run(args: argparse.Namespace) -> dict[str, Any]:
    measured: dict[str, list[float]] = {case.name: [] for case in CASES}
    predicted: dict[str, list[float]] = {case.name: [] for case in CASES}
    loads: list[float] = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as place:
            for case in CASES:
                loads.append(os.getloadavg()[0])
                measured[case.name].append(_train(args, case, Path(place) / case.name))
            for case in CASES:
                predicted[case.name].append(_predict(args, case, Path(place) / case.rates_of))
    found: dict[str, Any] = {
        "bench": "simulation",
        "model": args.model,
        "load": f"{args.steps} steps of {args.tasks} x {args.group_size} attempts; slow envs log-normal, median "
        f"{args.median_s:g} s, p99 {args.p99_s:g} s; {args.rounds} rounds; load average {statistics.median(loads):.1f}",
    }
    for case in CASES:
        ours, real = _medians(predicted[case.name], measured[case.name])
        found |= {
            f"{case.name}_predicted_s": ours,
            f"{case.name}_measured_s": real,
            f"{case.name}_error": ours / real - 1,
        }
    return found


def _medians(*series: Sequence[float]) -> tuple[float, ...]:
    return tuple(statistics.median(values) for values in series)


def _train(args: argparse.Namespace, case: SimulatedCase, directory: Path) -> float:
    """Train for real; returns the mean seconds of a step, without those that fill the pool."""
    from turnwise.runlog.reader import RunReader
    from turnwise.training.run import train
    from turnwise.watch.observer import Observer

    delays = (args.median_s, args.p99_s) if case.is_slow else (0.01, 0.02)
    more = {"run.dir": directory, "cluster.placement": "separate" if case.is_separate else "colocated"}
    train(WORLD, overrides=slow_run_options(args, case.lag, delays, more), observer=Observer())
    with RunReader(directory) as stored:
        return statistics.fmean([value for _, value in stored.metric("time/step_s")][case.lag + 1 :])


def _predict(args: argparse.Namespace, case: SimulatedCase, rates_of: Path) -> float:
    """The same for a simulated run of as many steps, whose groups are those of the run with the rates."""
    from turnwise.training.simulation import simulate
    from turnwise.training.simulation_rates import read_measured_run

    known = read_measured_run(rates_of)
    shape = replace(known.shape, max_staleness=case.lag, is_colocated=not case.is_separate)
    return simulate(known.rates, shape, num_steps=args.steps - case.lag - 1).step_s
