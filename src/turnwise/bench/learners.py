"""Measure training by several learner processes against one, each with as many threads.

A step is the gradient of a batch, summed over the learners, and AdamW's update. On a CPU every process gets
`--threads`; on GPUs each learner has one if there are enough. One process, several learners, and as many processes that
know nothing of each other, each with the whole batch (on a CPU only), run in turn, `--rounds` times.

`speedup` is by the clock, and needs as many free cores as there are learners. `possible_speedup` is that of the
processes that know nothing of each other: what this machine gives as many processes. `speedup_by_cpu_time` also holds
on a machine that is busy: the CPU time of one process for a step, divided by that of the learner which needs most. It
leaves out what learners wait for each other. `lowest_speedup` and `highest_speedup` are those of single rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from turnwise.bench.report import engine_options, machine, median_of, model_directory, timed
from turnwise.bench.train import step_of_ours
from turnwise.engine.config import ClusterConfig, EngineConfig
from turnwise.engine.device_info import find_device
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
    shares_cores = not find_device(_make_config(args)).facts.has_own_memory
    alone: list[dict[str, Any]] = []
    together: list[dict[str, Any]] = []
    apart: list[dict[str, Any]] = []
    loads: list[float] = []
    for _ in range(args.rounds):
        loads.append(os.getloadavg()[0])
        alone += run_at_once(args, [1])
        together += run_at_once(args, [args.learners])
        if shares_cores:
            rates = [one["tokens_per_s"] for one in run_at_once(args, [1] * args.learners)]
            apart.append({"tokens_per_s": sum(rates)})
    return {**_compare(args, alone, together, apart), "load_average": f"{min(loads):.1f} to {max(loads):.1f}"}


def _compare(
    args: argparse.Namespace,
    alone: Sequence[dict[str, Any]],
    together: Sequence[dict[str, Any]],
    apart: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Medians over the rounds of one process, of learners, and of as many processes apart from each other."""
    speedups = [two["tokens_per_s"] / one["tokens_per_s"] for one, two in zip(alone, together, strict=True)]
    rates = [median_of(runs, "tokens_per_s") for runs in (alone, together)]
    possible = {"possible_speedup": median_of(apart, "tokens_per_s") / rates[0]} if apart else {}
    cpu_s = [median_of(runs, "cpu_s") for runs in (alone, together)]
    return {
        "bench": "learners",
        "model": args.model,
        "machine": alone[0]["machine"],
        "load": f"{args.sequences} x {args.tokens} tokens, {args.weights}, with AdamW",
        "learners": args.learners,
        "tokens_per_s": rates[1],
        "one_learner_tokens_per_s": rates[0],
        "speedup": rates[1] / rates[0],
        "lowest_speedup": min(speedups),
        "highest_speedup": max(speedups),
        **possible,
        "one_learner_cpu_s": cpu_s[0],
        "busiest_learner_cpu_s": cpu_s[1],
        "speedup_by_cpu_time": cpu_s[0] / cpu_s[1],
    }


def run_at_once(args: argparse.Namespace, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Run a side for each number of learners in `counts`, all at the same time, each in a process of its own."""
    left_out = ("bench", "side", "json", "rounds", "peer", "learners")
    options = [f"--{k.replace('_', '-')}={v}" for k, v in vars(args).items() if k not in left_out]
    command = [sys.executable, "-m", "turnwise.bench.cli", "learners", "--side=ours", "--json", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}

    def run_one(count: int) -> dict[str, Any]:
        full = [*command, f"--learners={count}"]
        return json.loads(subprocess.run(full, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout)

    with ThreadPoolExecutor(len(counts)) as pool:
        return list(pool.map(run_one, counts))


def _run_side(args: argparse.Namespace) -> dict[str, Any]:
    config = _make_config(args)
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


def _make_config(args: argparse.Namespace) -> EngineConfig:
    full = args.weights == "full"
    given = {"device": args.device, "dtype": args.dtype, "seed": 0, "kv_cache_gib": 0.05, "full_weights": full}
    return EngineConfig.model_validate({**given, **engine_options(args.engine)})


def _cpu_seconds() -> dict[int, float]:
    """CPU time of this process and of the learners that it started, by process."""
    found = {os.getpid(): time.process_time()}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (place / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                found[int(place.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found
