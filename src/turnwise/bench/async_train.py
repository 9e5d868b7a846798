"""Measure training with slow envs, with and without lag: env steps per second and held-out success."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.bench.report import machine
from turnwise.runlog.reader import RunReader

WORLD = "turnwise.bench.slow_world:SlowWorld"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(model="tiny")
    parser.add_argument("--lag", type=int, default=2, help="train.max_staleness of the run that plays ahead")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--steps", type=int, default=20, help="training steps of each run")
    parser.add_argument("--tasks", type=int, default=4, help="groups per step")
    parser.add_argument("--group-size", type=int, default=4, help="attempts per group")
    parser.add_argument("--turns", type=int, default=3, help="turns in each attempt")
    parser.add_argument("--window", type=int, default=0, help="past turns that a prompt shows; 0: all of them")
    parser.add_argument("--median-s", type=float, default=0.1, help="median time of an env's answer, in seconds")
    parser.add_argument("--p99-s", type=float, default=5.0, help="99th percentile of that time, in seconds")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="learning rate of each run")
    parser.add_argument("--held-out", type=int, default=64, help="held-out tasks; their envs answer at once")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run."""

    env_steps_per_s: float
    success: float
    num_env_steps: int
    length_bias: float
    staleness_max: float


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    with tempfile.TemporaryDirectory() as place:
        runs = {
            lag: [run_once(args, lag, seed, Path(place) / f"lag{lag}-{seed}") for seed in range(args.seeds)]
            for lag in (0, args.lag)
        }
    waiting, ahead = runs[0], runs[args.lag]
    device = torch.device("cuda" if args.device == "cuda" else "cpu")
    return {
        "bench": "async",
        "model": args.model,
        "machine": machine(device),
        "load": f"{args.steps} steps of {args.tasks} x {args.group_size} attempts of {args.turns} turns; "
        f"env log-normal, median {args.median_s:g} s, p99 {args.p99_s:g} s; lag {args.lag} against 0; "
        f"{args.seeds} seeds",
        "env_steps_per_s": statistics.fmean(one.env_steps_per_s for one in ahead),
        "sync_env_steps_per_s": statistics.fmean(one.env_steps_per_s for one in waiting),
        "speedup": statistics.fmean(a.env_steps_per_s / b.env_steps_per_s for a, b in zip(ahead, waiting, strict=True)),
        "held_out_success": statistics.fmean(one.success for one in ahead),
        "sync_held_out_success": statistics.fmean(one.success for one in waiting),
        "held_out_by_seed": [round(one.success, 3) for one in ahead],
        "sync_held_out_by_seed": [round(one.success, 3) for one in waiting],
        "length_bias": statistics.fmean(one.length_bias for one in ahead),
        "staleness_max": max(one.staleness_max for one in ahead),
    }


def slow_run_options(
    args: argparse.Namespace, lag: int, delays: tuple[float, float], more: Mapping[str, Any]
) -> list[str]:
    """The options of a run in the slow world: no evaluations, no checkpoints, and every attempt with its own delays.

    Args:
        delays: Median and 99th percentile of the seconds that a step of the env takes.
        more: What this run sets besides.
    """
    options = {
        "model": args.model,
        "engine.device": args.device,
        "env.options.median_s": delays[0],
        "env.options.p99_s": delays[1],
        "method.loss_fn": "cispo",
        "train.max_staleness": lag,
        "train.steps": args.steps,
        "train.tasks_per_step": args.tasks,
        "train.num_tasks": args.steps * args.tasks,
        "train.save_every": 0,
        "train.max_empty_steps": args.steps,
        "rollout.group_size": args.group_size,
        "rollout.same_start": False,  # delays come from the seed, so every attempt has other ones
        "eval.every": 0,
        "eval.tasks": 0,
        "run.dialogues": 0,
        **more,
    }
    return [f"{name}={value}" for name, value in options.items()]


def run_once(args: argparse.Namespace, lag: int, seed: int, directory: Path) -> Outcome:
    """Train once. All runs use the loss that lag needs, so that only the lag differs."""
    from turnwise.training.run import evaluate, train
    from turnwise.watch.observer import Observer

    more = {
        "env.options.max_turns": args.turns,
        "memory.window": args.window,
        "train.learning_rate": args.learning_rate,
        "train.seed": seed,
        "run.dir": directory,
    }
    options = slow_run_options(args, lag, (args.median_s, args.p99_s), more)
    run = train(WORLD, overrides=options, observer=Observer())
    quick = {"env": {"options": {"median_s": 1e-6, "p99_s": 1e-5}}, "eval": {"tasks": args.held_out, "samples": 4}}
    success = evaluate(run, **quick).row.success  # evaluate in the same world without delays
    with RunReader(directory) as stored:
        num_env_steps = sum(row.num_turns for row in stored.attempts(phase="train"))
        seconds = sum(value for _, value in stored.metric("time/step_s"))
        bias, staleness = stored.metric("pool/length_bias"), stored.metric("pool/staleness_max")
    return Outcome(
        env_steps_per_s=num_env_steps / seconds,
        success=success,
        num_env_steps=num_env_steps,
        length_bias=bias[-1][1] if bias else 0.0,
        staleness_max=max((value for _, value in staleness), default=0.0),
    )
