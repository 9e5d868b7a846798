"""Shared by all benchmarks: options, repeats, and the format of figures."""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of each repeat. The reported figure is their median."""

    seconds: list[float]
    cpu_seconds: Sequence[float] = ()
    """User and system time of this process. Time that other programs on the machine take is not in it."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def rates(self, num_tokens: int, device: torch.device) -> dict[str, float]:
        """Tokens per second, and on a CPU tokens per CPU-second."""
        rates = {"tokens_per_s": num_tokens / self.median}
        if device.type == "cpu":
            rates["tokens_per_cpu_s"] = num_tokens / statistics.median(self.cpu_seconds)
        return rates


def add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="smollm2", help="a model's name or directory, or random:qwen3-0.6b for random weights"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--engine", default="", help="options of the engine, such as bitwise=true,capture_passes=false")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each side; the median is reported")
    parser.add_argument("--warmups", type=int, default=1, help="untimed runs before the timed ones")
    parser.add_argument("--rank", type=int, default=16, help="LoRA rank; 0 means no adapter")
    parser.add_argument("--peer", choices=("transformers", "none"), default="transformers", help="what to compare with")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each side; the sides take turns")
    parser.add_argument("--side", choices=("both", "ours", "peer"), default="both", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def make_engine(args: argparse.Namespace, **settings: Any) -> Engine:
    given = {"device": args.device, "dtype": args.dtype, "seed": 0, **settings, **engine_options(args.engine)}
    return Engine(model_directory(args.model), EngineConfig.model_validate(given), name=args.model)


def engine_options(text: str) -> dict[str, str]:
    """`--engine NAME=VALUE,NAME=VALUE` as options of the section `engine`."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    if unknown := [name for name, _, _ in pairs if name not in EngineConfig.model_fields]:
        raise ConfigError(f"--engine {text}: there is no option engine.{unknown[0]}; docs/config.md lists them")
    return {name: value for name, _, value in pairs}


def model_directory(name: str) -> Path:
    """Find the model's directory. A `random:` shape is written to the store once."""
    from turnwise.bench.shapes import random_model_directory
    from turnwise.models.store import resolve_model

    if name.startswith("random:"):
        return random_model_directory(name.removeprefix("random:"))
    return resolve_model(name).directory


def timed(work: Callable[[], object], args: argparse.Namespace, device: torch.device) -> Timing:
    """Time `work`: run warm-ups, then repeats, and wait for the device each time."""
    taken: list[tuple[float, float]] = []
    for _ in range(args.warmups + args.repeats):
        _wait(device)
        start, cpu_start = time.perf_counter(), time.process_time()
        work()
        _wait(device)
        taken.append((time.perf_counter() - start, time.process_time() - cpu_start))
    timed_ones = taken[args.warmups :]
    return Timing([seconds for seconds, _ in timed_ones], [cpu for _, cpu in timed_ones])


def run_sides(bench: str, args: argparse.Namespace, sides: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Run the sides in turn, each in its own process: memory is measured per side, and noise affects all equally."""
    left_out = ("bench", "side", "json", "rounds", "peer")
    passed = {k: v for k, v in vars(args).items() if k not in left_out and v not in (None, [])}
    options = [f"--{key.replace('_', '-')}={value}" for key, value in passed.items()]
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for _ in range(args.rounds):
        for side in sides:
            command = [sys.executable, "-m", "turnwise.bench.cli", bench, f"--side={side}", "--json", *options]
            reply = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            runs[side].append(json.loads(reply))
    return runs


def median_of(runs: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_gib(device: torch.device) -> float:
    """Highest memory use so far, of the GPU or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def show(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2))
        return
    model = f": {result['model']}" if "model" in result else ""
    where = result.get("machine") or machine(torch.device("cpu"))
    table = Table(title=f"{result['bench']}{model} on {where}", show_header=False)
    for key, value in result.items():
        if key not in ("bench", "model", "machine"):
            table.add_row(key, f"{value:.3g}" if isinstance(value, float) else str(value))
    Console().print(table)
