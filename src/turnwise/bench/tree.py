"""Measure training on groups that share a prefix, as a tree against separate rows of the same engine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from turnwise.bench.report import Timing, machine, make_engine, peak_gib, timed
from turnwise.engine.engine import Engine
from turnwise.engine.training.pack import NO_SHARING
from turnwise.types import Datum, LoraConfig, ModelInput


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--groups", type=int, default=1, help="number of groups")
    parser.add_argument("--group-size", type=int, default=8, help="branches per group")
    parser.add_argument("--prefix", type=int, default=800, help="tokens that a group shares")
    parser.add_argument("--branch", type=int, default=200, help="tokens of each branch, all trained")


def run(args: argparse.Namespace) -> dict[str, Any]:
    engine = make_engine(args, kv_cache_gib=0.05)
    rng = np.random.default_rng(0)
    datums = []
    for _ in range(args.groups):
        prefix = rng.integers(100, engine.vocab_size, args.prefix)
        datums += [_branch(prefix, rng, args, engine.vocab_size) for _ in range(args.group_size)]
    alone, shared = time_sharing(engine, datums, args)
    total = args.groups * args.group_size * (args.prefix + args.branch)
    unique = args.groups * (args.prefix + args.group_size * args.branch)
    return {
        "bench": "tree",
        "model": args.model,
        "machine": machine(engine.device),
        "load": f"{args.groups} x {args.group_size} datums, {args.prefix} shared + {args.branch} own tokens",
        "tokens_per_s": total / shared.median,
        "unshared_tokens_per_s": total / alone.median,
        "speedup": alone.median / shared.median,
        "ideal_speedup": total / unique,
        "peak_gib": peak_gib(engine.device),
    }


def time_sharing(engine: Engine, datums: Sequence[Datum], args: argparse.Namespace) -> tuple[Timing, Timing]:
    """Time a training step on the datums as separate rows, and with shared prefixes."""
    adapter = engine.create_adapter(LoraConfig(rank=args.rank, seed=0, train_unembed=False))

    def step() -> None:
        for _ in engine.forward_backward(adapter, datums, "importance_sampling", None):
            pass
        adapter.grad.zero_()

    def timed_sharing(min_shared: int) -> Timing:
        engine.trainer.min_shared = min_shared
        return timed(step, args, engine.device)

    shared_min = engine.trainer.min_shared
    return timed_sharing(NO_SHARING), timed_sharing(shared_min)


def _branch(prefix: np.ndarray, rng: np.random.Generator, args: argparse.Namespace, vocab_size: int) -> Datum:
    ids = np.concatenate([prefix, rng.integers(100, vocab_size, args.branch + 1)])
    mask = (np.arange(len(ids) - 1) >= args.prefix - 1).astype(np.float32)
    return Datum(
        ModelInput.from_ints(ids[:-1]),
        {"target_tokens": ids[1:], "mask": mask, "logprobs": -10.0 * mask, "advantages": mask},
    )
