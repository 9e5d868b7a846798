"""Measure training, in tokens per second and peak memory, against peft or transformers with full logits.

With `--weights lora` a step is a gradient, and the peer is peft. With `--weights full` a step is a gradient of all
weights and AdamW's update, and the peer is transformers with torch's fused AdamW: float32 weights, bfloat16 products
where the dtype is bfloat16. Each side runs in its own process, so that peak memory is measured per side.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from turnwise.bench.report import Timing, machine, make_engine, median_of, model_directory, peak_gib, run_sides, timed
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine, choose_device
from turnwise.models.facts import read_facts
from turnwise.models.linears import linear_kind
from turnwise.types import AdamParams, Datum, LoraConfig, ModelInput

LEARNING_RATE = 1e-5
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0}
"""Dense bfloat16 operations of a card, by a part of its name."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=int, default=8, help="sequences in the batch")
    parser.add_argument("--tokens", type=int, default=256, help="tokens in each sequence")
    parser.add_argument("--trained", type=float, default=1.0, help="share of tokens that are trained")
    parser.add_argument("--weights", choices=("lora", "full"), default="lora", help="what is trained")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.side != "both":
        return _run_ours(args) if args.side == "ours" else _run_peer(args)
    runs = run_sides("train", args, ["peer", "ours"] if args.peer == "transformers" else ["ours"])
    result = {
        "bench": "train",
        "model": args.model,
        "machine": runs["ours"][0]["machine"],
        "load": f"{args.sequences} x {args.tokens} tokens, {args.trained:.0%} of positions trained, {_what(args)}",
        **_figures(runs["ours"]),
    }
    if "peer" in runs:
        peer = "peft" if args.weights == "lora" else "transformers"
        result |= {f"{peer}_{name}": value for name, value in _figures(runs["peer"]).items()}
        result["speedup"] = result["tokens_per_s"] / result[f"{peer}_tokens_per_s"]
        result["memory_ratio"] = result["peak_gib"] / result[f"{peer}_peak_gib"]
    return result


def _what(args: argparse.Namespace) -> str:
    return f"rank {args.rank}" if args.weights == "lora" else "all weights, with AdamW"


def _figures(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    rates = {name: median_of(runs, name) for name in ("tokens_per_s", "tokens_per_cpu_s") if name in runs[0]}
    figures = {**rates, "peak_gib": max(run["peak_gib"] for run in runs)}
    is_known = all("share_of_peak" in run for run in runs)
    return figures | ({"share_of_peak": median_of(runs, "share_of_peak")} if is_known else {})


def _load(args: argparse.Namespace, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [sequences, tokens + 1], and a mask of trained targets [sequences, tokens]: the last of each row."""
    ids = np.random.default_rng(0).integers(100, vocab_size, (args.sequences, args.tokens + 1))
    mask = np.zeros((args.sequences, args.tokens), dtype=bool)
    mask[:, args.tokens - max(1, round(args.tokens * args.trained)) :] = True
    return ids, mask


def _run_ours(args: argparse.Namespace) -> dict[str, Any]:
    engine = make_engine(args, kv_cache_gib=0.05, full_weights=args.weights == "full")
    return _result(args, timed(step_of_ours(args, engine), args, engine.device), engine.device)


def step_of_ours(args: argparse.Namespace, engine: Engine, *, updates: bool = False) -> Callable[[], object]:
    """Make a function that computes the gradient of one batch; with `updates`, or of all weights, also an update."""
    is_full = getattr(args, "weights", "lora") == "full"
    adapter = (
        engine.create_full()
        if is_full
        else engine.create_adapter(LoraConfig(rank=args.rank, seed=0, train_unembed=False))
    )
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
        if is_full or updates:
            engine.optim_step(adapter, AdamParams(learning_rate=LEARNING_RATE))
        else:
            adapter.grad.zero_()

    return step


def _run_peer(args: argparse.Namespace) -> dict[str, Any]:
    device, _ = choose_device(EngineConfig(device=args.device, dtype=args.dtype))
    step = step_of_peft(args) if args.weights == "lora" else step_of_transformers(args)
    return _result(args, timed(step, args, device), device)


def step_of_transformers(args: argparse.Namespace) -> Callable[[], object]:
    """Make a function that trains all weights with transformers, full logits and torch's fused AdamW."""
    from transformers import AutoModelForCausalLM

    device, dtype = choose_device(EngineConfig(device=args.device, dtype=args.dtype))
    model: Any = AutoModelForCausalLM.from_pretrained(model_directory(args.model), dtype=torch.float32)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    ids, mask = _load(args, model.config.vocab_size)
    tokens, chosen = torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        logprobs = torch.log_softmax(logits.float(), dim=-1).gather(-1, tokens[:, 1:, None])[..., 0]
        loss = -(torch.exp(logprobs + 10.0) * chosen).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


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


def _result(args: argparse.Namespace, timing: Timing, device: torch.device) -> dict[str, Any]:
    rates = timing.rates(args.sequences * args.tokens, device)
    result = {
        "bench": "train",
        "model": args.model,
        "machine": machine(device),
        **rates,
        "peak_gib": peak_gib(device),
    }
    peak = next((value for name, value in PEAK_TFLOPS.items() if name in result["machine"]), None)
    if args.weights == "full" and peak is not None:
        result["share_of_peak"] = rates["tokens_per_s"] * _operations_per_token(args) / (peak * 1e12)
    return result


def _operations_per_token(args: argparse.Namespace) -> float:
    """The operations of a gradient: six per weight of a product, and those of causal attention. Recomputed work counts
    once."""
    facts = read_facts(model_directory(args.model))
    products = sum(shape.num_active for shape in facts.linears.values())
    attention = facts.num_layers * facts.num_heads * facts.head_size * args.tokens / 2
    return 6 * products + 12 * attention
