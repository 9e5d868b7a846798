"""Measure sampling for a batch of prompts and for growing dialogues, against transformers' `generate`.

The dialogue load is what multi-turn RL does: each turn samples, then observed tokens arrive. Our engine reads only the
new tokens; `generate` reads the whole dialogue again. Both sample at temperature 1 and never stop early. Each side runs
in its own process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from turnwise.bench.drive import sample_sequences
from turnwise.bench.report import machine, make_engine, median_of, model_directory, peak_gib, run_sides, timed
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine, choose_device
from turnwise.engine.model.lora import Policy
from turnwise.types import LoraConfig, SampleRequest, SampleResponse, SamplingParams


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=32, help="prompts in the batch")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="tokens in each prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to sample for each prompt")
    parser.add_argument("--dialogues", type=int, default=16, help="number of dialogues; 0 skips this part")
    parser.add_argument("--turns", type=int, default=6, help="turns in each dialogue")
    parser.add_argument("--dialogue-prompt", type=int, default=128, help="tokens in the first prompt of a dialogue")
    parser.add_argument("--observed", type=int, default=32, help="tokens that the world adds after each turn")
    parser.add_argument("--sampled", type=int, default=32, help="tokens to sample in each turn")
    parser.add_argument(
        "--backend", default="", help="measure this sampler backend beside ours, as a run uses both (such as vllm)"
    )
    parser.add_argument(
        "--weights",
        default="merged",
        choices=("merged", "adapter"),
        help="what both sides sample with, beside --backend: whole weights with the adapter added, or an adapter apart",
    )
    parser.add_argument("--server-python", default="", help="the Python that runs the server (rollout.server_python)")
    parser.add_argument(
        "--server-url",
        action="append",
        default=[],
        help="a server that runs already (rollout.url), in place of one that is started; may be repeated",
    )
    parser.add_argument(
        "--server-arg", action="append", default=[], help="one more argument for the backend's server; may be repeated"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.backend:
        return _beside_backend(args)
    if args.side != "both":
        return _run_ours(args) if args.side == "ours" else _run_transformers(args)
    runs = run_sides("sample", args, ["peer", "ours"] if args.peer == "transformers" else ["ours"])
    ours = runs["ours"]
    result: dict[str, Any] = {
        "bench": "sample",
        "model": args.model,
        "machine": ours[0]["machine"],
        "dtype": ours[0]["dtype"],
        "rank": args.rank,
        "load": f"{args.prompts} prompts x {args.prompt_tokens} tokens, {args.new_tokens} sampled each",
    }
    if args.dialogues:
        result["dialogue_load"] = (
            f"{args.dialogues} dialogues x {args.turns} turns, {args.dialogue_prompt}-token prompt, "
            f"{args.observed} observed + {args.sampled} sampled a turn"
        )
    for figure in ("", "dialogue_"):
        if f"{figure}tokens_per_s" in ours[0]:
            result[f"{figure}tokens_per_s"] = median_of(ours, f"{figure}tokens_per_s")
            if "peer" in runs:
                theirs = median_of(runs["peer"], f"{figure}tokens_per_s")
                result[f"{figure}transformers_tokens_per_s"] = theirs
                result[f"{figure}speedup"] = result[f"{figure}tokens_per_s"] / theirs
        if f"{figure}tokens_per_cpu_s" in ours[0]:
            result[f"{figure}tokens_per_cpu_s"] = median_of(ours, f"{figure}tokens_per_cpu_s")
    result["peak_gib"] = max(r["peak_gib"] for r in ours)
    return result


def _beside_backend(args: argparse.Namespace) -> dict[str, Any]:
    """Both sides through their publishers, one after the other; only one of them runs at a time."""
    from turnwise.bench.backend import run_backend

    theirs = run_backend(args)
    local = {"backend": "local", "server_arg": [], "server_python": "", "server_url": []}
    ours = run_backend(argparse.Namespace(**{**vars(args), **local}))
    result: dict[str, Any] = {"bench": "sample", "model": args.model, "machine": ours.pop("machine")}
    result |= {"dtype": ours.pop("dtype"), "rank": args.rank, "backend": args.backend, "weights": args.weights}
    result["threads"] = torch.get_num_threads()
    result["load"] = f"{args.prompts} prompts x {args.prompt_tokens} tokens, {args.new_tokens} sampled each"
    for name, value in ours.items():
        result[f"local_{name}"] = value
        result[f"{args.backend}_{name}"] = theirs[name]
        if name.endswith("tokens_per_s"):
            result[f"{name.removesuffix('tokens_per_s')}ratio"] = value / theirs[name]
    return result


def _run_ours(args: argparse.Namespace) -> dict[str, Any]:
    engine = make_engine(args, max_num_seqs=max(args.prompts, args.dialogues, 256))
    policy = _policy(engine, args.rank)
    rng = np.random.default_rng(1)
    starts = rng.integers(100, engine.vocab_size, (args.dialogues, args.dialogue_prompt)).tolist()
    seen = rng.integers(100, engine.vocab_size, (args.turns, args.dialogues, args.observed)).tolist()

    def dialogues() -> None:
        engine.sampler.drop_cache()
        play_all(engine, starts, seen, args.sampled, policy)

    return {"dtype": str(engine.dtype), **_measure(args, engine.device, batch_of_ours(args, engine, policy), dialogues)}


def batch_of_ours(args: argparse.Namespace, engine: Engine, policy: Policy | None = None) -> Callable[[], object]:
    """Make a function that samples one batch of prompts from an empty cache."""
    chosen = policy or _policy(engine, args.rank)
    prompts = np.random.default_rng(0).integers(100, engine.vocab_size, (args.prompts, args.prompt_tokens)).tolist()

    def batch() -> None:
        engine.sampler.drop_cache()
        sample_sequences(engine, prompts, args.new_tokens, [chosen] * len(prompts))

    return batch


def _run_transformers(args: argparse.Namespace) -> dict[str, Any]:
    peer = Peer(args)

    def dialogues() -> None:
        history = peer.draw_ids(args.dialogues, args.dialogue_prompt)
        for _ in range(args.turns):
            history = peer.generate(history, args.sampled)
            history = torch.cat([history, peer.draw_ids(args.dialogues, args.observed)], dim=1)

    return _measure(args, peer.device, peer.batch(args), dialogues)


class Peer:
    """transformers' own model and `generate`, on the base weights."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device, dtype = choose_device(EngineConfig(device=args.device, dtype=args.dtype))
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_directory(args.model), dtype=dtype)
        self._model.to(self.device).eval()

    def batch(self, args: argparse.Namespace) -> Callable[[], object]:
        """The same load as `batch_of_ours`."""
        prompts = self.draw_ids(args.prompts, args.prompt_tokens)
        return lambda: self.generate(prompts, args.new_tokens)

    def draw_ids(self, rows: int, tokens: int) -> torch.Tensor:
        return torch.randint(100, self._model.config.vocab_size, (rows, tokens), device=self.device)

    def generate(self, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
        with torch.inference_mode():
            return self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                pad_token_id=0,
            )


