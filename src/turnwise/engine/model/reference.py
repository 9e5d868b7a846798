"""What plain transformers makes of a few tokens, before we replace anything in the model: the self-test's other side.

The weights are those that were loaded, so nothing is in memory twice. The reference is computed in float32: a model in
bfloat16 has one layer at a time in float32. It is then run once more in bfloat16, which says how much of a difference
is rounding.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from turnwise.engine.model.trace import LAST_NORM, Trace, find_layers, traced
from turnwise.models.facts import LANGUAGE_MODEL

LENGTHS = (14, 10, 8)
NUM_SHARED = 5
"""The second sequence begins with this many tokens of the first."""


END_LENGTH = 11
"""Tokens of each sequence that stands at the end of the context."""


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """The positions at which the sequences of a run begin."""

    position: int = 0
    """The position of their first token, which tells transformers how long they are."""
    table_row: int = 0
    """The row of our table of angles for that position."""


@dataclass(frozen=True, slots=True)
class PlainRun:
    """The outputs of all sequences, one after the other, each run alone."""

    trace: Trace
    logits: Tensor
    """[tokens, V] float32"""


@dataclass(frozen=True, slots=True)
class Reference:
    """The sequences of the self-test, and what transformers computes for them."""

    sequences: Sequence[Sequence[int]]
    exact: PlainRun
    """The run in float32."""
    rounded: PlainRun | None
    """The run in the model's own dtype; None if that is float32."""
    seconds: float
    """How long transformers took."""
    start: SequenceStart = SequenceStart()


def language_model(model: PreTrainedModel) -> nn.Module:
    """The part without a head that reads text."""
    return getattr(model.base_model, LANGUAGE_MODEL, model.base_model)


def make_sequences(vocab_size: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """About 32 tokens in three sequences; two share their beginning."""
    rng = np.random.default_rng(0)
    first, second, third = (rng.integers(0, vocab_size, length).tolist() for length in lengths)
    return [first, [*first[:NUM_SHARED], *second[NUM_SHARED:]], third]


def run_plainly(model: PreTrainedModel, start: SequenceStart | None = None) -> Reference:
    """Run the sequences through transformers' own modelling code; the model is then as it was.

    With `start`, they stand at the end of the context, so that transformers takes the angles of long sequences.
    """
    began = time.perf_counter()
    lengths = LENGTHS if start is None else (END_LENGTH,) * 3
    start = start or SequenceStart()
    sequences = make_sequences(int(model.config.get_text_config().vocab_size), lengths)
    rounded = None
    with torch.no_grad(), _own_code(model):
        if model.dtype is torch.float32:
            exact = _run(model, sequences, start.position)
        else:
            rounded = _run(model, sequences, start.position)
            with _in_float32(model):
                exact = _run(model, sequences, start.position)
    return Reference(sequences, exact, rounded, time.perf_counter() - began, start)


@contextmanager
def _own_code(model: PreTrainedModel) -> Iterator[None]:
    """Let transformers compute attention and experts itself."""
    attention, experts = str(model.config._attn_implementation), model.config._experts_implementation
    model.set_attn_implementation("eager")
    if experts is not None:
        model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(attention)
        if experts is not None:
            model.set_experts_implementation(experts)


def _run(model: Any, sequences: Sequence[Sequence[int]], first: int) -> PlainRun:
    trace, logits = Trace(), []
    with traced(language_model(model), model.config.get_text_config().num_hidden_layers, trace):
        handle = language_model(model).register_forward_hook(
            lambda _module, _args, output: trace.add(LAST_NORM, output.last_hidden_state)
        )
        try:
            for ids in sequences:
                tokens = torch.tensor([ids], device=model.device)
                placed = {"position_ids": torch.arange(first, first + len(ids), device=model.device)[None]}
                out = model(tokens, use_cache=False, return_dict=True, **(placed if first else {}))
                logits.append(out.logits[0].float())
        finally:
            handle.remove()
    return PlainRun(trace, torch.cat(logits))


@contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Let every layer compute in float32: its weights are widened before it runs and are as they were after it."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    layers = find_layers(language_model(model), model.config.get_text_config().num_hidden_layers)
    apart = {id(module) for layer in layers for module in layer.modules()} | {id(module) for module in embeddings}
    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    others = [module for module in leaves if id(module) not in apart]
    narrow: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def widen(module: nn.Module, *_: Any) -> None:
        tensors = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
        narrow[id(module)] = [(tensor, tensor.data) for tensor in tensors]
        for tensor in tensors:
            tensor.data = tensor.data.float()

    def restore(module: nn.Module, *_: Any) -> None:
        for tensor, before in narrow.pop(id(module), []):
            tensor.data = before

    handles: list[Any] = [one.register_forward_hook(lambda _m, _a, out: out.float()) for one in embeddings]
    for module in (*layers, *others):
        handles += [module.register_forward_pre_hook(widen), module.register_forward_hook(restore, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
