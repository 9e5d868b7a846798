"""Measure training by several learner processes against one, each with as many threads.

A step is the gradient of a batch, summed over the learners, and AdamW's update. On a CPU every process gets
`--threads`; on GPUs each learner has one if there are enough. One process and several run in turn, `--rounds` times.

`speedup` is by the clock, and needs as many free cores as there are learners. `speedup_by_cpu_time` also holds on a
machine that is busy: the CPU time of one process for a step, divided by that of the learner which needs most. It leaves
out what learners wait for each other. `lowest_speedup` and `highest_speedup` are those of single rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from turnwise.bench.report import machine, median_of, model_directory, timed
from turnwise.bench.train import step_of_ours
from turnwise.engine.config import ClusterConfig, EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.learners.replicated import ReplicatedEngine


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--learners", type=int, default=2, help="processes to compare with one")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process on a CPU")
    parser.add_argument("--sequences", type=int, default=16, help="sequences in the batch")
    parser.add_argument("--tokens", type=int, default=256, help="tokens in each sequence")
    parser.add_argument("--trained", type=float, default=1.0, help="share of tokens that are trained")
    parser.add_argument("--weights", choices=("lora", "full"), default="lora", help="what is trained")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.side != "both":
        return _run_side(args)
    runs: dict[int, list[dict[str, Any]]] = {1: [], args.learners: []}
    loads: list[float] = []
    for _ in range(args.rounds):
        for count, own in runs.items():
            loads.append(os.getloadavg()[0])
            own.append(_start(args, count))
    speedups = [two["tokens_per_s"] / one["tokens_per_s"] for one, two in zip(*runs.values(), strict=True)]
    alone, together = (median_of(runs[count], "tokens_per_s") for count in (1, args.learners))
    return {
        "bench": "learners",
        "model": args.model,
        "machine": runs[1][0]["machine"],
        "load": f"{args.sequences} x {args.tokens} tokens, {args.weights}, with AdamW; load average "
        f"{min(loads):.1f} to {max(loads):.1f}",
        "learners": args.learners,
        "tokens_per_s": together,
        "one_learner_tokens_per_s": alone,
        "speedup": together / alone,
        "lowest_speedup": min(speedups),
        "highest_speedup": max(speedups),
        "one_learner_cpu_s": median_of(runs[1], "cpu_s"),
        "busiest_learner_cpu_s": median_of(runs[args.learners], "cpu_s"),
        "speedup_by_cpu_time": median_of(runs[1], "cpu_s") / median_of(runs[args.learners], "cpu_s"),
    }


def _start(args: argparse.Namespace, count: int) -> dict[str, Any]:
    """One side in a process of its own."""
    left_out = ("bench", "side", "json", "rounds", "peer", "learners")
    options = [f"--{k.replace('_', '-')}={v}" for k, v in vars(args).items() if k not in left_out]
    command = [sys.executable, "-m", "turnwise.bench.cli", "learners", "--side=ours", "--json", f"--learners={count}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    reply = subprocess.run([*command, *options], check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return json.loads(reply)


def _run_side(args: argparse.Namespace) -> dict[str, Any]:
    full = args.weights == "full"
    config = EngineConfig(device=args.device, dtype=args.dtype, seed=0, kv_cache_gib=0.05, full_weights=full)
    directory = model_directory(args.model)
    engine: Engine
    if args.learners == 1:
        engine = Engine(directory, config, name=args.model)
    else:
        engine = ReplicatedEngine(directory, config, ClusterConfig(learners=args.learners), name=args.model)
    step = step_of_ours(args, engine, updates=True)
    for _ in range(args.warmups):
        step()
    before = _cpu_seconds()
    seconds = timed(step, argparse.Namespace(warmups=0, repeats=args.repeats), engine.device).median
    busiest = max(after - before.get(pid, 0.0) for pid, after in _cpu_seconds().items())
    result = {
        "machine": machine(engine.device),
        "tokens_per_s": args.sequences * args.tokens / seconds,
        "cpu_s": busiest / args.repeats,
    }
    engine.close()
    return {"bench": "learners", "model": args.model, **result}


def _cpu_seconds() -> dict[int, float]:
    """CPU time of this process and of the learners that it started, by process."""
    found = {os.getpid(): time.process_time()}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (place / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                found[int(place.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found