def _measure(
    args: argparse.Namespace, device: torch.device, batch: Callable[[], object], dialogues: Callable[[], object]
) -> dict[str, Any]:
    result: dict[str, Any] = {"machine": machine(device)}
    result |= timed(batch, args, device).rates(args.prompts * args.new_tokens, device)
    if args.dialogues:
        rates = timed(dialogues, args, device).rates(args.dialogues * args.turns * args.sampled, device)
        result |= {f"dialogue_{name}": rate for name, rate in rates.items()}
    return {**result, "peak_gib": peak_gib(device)}


def _policy(engine: Engine, rank: int) -> Policy:
    return engine.publish(engine.create_adapter(LoraConfig(rank=rank, seed=0))) if rank else engine.base_policy


def play_all(
    engine: Engine,
    starts: Sequence[Sequence[int]],
    seen: Sequence[Sequence[Sequence[int]]],
    new_tokens: int,
    policy: Policy,
) -> list[list[int]]:
    """Play all dialogues to their end. `seen[turn][dialogue]` is what the world adds after a turn.

    As in a rollout, a dialogue starts its next turn as soon as the last one is done, without waiting for the others.
    """
    histories = [list(start) for start in starts]
    params = SamplingParams(max_tokens=new_tokens, stop=[])

    def ask(index: int, turn: int) -> None:
        def go_on(reply: SampleResponse | BaseException) -> None:
            if isinstance(reply, BaseException):
                raise reply
            histories[index] += [*reply.sequences[0].tokens, *seen[turn][index]]
            if turn + 1 < len(seen):
                ask(index, turn + 1)

        engine.sampler.submit(SampleRequest(histories[index], params), policy, on_done=go_on)

    for index in range(len(histories)):
        ask(index, 0)
    while engine.sampler.has_work:
        engine.sampler.step()
    return histories
