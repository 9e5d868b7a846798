"""Measure whole multi-turn GRPO steps in CPU-seconds, beside TRL's `GRPOTrainer` in an environment of its own.

Both sides play the same number of dialogues from the same prompts, with the same tokens in every turn and none that
stops early, then take one optimizer step on all of them: the same model, dtype, LoRA rank and adapted linears, no KL
term, gradients without recomputation. Ours keeps the dialogues' caches between turns and trains what they share once;
TRL's `rollout_func` runs `generate` over the whole dialogue in every turn, as its own tool loop does (`trl_step.py`).

A side runs in its own process. CPU-seconds are user and system time of that process and its children, so that other
work on the machine counts for neither side.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from turnwise.bench.both import RlStep
from turnwise.bench.report import machine, make_engine, median_of, model_directory, run_sides
from turnwise.engine.config import EngineConfig
from turnwise.engine.device_info import choose_device
from turnwise.errors import ConfigError
from turnwise.types import LoraConfig

SCRIPT = Path(__file__).with_name("trl_step.py")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=4, help="number of prompts")
    parser.add_argument("--group-size", type=int, default=8, help="dialogues per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens in each prompt")
    parser.add_argument("--turns", type=int, default=4, help="turns in each dialogue")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens to sample in each turn")
    parser.add_argument("--observed", type=int, default=32, help="tokens that the world adds between two turns")
    parser.add_argument("--micro-batch", type=int, default=8, help="dialogues in one pass of TRL")
    parser.add_argument(
        "--trl-python", default="", help="a Python that has trl and peft; without it, our side runs alone"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    _check(args)
    if args.side != "both":
        return _run_ours(args) if args.side == "ours" else _run_trl(args)
    return compare(args, run_sides("step", args, ["peer", "ours"] if args.trl_python else ["ours"]))


def compare(args: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The table of both sides; refuses to compare unequal work."""
    ours = runs["ours"]
    result: dict[str, Any] = {
        "bench": "step",
        "model": args.model,
        "machine": ours[0]["machine"],
        "dtype": ours[0]["dtype"],
        "rank": args.rank,
        "load": f"{args.prompts} x {args.group_size} dialogues of {args.turns} turns, {args.prompt_tokens}-token "
        f"prompt, {args.new_tokens} sampled a turn, {args.observed} observed between",
        "sampled_tokens": ours[0]["sampled_tokens"],
        "trained_tokens": ours[0]["trained_tokens"],
        "cpu_s": median_of(ours, "cpu_s"),
        "wall_s": median_of(ours, "wall_s"),
    }
    if "peer" in runs:
        theirs = runs["peer"]
        for figure in ("sampled_tokens", "trained_tokens"):
            if theirs[0][figure] != ours[0][figure]:
                raise ConfigError(
                    f"the sides did unequal work: {figure} {ours[0][figure]} here and {theirs[0][figure]} in TRL"
                )
        result |= {f"trl_{name}": median_of(theirs, name) for name in ("cpu_s", "wall_s")}
        result |= {"ratio_cpu": result["trl_cpu_s"] / result["cpu_s"], "trl": theirs[0]["version"]}
    return result


def _check(args: argparse.Namespace) -> None:
    if args.rank < 1:
        raise ConfigError(f"--rank {args.rank} leaves nothing to train; expected 1 or more")
    if args.group_size < 2 or (args.prompts * args.group_size) % args.micro_batch:
        raise ConfigError(
            f"--prompts {args.prompts} --group-size {args.group_size} --micro-batch {args.micro_batch}: expected "
            "groups of 2 or more, and a number of dialogues that is a multiple of TRL's passes"
        )
    if choose_device(_engine_config(args))[0].type != "cpu":
        raise ConfigError("`bench step` counts CPU-seconds; use --device cpu")


def _lora(args: argparse.Namespace) -> LoraConfig:
    """Every linear but the output head, which PEFT's `all-linear` leaves out too."""
    return LoraConfig(rank=args.rank, seed=0, train_unembed=False)


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(device=args.device, dtype=args.dtype)


def cpu_seconds() -> float:
    """User and system time of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _run_ours(args: argparse.Namespace) -> dict[str, Any]:
    engine = make_engine(args, max_num_seqs=max(args.prompts * args.group_size, 256))
    step = RlStep(engine, args, _lora(args))
    taken: list[tuple[float, float]] = []
    for _ in range(args.warmups + args.repeats):
        before = cpu_seconds(), time.perf_counter()
        step.alternate()
        taken.append((cpu_seconds() - before[0], time.perf_counter() - before[1]))
    cpu_s, wall_s = (statistics.median(column) for column in zip(*taken[args.warmups :], strict=True))
    return {
        "machine": machine(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "sampled_tokens": sum(sum(dialogue.is_sampled) for dialogue in step.played),
        "trained_tokens": sum(len(dialogue.ids) for dialogue in step.played),
    }


def _run_trl(args: argparse.Namespace) -> dict[str, Any]:
    engine = make_engine(args, max_num_seqs=1, kv_cache_gib=0.01, self_test=False)
    step = RlStep(engine, args, _lora(args))
    load = {
        "model": str(model_directory(args.model)),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "prompts": step.prompts,
        "observed": step.observed,
        "targets": sorted({name.rpartition(".")[2] for name in step.adapter.pairs}),
        "num_observed": args.observed,
    }
    names = ("group_size", "prompt_tokens", "turns", "new_tokens", "micro_batch", "rank", "warmups", "repeats")
    load |= {name: getattr(args, name) for name in names}
    engine.close()
    del engine, step
    with tempfile.TemporaryDirectory(prefix="turnwise-bench-") as place:
        given, wanted = Path(place, "load.json"), Path(place, "result.json")
        given.write_text(json.dumps(load), encoding="utf-8")
        done = subprocess.run(
            [args.trl_python, str(SCRIPT), str(given), str(wanted)], capture_output=True, text=True, check=False
        )
        if done.returncode or not wanted.exists():
            raise ConfigError(
                f"{args.trl_python} could not run TRL (docs/results.md says how to make its environment): "
                f"{done.stderr[-2000:]}"
            )
        return json.loads(wanted.read_text(encoding="utf-8"))
