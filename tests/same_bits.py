"""Samples dialogues and compares the bits of their logprobs with the trainer's (`engine.bitwise`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from naive import displaced_adapter, random_ids, run, sample_many
from turnwise.engine.engine import Engine
from turnwise.engine.training.trainable import LoraAdapter
from turnwise.types import Datum, ModelInput, SampledSequence

Sampled = tuple[list[int], SampledSequence]
"""A prompt and what was sampled after it."""


def trained(engine: Engine, adapter: LoraAdapter, sampled: Sequence[Sampled], temperature: float = 1.0) -> list[bytes]:
    """The bits of the trainer's logprobs, from one packed batch over all sequences."""
    datums = []
    for prompt, sequence in sampled:
        ids = [*prompt, *sequence.tokens]
        columns = {"target_tokens": ids[1:], "temperature": [temperature or 1.0] * (len(ids) - 1)}
        datums.append(Datum(ModelInput.from_ints(ids[:-1]), columns))
    outputs = run(engine.forward(adapter, datums, "cross_entropy", None)).loss_fn_outputs
    return [
        out["logprobs"].to_numpy()[len(prompt) - 1 :].astype(np.float32).tobytes()
        for out, (prompt, _) in zip(outputs, sampled, strict=True)
    ]


def bits(sampled: Sequence[Sampled]) -> list[bytes]:
    return [np.array(sequence.logprobs, dtype=np.float32).tobytes() for _, sequence in sampled]


def prompts_of(count: int) -> list[list[int]]:
    """Prompts of many lengths; some share a beginning, so that the trainer packs a tree."""
    shared = random_ids(37, 99)
    return [(shared if i % 3 == 0 else []) + random_ids(3 + 11 * i % 50, i) for i in range(count)]


def play(engine: Engine, count: int, turns: int, temperature: float = 1.0) -> tuple[LoraAdapter, list[list[Sampled]]]:
    """Dialogues whose later turns find the earlier ones in the prefix cache; returns what each turn sampled."""
    adapter = displaced_adapter(engine, rank=6)  # its scale is no power of two
    policy = engine.publish(adapter)
    histories, found = prompts_of(count), []
    for turn in range(turns):
        replies = sample_many(
            engine, [(h, policy) for h in histories], max_tokens=9, temperature=temperature, seed=turn
        )
        sampled = [(history, reply.sequences[0]) for history, reply in zip(histories, replies, strict=True)]
        found.append(sampled)
        histories = [[*h, *s.tokens, *random_ids(5, 70 + i)] for i, (h, s) in enumerate(sampled)]
    return adapter, found
