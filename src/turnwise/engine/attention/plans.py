"""Attention behind one interface: training over a prefix tree, prefill and decode over a paged KV cache.

transformers' modelling code calls `attention_forward` for every layer (registered as "turnwise"); the plan that the
engine passed to the model says what to do. Tokens are packed: batch 1, no padding.

A prefix tree is laid out in preorder, so a node's descendants follow it directly. A token attends to its own node
causally and to every ancestor node fully. Each of those is a dense, unmasked attention over slices; partial results
are merged by their log-sum-exp. Backward needs no merge: with the merged output and log-sum-exp every part's
gradient is exact on its own, since the softmax of the whole row is exp(score - logsumexp).

Shape legend: N packed tokens, H query heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from turnwise.engine.ops import for_device
from turnwise.engine.ops.interface import CacheSlots, Saved
from turnwise.engine.sampling.kvcache import KvCache
from turnwise.errors import ModelError

ATTENTION_NAME = "turnwise"


class AttentionPlan(Protocol):
    """How one forward pass computes its attention layers."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [1, H, N, D], key and value [1, Hkv, N, D] -> [1, N, H, D]."""
        ...


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface. It refuses every option that would change the result and is not supported."""
    plan: AttentionPlan | None = kwargs.get("plan")
    if plan is None:
        raise ModelError(f"{type(module).__name__} does not pass its keyword arguments on to attention")
    for option in ("softcap", "s_aux", "sliding_window"):
        if kwargs.get(option) is not None:
            raise ModelError(f"{type(module).__name__} asks for {option}={kwargs[option]}, which is not supported")
    layer = module.layer_idx
    assert isinstance(layer, int), "transformers numbers its attention layers"
    return plan.attend(layer, query, key, value, kwargs["scaling"]), None


AttentionInterface.register(ATTENTION_NAME, attention_forward)


@dataclass(frozen=True, slots=True)
class Pair:
    """Queries [q_start, q_stop) attend to all keys [k_start, k_stop)."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int

    def shifted(self, by: int) -> Pair:
        return Pair(self.q_start + by, self.q_stop + by, self.k_start + by, self.k_stop + by)


@dataclass(frozen=True, slots=True)
class EqualNodes:
    """`count` neighbouring nodes of `length` tokens each."""

    start: int
    count: int
    length: int


@dataclass(frozen=True, slots=True)
class Varlen:
    """Many attentions in one variable-length call: query and key runs of each, end to end."""

    q_bounds: Tensor
    """[runs + 1] int32"""
    k_bounds: Tensor
    max_q: int
    max_k: int
    num_pairs: int
    """The amount of work: queries times the keys that they see, summed over all runs."""
    q_index: Tensor | None = None
    """Packed tokens of the queries; None means all tokens in order."""
    k_index: Tensor | None = None


@dataclass(frozen=True)
class TreePlan:
    """Attention of a packed forest, for forward and backward."""

    bounds: Sequence[int]
    """[nodes + 1] node i holds packed tokens [bounds[i], bounds[i + 1]); each attends to itself causally."""
    levels: Sequence[Sequence[Pair]]
    """Per depth, inner node -> all its descendants; the pairs of one level do not overlap."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:  # noqa: ARG002
        if torch.is_grad_enabled() and query.requires_grad:
            return _TreeAttention.apply(query, key, value, self, scale)
        out, _ = for_device(query.device).attention.tree_forward(query, key, value, self, scale)
        return out

    def slices(self) -> Iterator[tuple[slice, slice, bool]]:
        """(queries, keys, is causal) of every part; a token's own node comes before its ancestors."""
        for start, stop in itertools.pairwise(self.bounds):
            yield slice(start, stop), slice(start, stop), True
        for q, k in self.ancestors():
            yield q, k, False

    def ancestors(self) -> Iterator[tuple[slice, slice]]:
        """(descendants, node) of every inner node."""
        for pair in itertools.chain.from_iterable(self.levels):
            yield slice(pair.q_start, pair.q_stop), slice(pair.k_start, pair.k_stop)

    def equal_runs(self) -> Iterator[EqualNodes]:
        """All nodes; neighbours of the same length are together, because they can run as one batch."""
        nodes = itertools.pairwise(self.bounds)
        for length, run in itertools.groupby(nodes, key=lambda node: node[1] - node[0]):
            members = list(run)
            yield EqualNodes(members[0][0], len(members), length)

    def varlen(self, device: torch.device) -> list[Varlen]:
        """The same attention as few variable-length calls: one for all nodes on themselves, then one per level."""
        if "_varlen" not in self.__dict__:
            arrays = [np.array(self.bounds, dtype=np.int32)]
            for level in self.levels:
                arrays += _level_arrays(level)
            nodes, *uploaded = for_device(device).transfer.upload_all(arrays)
            lengths = np.diff(self.bounds)
            longest = int(lengths.max())
            parts = [Varlen(nodes, nodes, longest, longest, int((lengths**2).sum()) // 2)]
            for i, level in enumerate(self.levels):
                parts.append(_level_varlen(level, *uploaded[4 * i : 4 * i + 4]))
            self.__dict__["_varlen"] = parts
        return self.__dict__["_varlen"]


def _level_arrays(level: Sequence[Pair]) -> list[np.ndarray]:
    """Bounds of the concatenated query and key runs, and the packed tokens in them."""
    q_runs = [(pair.q_start, pair.q_stop) for pair in level]
    k_runs = [(pair.k_start, pair.k_stop) for pair in level]
    bounds = [np.cumsum([0, *(stop - start for start, stop in runs)], dtype=np.int32) for runs in (q_runs, k_runs)]
    return [*bounds, *(np.concatenate([np.arange(*run) for run in runs]) for runs in (q_runs, k_runs))]


def _level_varlen(
    level: Sequence[Pair], q_bounds: Tensor, k_bounds: Tensor, q_index: Tensor, k_index: Tensor
) -> Varlen:
    lengths = [(pair.q_stop - pair.q_start, pair.k_stop - pair.k_start) for pair in level]
    return Varlen(
        q_bounds=q_bounds,
        k_bounds=k_bounds,
        max_q=max(queries for queries, _ in lengths),
        max_k=max(keys for _, keys in lengths),
        num_pairs=sum(queries * keys for queries, keys in lengths),
        q_index=q_index,
        k_index=k_index,
    )


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, plan, scale):
        out, logsumexp = for_device(query.device).attention.tree_forward(query, key, value, plan, scale)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx, grad_out):
        saved = Saved(*ctx.saved_tensors)
        attention = for_device(grad_out.device).attention
        return *attention.tree_backward(grad_out, saved, ctx.plan, ctx.scale), None, None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Packed tokens [start, stop) are new tokens of one sequence whose first `num_cached` tokens are in the cache."""

    start: int
    stop: int
    num_cached: int
    blocks: np.ndarray
    """The sequence's block ids."""


