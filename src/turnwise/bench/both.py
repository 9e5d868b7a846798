"""Measure what it costs a step of RL to switch between sampling and training on one device.

A step publishes the adapter, plays a batch of dialogues with it, and trains on the sampled tokens. The bench also times
the same sampling without training in between, from an empty cache because a new version finds nothing in it, and the
same training without sampling in between. The rest of a step's time is the cost of switching, publishing and merging.
The three take turns, each with its own warm-up, so that noise affects all of them equally.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from turnwise.bench.drive import finish, sample_sequences
from turnwise.bench.report import machine, make_engine, peak_gib, timed
from turnwise.engine.budget import GIB
from turnwise.engine.engine import Engine
from turnwise.engine.model.lora import Policy, merge_into
from turnwise.engine.training.trainable import LoraAdapter
from turnwise.errors import ConfigError
from turnwise.types import AdamParams, Datum, LoraConfig, ModelInput, SampledSequence

T = TypeVar("T")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=4, help="number of prompts")
    parser.add_argument("--group-size", type=int, default=4, help="dialogues per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens in each prompt")
    parser.add_argument("--turns", type=int, default=2, help="turns in each dialogue")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens to sample in each turn")
    parser.add_argument("--observed", type=int, default=16, help="tokens that the world adds between two turns")


def run(args: argparse.Namespace) -> dict[str, Any]:
    if args.rank < 1:
        raise ConfigError(f"--rank {args.rank} leaves nothing to train; expected 1 or more")
    num_dialogues = args.prompts * args.group_size
    engine = make_engine(args, max_num_seqs=max(num_dialogues, 256))
    step = RlStep(engine, args)
    policy = engine.publish(step.adapter)
    played = step.play(policy)

    def sample_alone() -> None:
        engine.sampler.drop_cache()
        played[:] = step.play(policy)

    works = {"sampling": sample_alone, "training": lambda: step.train(played), "step": step.alternate}
    seconds = _take_turns(works, args, engine.device)
    sampling, training, together = seconds["sampling"], seconds["training"], seconds["step"]
    peak = peak_gib(engine.device)
    parts = step.medians(args)
    merged: dict[str, Tensor] = {}
    merging = timed(lambda: merge_into(merged, engine.model.matrices, engine.model.groups, policy), args, engine.device)
    sampled = num_dialogues * args.turns * args.new_tokens
    trained = sum(len(dialogue.ids) - 1 for dialogue in played)
    return {
        "bench": "both",
        "model": args.model,
        "machine": machine(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "rank": args.rank,
        "load": f"{args.prompts} x {args.group_size} dialogues of {args.turns} turns, {args.prompt_tokens}-token "
        f"prompt, {args.new_tokens} sampled a turn, {args.observed} observed between",
        "step_s": together,
        "sampling_alone_s": sampling,
        "training_alone_s": training,
        "cost_of_both_share": (together - sampling - training) / together,
        "publish_s": parts["publish"],
        "merge_s": merging.median,
        "sampling_in_step_s": parts["sample"],
        "training_in_step_s": parts["train"],
        "sampled_tokens_per_s": sampled / sampling,
        "trained_tokens_per_s": trained / training,
        "peak_gib": peak,
        **memory_split(engine, step.adapter, merged, peak),
    }


def _take_turns(
    works: Mapping[str, Callable[[], object]], args: argparse.Namespace, device: torch.device
) -> dict[str, float]:
    """Median seconds of each of the three."""
    once = argparse.Namespace(warmups=max(1, args.warmups), repeats=1)
    rounds = [{name: timed(work, once, device).median for name, work in works.items()} for _ in range(args.repeats)]
    return {name: statistics.median(seconds[name] for seconds in rounds) for name in works}


class PlayedDialogue:
    """Token ids of one attempt, with the sampler's logprobs where it sampled."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids = list(prompt)
        self.logprobs = [0.0] * len(prompt)
        self.is_sampled = [False] * len(prompt)

    def add(self, tokens: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Add sampled tokens, or, without logprobs, tokens of the world."""
        self.ids += tokens
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs
        self.is_sampled += [logprobs is not None] * len(tokens)

    def to_datum(self, advantage: float) -> Datum:
        mask = np.asarray(self.is_sampled[1:], dtype=np.float32)
        return Datum(
            ModelInput.from_ints(self.ids[:-1]),
            {
                "target_tokens": np.asarray(self.ids[1:]),
                "mask": mask,
                "logprobs": np.asarray(self.logprobs[1:], dtype=np.float32),
                "advantages": advantage * mask,
            },
        )


class RlStep:
    """One step of RL on an engine, and the seconds of its parts."""

    def __init__(self, engine: Engine, args: argparse.Namespace, lora: LoraConfig | None = None) -> None:
        rng = np.random.default_rng(0)
        low = min(100, engine.vocab_size // 2)
        self._engine, self._args = engine, args
        self.adapter = engine.create_adapter(lora or LoraConfig(rank=args.rank, seed=0))
        self.prompts = rng.integers(low, engine.vocab_size, (args.prompts, args.prompt_tokens)).tolist()
        size = (args.turns, args.prompts * args.group_size, args.observed)
        self.observed = rng.integers(low, engine.vocab_size, size).tolist()
        self.seconds: dict[str, list[float]] = {"publish": [], "sample": [], "train": []}
        self.played: list[PlayedDialogue] = []
        """The dialogues of the last step."""

    def alternate(self) -> None:
        """Publish, sample, train."""
        policy = self._timed("publish", lambda: self._engine.publish(self.adapter))
        self.played = self._timed("sample", lambda: self.play(policy))
        self._timed("train", lambda: self.train(self.played))

    def medians(self, args: argparse.Namespace) -> dict[str, float]:
        """Median seconds of each part, without warm-ups."""
        period = max(1, args.warmups) + 1
        return {name: statistics.median(seconds[period - 1 :: period]) for name, seconds in self.seconds.items()}

    def play(self, policy: Policy) -> list[PlayedDialogue]:
        """Play every dialogue to its last turn. The first turn is sampled as one group per prompt."""
        args = self._args
        dialogues = [PlayedDialogue(prompt) for prompt in self.prompts for _ in range(args.group_size)]
        for turn in range(args.turns):
            replies: list[SampledSequence]
            if turn == 0:
                owners = [policy] * len(self.prompts)
                replies = sample_sequences(
                    self._engine, self.prompts, args.new_tokens, owners, num_samples=args.group_size
                )
            else:
                for dialogue, seen in zip(dialogues, self.observed[turn], strict=True):
                    dialogue.add(seen, None)
                owners = [policy] * len(dialogues)
                replies = sample_sequences(self._engine, [d.ids for d in dialogues], args.new_tokens, owners)
            for dialogue, reply in zip(dialogues, replies, strict=True):
                dialogue.add(reply.tokens, reply.logprobs)
        return dialogues

    def train(self, played: Sequence[PlayedDialogue]) -> None:
        """Make one update, in which half of the dialogues are better than the others."""
        datums = [dialogue.to_datum(1.0 if index % 2 else -1.0) for index, dialogue in enumerate(played)]
        finish(self._engine.forward_backward(self.adapter, datums, "importance_sampling", None))
        self._engine.optim_step(self.adapter, AdamParams(learning_rate=1e-5))

    def _timed(self, name: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = work()
        self._engine.wait()
        self.seconds[name].append(time.perf_counter() - start)
        return result


def memory_split(engine: Engine, adapter: LoraAdapter, merged: dict[str, Tensor], peak: float) -> dict[str, float]:
    """GiB by purpose. The extra memory of a training pass can only be measured on a GPU."""
    own = [layer for layer, keys in enumerate(engine.model.kv_shape.keys) if keys.source == layer]
    cache = [side for layer in own for side in engine.sampler.cache.layer(layer)]
    frozen = [*engine.model.body.parameters(), engine.model.head.weight]
    split = {
        "weights_gib": _gib([*frozen, *(group.weight for group in engine.model.groups)]),
        "merged_gib": _gib(merged.values()),
        "kv_cache_gib": _gib(cache),
        "adapter_gib": adapter.num_bytes / GIB,
    }
    if engine.device.type == "cuda":
        split["pass_gib"] = peak - sum(split.values())
    return split


def _gib(tensors: Iterable[Tensor]) -> float:
    """The size of the tensors' storages. A storage counts once, because many tensors are views of the same one."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in tensors)}
    return sum(storages.values()) / GIB
