"""Measure sampling and training while other processes keep the cores busy, against transformers.

Every side is a process that has loaded its model and waits. One side at a time measures, first alone, then beside
processes that compute without end. Our sides differ in the settings of the OpenMP runtime: none (`default`), one thread
(`one_thread`), threads that sleep while they wait (`passive`), or threads that always spin (`spinning`). The peer has
no settings.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.bench import sample, train
from turnwise.bench.report import machine, make_engine, timed
from turnwise.engine.config import EngineConfig
from turnwise.engine.device_info import choose_device
from turnwise.errors import ConfigError, TurnwiseError

WORKS = ("sample", "train")
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "one_thread": {"OMP_NUM_THREADS": "1"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "spinning": {"GOMP_SPINCOUNT": "300000"},  # libgomp's own default
}
PEER = "transformers"
# This program ends when its parent process ends. The parent passes its own pid: a child that asked for it only after
# the parent was killed would wait for the wrong process, and spin for ever.
_SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(10**6): pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measurement: the work, the side, and the number of busy processes beside it."""

    work: str
    side: str
    num_beside: int
    tokens_per_s: float


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(device="cpu", repeats=2)
    parser.add_argument(
        "--beside",
        type=int,
        nargs="+",
        default=[1, os.cpu_count() or 1],
        help="numbers of busy processes to run beside it",
    )
    parser.add_argument("--prompts", type=int, default=16, help="prompts in the batch")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="tokens in each prompt")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens to sample for each prompt")
    parser.add_argument("--sequences", type=int, default=4, help="sequences to train on")
    parser.add_argument("--tokens", type=int, default=64, help="tokens in each of these sequences")
    parser.add_argument("--trained", type=float, default=1.0, help="share of tokens that are trained")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.device != "cpu":
        raise ConfigError(f"--device {args.device}: this bench measures CPU contention only; expected cpu")
    if args.side != "both":
        return _serve(args)
    sides = [*SETTINGS, *([PEER] if args.peer == "transformers" else [])]
    figures: list[Figure] = []
    with contextlib.ExitStack() as stack:
        workers = {side: stack.enter_context(_Worker.started(side, args)) for side in sides}
        about = [worker.read_reply() for worker in workers.values()]  # each worker reports that it is ready
        for _ in range(args.rounds):
            for num_beside in dict.fromkeys([0, *args.beside]):
                with busy_cores(num_beside):
                    figures += [
                        Figure(work=work, side=side, num_beside=num_beside, tokens_per_s=worker.measure(work))
                        for work in WORKS
                        for side, worker in workers.items()
                    ]
    return {
        "bench": "busy",
        "model": args.model,
        "machine": about[0]["machine"],
        "load": f"sampling {args.prompts} x {args.prompt_tokens} + {args.new_tokens} tokens, training "
        f"{args.sequences} x {args.tokens}, rank {args.rank}; `busy_N`: beside N processes that compute",
        **summarize(figures),
    }


def summarize(figures: Sequence[Figure]) -> dict[str, float]:
    """Median tokens per second of each side, and the ratios of the default to the others.

    `of_best` compares with the better of one thread and passive waiting, `of_spinning` with the runtime's own
    default, `speedup` with the peer.
    """
    result: dict[str, float] = {}
    for num_beside in dict.fromkeys(f.num_beside for f in figures):
        for work in dict.fromkeys(f.work for f in figures):
            name = f"{work}_{f'busy_{num_beside}' if num_beside else 'quiet'}"
            chosen = [f for f in figures if f.work == work and f.num_beside == num_beside]
            rates = {
                side: statistics.median(f.tokens_per_s for f in chosen if f.side == side)
                for side in dict.fromkeys(f.side for f in chosen)
            }
            result |= {f"{name}_{side}_tokens_per_s": rate for side, rate in rates.items()}
            result[f"{name}_of_best"] = rates["default"] / max(rates["one_thread"], rates["passive"])
            result[f"{name}_of_spinning"] = rates["default"] / rates["spinning"]
            if PEER in rates:
                result[f"{name}_speedup"] = rates["default"] / rates[PEER]
    return result


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Run `count` processes that compute without end, until the block is left or this process ends."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", _SPIN, str(os.getpid())]))
            stack.callback(process.kill)
        yield


class _Worker:
    """A process that measures on request."""

    def __init__(self, side: str, process: subprocess.Popen[str]) -> None:
        self._side = side
        self._process = process

    @classmethod
    @contextlib.contextmanager
    def started(cls, side: str, args: argparse.Namespace) -> Iterator[_Worker]:
        passed = {k: v for k, v in vars(args).items() if k not in ("bench", "side", "json", "rounds", "peer", "beside")}
        options = [f"--{key.replace('_', '-')}={value}" for key, value in passed.items()]
        command = [sys.executable, "-m", "turnwise.bench.cli", "busy", "--json", *options]
        command.append(f"--side={'peer' if side == PEER else 'ours'}")
        # Remove the caller's own OpenMP settings, because they would change the result.
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_", "MKL_"))}
        process = subprocess.Popen(
            command,
            env={**plain, **SETTINGS.get(side, {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield cls(side, process)
        finally:
            process.kill()
            process.communicate()

    def measure(self, work: str) -> float:
        """Measure one kind of work, in tokens per second."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{work}\n")
        self._process.stdin.flush()
        return self.read_reply()["tokens_per_s"]

    def read_reply(self) -> dict[str, Any]:
        """Read the worker's next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TurnwiseError(
                f"the {self._side} side ended with exit code {self._process.wait()}; see its error above"
            )
        return json.loads(line)


def _serve(args: argparse.Namespace) -> dict[str, Any]:
    """Load one side, then measure once for every line of stdin, which names the work."""
    device, _ = choose_device(EngineConfig(device=args.device, dtype=args.dtype))
    works = _works_of_ours(args) if args.side == "ours" else _works_of_peer(args)
    tokens = {"sample": args.prompts * args.new_tokens, "train": args.sequences * args.tokens}
    for work in works.values():
        work()  # warm up, so that one-time work is not timed
    print(json.dumps({"machine": machine(device)}), flush=True)
    for line in sys.stdin:
        name = line.strip()
        rate = tokens[name] / timed(works[name], args, device).median
        print(json.dumps({"tokens_per_s": rate}), flush=True)
    return {}


def _works_of_ours(args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    engine = make_engine(args, max_num_seqs=max(args.prompts, 256), kv_cache_gib=0.2)
    return {"sample": sample.batch_of_ours(args, engine), "train": train.step_of_ours(args, engine)}


def _works_of_peer(args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    return {"sample": sample.Peer(args).batch(args), "train": train.step_of_peft(args)}