@dataclass(frozen=True)
class PagedPlan:
    """Attention of one sampler step: decode rows first, one token each, then chunks of prompts."""

    cache: KvCache
    slots: Tensor
    """[N] where each token's key and value go: block * block_size + offset."""
    num_decode: int
    block_table: Tensor
    """[num_decode, max blocks] int32"""
    context_lens: Tensor
    """[num_decode] int32, the current token included."""
    max_context: int
    chunks: Sequence[Chunk]
    varlen: Varlen | None = None
    """The result of `prefill_varlen`, if it is known only on the device."""

    def cache_slots(self, layer: int) -> CacheSlots:
        """The cache slots for this pass's keys and values of a layer."""
        keys, values = self.cache.layer(layer)
        return CacheSlots(keys.flatten(0, 1), values.flatten(0, 1), self.slots)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.cache.write(layer, self.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return self.attend_written(layer, query, key, value, scale)

    def attend_written(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Like `attend`, after the pass's keys and values are in the cache."""
        attention = for_device(query.device).attention
        parts: list[Tensor] = []
        if self.num_decode:
            rows = query[0, :, : self.num_decode].transpose(0, 1)
            parts.append(attention.paged_decode(rows, self.cache.layer(layer), self, scale)[None])
        if self.chunks:
            parts.append(attention.prefill(query, key, value, self, layer, scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def prefill_varlen(self) -> Varlen:
        """All chunks in one variable-length call; keys come from the cache when some chunk continues a sequence."""
        if self.varlen is not None:
            return self.varlen
        if "_varlen" not in self.__dict__:
            transfer = for_device(self.slots.device).transfer
            new = np.array([chunk.stop - chunk.start for chunk in self.chunks])
            cached = np.array([chunk.num_cached for chunk in self.chunks])
            q_bounds, k_bounds = (np.append(0, np.cumsum(n)).astype(np.int32) for n in (new, cached + new))
            sizes = int(new.max()), int((cached + new).max()), int((new * (2 * cached + new)).sum()) // 2
            if cached.any():
                blocks = [chunk.blocks for chunk in self.chunks]
                spans = make_spans(np.zeros_like(new), cached + new, [len(b) for b in blocks])
                q, k, lines, held = transfer.upload_all([q_bounds, k_bounds, spans, np.concatenate(blocks)])
                _, k_index = span_slots(lines, held, int(k_bounds[-1]), self.cache.block_size)
                varlen = Varlen(q, k, *sizes, k_index=k_index)
            else:
                bounds = transfer.upload(q_bounds)
                varlen = Varlen(bounds, bounds, *sizes)
            self.__dict__["_varlen"] = varlen
        return self.__dict__["_varlen"]


def make_spans(firsts: np.ndarray, lengths: np.ndarray, num_blocks: Sequence[int]) -> np.ndarray:
    """[3, spans] int64 for `span_slots`: `lengths` positions of each sequence from `firsts` on, all laid end to end.

    Per span: its length, the offset from an index in that line to a position, and where its sequence's blocks begin.
    """
    starts, first_blocks = np.cumsum(lengths) - lengths, np.cumsum(num_blocks) - num_blocks
    return np.stack([lengths, firsts - starts, first_blocks]).astype(np.int64)


def span_slots(spans: Tensor, blocks: Tensor, num_tokens: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Positions and cache slots [num_tokens] of spans of sequences whose `blocks` stand end to end.

    Computed where the tensors are: a device needs the blocks alone, not a number for each of many thousand tokens.
    """
    lengths, shifts, first_blocks = spans
    owners = torch.repeat_interleave(lengths, output_size=num_tokens)
    positions = torch.arange(num_tokens, device=spans.device) + shifts[owners]
    held = blocks[first_blocks[owners] + positions // block_size]
    return positions, held * block_size + positions % block_size
