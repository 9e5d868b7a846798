"""Measure sampling from many adapters of different ranks in shared batches, against one adapter for all."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from turnwise.bench.drive import sample_sequences
from turnwise.bench.report import machine, make_engine, peak_gib, timed
from turnwise.engine.engine import Engine
from turnwise.engine.model.lora import Policy
from turnwise.types import LoraConfig

RANKS = (4, 8, 16, 32)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tenants", type=int, default=8, help="number of adapters; their ranks are 4, 8, 16, 32, 4, ..."
    )
    parser.add_argument("--requests", type=int, default=4, help="requests per adapter")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="tokens in each prompt")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens to sample for each prompt")


def run(args: argparse.Namespace) -> dict[str, Any]:
    total = args.tenants * args.requests
    engine = make_engine(args, max_num_seqs=total)
    prompts = np.random.default_rng(0).integers(100, engine.vocab_size, (total, args.prompt_tokens)).tolist()
    policies = [_policy(engine, RANKS[i % len(RANKS)], i) for i in range(args.tenants)]
    of_tenants = [policies[i // args.requests] for i in range(total)]

    def sample(owners: Sequence[Policy]) -> None:
        engine.sampler.drop_cache()
        sample_sequences(engine, prompts, args.new_tokens, owners)

    one = timed(lambda: sample(policies[:1] * total), args, engine.device)
    many = timed(lambda: sample(of_tenants), args, engine.device)
    return {
        "bench": "tenants",
        "model": args.model,
        "machine": machine(engine.device),
        "load": f"{args.tenants} tenants x {args.requests} requests, {args.prompt_tokens} + {args.new_tokens} tokens",
        "tokens_per_s": total * args.new_tokens / many.median,
        "one_adapter_tokens_per_s": total * args.new_tokens / one.median,
        "share_of_one_adapter": one.median / many.median,
        "peak_gib": peak_gib(engine.device),
    }


def _policy(engine: Engine, rank: int, seed: int) -> Policy:
    adapter = engine.create_adapter(LoraConfig(rank=rank, seed=seed))
    adapter.flat.normal_(0.0, 0.01)
    return engine.publish(adapter)
