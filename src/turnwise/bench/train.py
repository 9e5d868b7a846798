"""Measure LoRA training, in tokens per second and peak memory, against peft with full logits.

Each side runs in its own process, so that peak memory is measured per side.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from turnwise.bench.report import machine, make_engine, median_of, model_directory, peak_gib, run_sides, timed
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine, choose_device
from turnwise.models.linears import linear_kind
from turnwise.types import Datum, LoraConfig, ModelInput


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=int, default=8, help="sequences in the batch")
    parser.add_argument("--tokens", type=int, default=256, help="tokens in each sequence")
    parser.add_argument("--trained", type=float, default=1.0, help="share of tokens that are trained")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.side != "both":
        return _run_ours(args) if args.side == "ours" else _run_peft(args)
    runs = run_sides("train", args, ["peer", "ours"] if args.peer == "transformers" else ["ours"])
    result = {
        "bench": "train",
        "model": args.model,
        "machine": runs["ours"][0]["machine"],
        "load": f"{args.sequences} x {args.tokens} tokens, {args.trained:.0%} of positions trained, rank {args.rank}",
        "tokens_per_s": median_of(runs["ours"], "tokens_per_s"),
        "peak_gib": max(r["peak_gib"] for r in runs["ours"]),
    }
    if "peer" in runs:
        result["peft_tokens_per_s"] = median_of(runs["peer"], "tokens_per_s")
        result["peft_peak_gib"] = max(r["peak_gib"] for r in runs["peer"])
        result["speedup"] = result["tokens_per_s"] / result["peft_tokens_per_s"]
        result["memory_ratio"] = result["peak_gib"] / result["peft_peak_gib"]
    return result


def _load(args: argparse.Namespace, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [sequences, tokens + 1], and a mask of trained targets [sequences, tokens]: the last of each row."""
    ids = np.random.default_rng(0).integers(100, vocab_size, (args.sequences, args.tokens + 1))
    mask = np.zeros((args.sequences, args.tokens), dtype=bool)
    mask[:, args.tokens - max(1, round(args.tokens * args.trained)) :] = True
    return ids, mask


def _run_ours(args: argparse.Namespace) -> dict[str, Any]:
    engine = make_engine(args, kv_cache_gib=0.05)
    return _result(args, timed(step_of_ours(args, engine), args, engine.device).median, engine.device)


def step_of_ours(args: argparse.Namespace, engine: Engine) -> Callable[[], object]:
    """Make a function that computes the gradient of one batch."""
    adapter = engine.create_adapter(LoraConfig(rank=args.rank, seed=0, train_unembed=False))
    ids, mask = _load(args, engine.vocab_size)
    datums = [
        Datum(
            ModelInput.from_ints(row[:-1]),
            {
                "target_tokens": row[1:],
                "mask": chosen.astype(np.float32),
                "logprobs": np.full(args.tokens, -10.0, dtype=np.float32) * chosen,
                "advantages": np.ones(args.tokens, dtype=np.float32),
            },
        )
        for row, chosen in zip(ids, mask, strict=True)
    ]

    def step() -> None:
        for _ in engine.forward_backward(adapter, datums, "importance_sampling", None):
            pass
        adapter.grad.zero_()

    return step


def _run_peft(args: argparse.Namespace) -> dict[str, Any]:
    device, _ = choose_device(EngineConfig(device=args.device, dtype=args.dtype))
    return _result(args, timed(step_of_peft(args), args, device).median, device)


def step_of_peft(args: argparse.Namespace) -> Callable[[], object]:
    """Make a function that computes the same gradient with peft and full logits."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    device, dtype = choose_device(EngineConfig(device=args.device, dtype=args.dtype))
    base: Any = AutoModelForCausalLM.from_pretrained(model_directory(args.model), dtype=dtype)
    base.to(device)
    names = [n for n, m in base.named_modules() if isinstance(m, torch.nn.Linear) and linear_kind(n) != "unembed"]
    config = PeftLoraConfig(r=args.rank, lora_alpha=32, target_modules=sorted({n.rpartition(".")[2] for n in names}))
    model = get_peft_model(base, config)
    ids, mask = _load(args, base.config.vocab_size)
    tokens, chosen = torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)

    def step() -> None:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        logprobs = torch.log_softmax(logits.float(), dim=-1).gather(-1, tokens[:, 1:, None])[..., 0]
        loss = -(torch.exp(logprobs + 10.0) * chosen).sum()
        loss.backward()
        model.zero_grad()

    return step


def _result(args: argparse.Namespace, seconds: float, device: torch.device) -> dict[str, Any]:
    return {
        "bench": "train",
        "model": args.model,
        "machine": machine(device),
        "tokens_per_s": args.sequences * args.tokens / seconds,
        "peak_gib": peak_gib(device),
    }
