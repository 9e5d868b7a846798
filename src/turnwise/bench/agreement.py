"""Compare the sampler's and the trainer's logprobs, token by token.

The bench samples from an adapter that is no longer at its start, once merged into the weights and once beside them: in
batches of several sizes, and over the turns of dialogues whose earlier turns are cached. The trainer then computes the
logprobs of the sampled tokens; of a mixture of experts, once with the experts that the sampler chose (`replayed`), and
once with its own choice. `equal_bits` is the share of these logprobs that are the same number; with `--engine
bitwise=true` it is 1, and nothing is merged. `k2` is the mean of (trainer - sampler)^2 / 2 over these tokens, an
estimate of the KL between the two. `adapter_k2` is the same between the adapter and the base: the value if one side
ignored the adapter.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from turnwise.bench.drive import finish, sample_sequences
from turnwise.bench.report import engine_options, machine, make_engine, model_directory
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.training.trainable import LoraAdapter
from turnwise.errors import ConfigError
from turnwise.models.families import describe_experts
from turnwise.types import Datum, LoraConfig, ModelInput, SampledSequence

MERGES: tuple[Literal["always", "never"], ...] = ("always", "never")
NAMES = {"always": "merged", "never": "unmerged"}
DISPLACEMENT = 0.01
"""Standard deviation of the adapter's B: large enough to change the logits, small enough to leave a working model."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 32, 256], help="numbers of prompts to sample together"
    )
    parser.add_argument("--prompt-tokens", type=int, default=16, help="tokens in each prompt")
    parser.add_argument("--new-tokens", type=int, default=8, help="tokens to sample per prompt or turn")
    parser.add_argument("--dialogues", type=int, default=8, help="number of dialogues; 0 skips them")
    parser.add_argument("--turns", type=int, default=6, help="turns in each dialogue")
    parser.add_argument("--observed", type=int, default=8, help="tokens that the world adds after each turn")
    parser.add_argument("--only-unmerged", action="store_true", help="leave out the adapter that is merged")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.rank < 1:
        raise ConfigError(f"--rank {args.rank} leaves no adapter to merge; expected 1 or more")
    result: dict[str, Any] = {"bench": "agreement", "model": args.model}
    figures: dict[str, dict[str, float]] = {}
    scales: list[float] = []
    directory = model_directory(args.model)
    spec = describe_experts(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    replays = spec is not None and spec.is_routable
    is_bitwise = EngineConfig.model_validate(engine_options(args.engine)).bitwise
    for merge in MERGES[1:] if args.only_unmerged or is_bitwise else MERGES:
        most = max(*args.batches, args.dialogues, 1)
        engine = make_engine(args, max_num_seqs=most, merge_adapter=merge, routing_replay=replays)
        result |= _load(args, engine)
        gaps, scale = _measure(args, engine)
        figures |= {f"{NAMES[merge]}_{name}": _figures(values) for name, values in gaps.items()}
        scales.append(scale)
        engine.close()
        del engine
        gc.collect()  # the next engine needs the memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return {**result, "max_k2": max(case["k2"] for case in figures.values()), "adapter_k2": min(scales), **figures}


def k2(gaps: np.ndarray) -> float:
    return float(np.mean(gaps.astype(np.float64) ** 2) / 2)


def _figures(gaps: np.ndarray) -> dict[str, float]:
    """The figures of one case, rounded to three digits. Each case is a row of the table."""
    sizes = {"k2": k2(gaps), "mean_gap": float(np.mean(np.abs(gaps))), "max_gap": float(np.max(np.abs(gaps)))}
    sizes["equal_bits"] = float(np.mean(gaps == 0))
    return {name: float(f"{size:.3g}") for name, size in sizes.items()} | {"tokens": len(gaps)}


def _load(args: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    dialogues = (
        f"; {args.dialogues} dialogues x {args.turns} turns, {args.observed} observed a turn" if args.dialogues else ""
    )
    return {
        "machine": machine(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "rank": args.rank,
        "load": f"{' / '.join(map(str, args.batches))} prompts x {args.prompt_tokens} tokens, {args.new_tokens} "
        f"sampled each{dialogues}",
    }


def _measure(args: argparse.Namespace, engine: Engine) -> tuple[dict[str, np.ndarray], float]:
    """Return trainer minus sampler for every case (batch sizes, all turns, the last turn), and adapter_k2."""
    adapter = displaced_adapter(engine, args.rank)
    policy = engine.publish(adapter)
    rng = np.random.default_rng(0)

    def draw(count: int, num_tokens: int) -> list[list[int]]:
        return rng.integers(min(100, engine.vocab_size // 2), engine.vocab_size, (count, num_tokens)).tolist()

    found: dict[str, np.ndarray] = {}
    scale = 0.0
    for size in args.batches:
        prompts = draw(size, args.prompt_tokens)
        replies = sample_sequences(engine, prompts, args.new_tokens, [policy] * len(prompts))
        if engine.config.routing_replay:
            found[f"batch_{size}_replayed"] = _gaps(engine, adapter, prompts, replies)
        known = own_logprobs(engine, adapter, prompts, replies)
        found[f"batch_{size}"] = known - sampler_logprobs(replies)
        scale = k2(known - trainer_logprobs(engine, adapter, prompts, replies, of="base"))
    if not args.dialogues:
        return found, scale
    histories = draw(args.dialogues, args.prompt_tokens)
    turns: list[np.ndarray] = []
    replayed: list[np.ndarray] = []
    for _ in range(args.turns):
        replies = sample_sequences(engine, histories, args.new_tokens, [policy] * len(histories))
        if engine.config.routing_replay:
            replayed.append(_gaps(engine, adapter, histories, replies))
        turns.append(own_logprobs(engine, adapter, histories, replies) - sampler_logprobs(replies))
        seen = draw(args.dialogues, args.observed)
        histories = [[*h, *r.tokens, *o] for h, r, o in zip(histories, replies, seen, strict=True)]
    if replayed:
        found["dialogues_replayed"] = np.concatenate(replayed)
    return {**found, "dialogues": np.concatenate(turns), f"turn_{args.turns}": turns[-1]}, scale


def _gaps(
    engine: Engine, adapter: LoraAdapter, prompts: Sequence[Sequence[int]], replies: Sequence[SampledSequence]
) -> np.ndarray:
    return trainer_logprobs(engine, adapter, prompts, replies) - sampler_logprobs(replies)


def own_logprobs(
    engine: Engine, adapter: LoraAdapter, prompts: Sequence[Sequence[int]], replies: Sequence[SampledSequence]
) -> np.ndarray:
    """`trainer_logprobs` with the trainer's own choice of experts."""
    memory, engine.trainer.routing = engine.trainer.routing, None
    try:
        return trainer_logprobs(engine, adapter, prompts, replies)
    finally:
        engine.trainer.routing = memory


def displaced_adapter(engine: Engine, rank: int) -> LoraAdapter:
    """An adapter on every linear, whose B, which starts at zero, is moved by the same noise on every device."""
    adapter = engine.create_adapter(LoraConfig(rank=rank, seed=0))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, b in adapter.pairs.values():
            b.copy_(DISPLACEMENT * torch.randn(b.shape, generator=generator))
    return adapter


def trainer_logprobs(
    engine: Engine,
    adapter: LoraAdapter,
    prompts: Sequence[Sequence[int]],
    replies: Sequence[SampledSequence],
    *,
    of: Literal["adapter", "base"] = "adapter",
) -> np.ndarray:
    """The trainer's logprobs of the sampled tokens, one prompt after the other."""
    datums = []
    for prompt, reply in zip(prompts, replies, strict=True):
        ids = [*prompt, *reply.tokens]
        datums.append(Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:]}))
    reference = {"kl_reference": "base"} if of == "base" else None
    output = finish(engine.forward(adapter, datums, "cross_entropy", reference))
    known = zip(output.loss_fn_outputs, replies, strict=True)
    return np.concatenate([out["logprobs"].to_numpy()[-len(reply.tokens) :] for out, reply in known])


def sampler_logprobs(replies: Sequence[SampledSequence]) -> np.ndarray:
    return np.concatenate([np.asarray(reply.logprobs, dtype=np.float32) for reply in replies])
