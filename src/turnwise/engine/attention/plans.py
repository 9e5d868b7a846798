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
from turnwise.engine.ops.interface import AttentionOps, AttentionRule, CacheSlots, Saved
from turnwise.engine.ops.torch_attention import sink_gradients
from turnwise.engine.sampling.kvcache import KvCache
from turnwise.errors import ModelError

ATTENTION_NAME = "turnwise"
MOST_WINDOW_KEYS = 1 << 18
"""Keys that one call over windows gathers; more nodes are a call of their own, so that the copies stay small."""


NO_WINDOW = 1 << 62
"""A window that is longer than any path."""


class AttentionPlan(Protocol):
    """How one forward pass computes its attention layers."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """query [1, H, N, D], key and value [1, Hkv, N, D] -> [1, N, H, D]."""
        ...


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface."""
    plan: AttentionPlan | None = kwargs.get("plan")
    if plan is None:
        raise ModelError(f"{type(module).__name__} does not pass its keyword arguments on to attention")
    layer = module.layer_idx
    assert isinstance(layer, int), "transformers numbers its attention layers"
    rule = AttentionRule(
        scale=kwargs["scaling"],
        window=kwargs.get("sliding_window") or None,
        softcap=kwargs.get("softcap") or None,
        sinks=kwargs.get("s_aux"),
    )
    return plan.attend(layer, query, key, value, rule), None


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


@dataclass(frozen=True, slots=True)
class WindowRun:
    """A node whose last token sees less than its whole path: its tokens attend causally to the end of that path."""

    rows: slice
    """The node's packed tokens."""
    keys: slice | Tensor
    """Packed tokens of the path that some row sees, in order; the node's own are the last of them."""

    def key_index(self, device: torch.device) -> slice | Tensor:
        return self.keys if isinstance(self.keys, slice) else self.keys.to(device)


@dataclass(frozen=True)
class TreePlan:
    """Attention of a packed forest, for forward and backward."""

    bounds: Sequence[int]
    """[nodes + 1] node i holds packed tokens [bounds[i], bounds[i + 1]); each attends to itself causally."""
    levels: Sequence[Sequence[Pair]]
    """Per depth, inner node -> all its descendants; the pairs of one level do not overlap."""

    @classmethod
    def of_parts(cls, parts: Sequence[Varlen]) -> TreePlan:
        """A forest that is known only on the device; kernels that work over `varlen` run it."""
        plan = cls((), ())
        plan.__dict__["_varlen"] = list(parts)
        return plan

    def attend(
        self,
        layer: int,  # noqa: ARG002 - every layer sees the same tree
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: AttentionRule,
    ) -> Tensor:
        if torch.is_grad_enabled() and query.requires_grad:
            return _TreeAttention.apply(query, key, value, rule.sinks, (self, rule))
        out, _ = for_device(query.device).attention.tree_forward(query, key, value, self, rule)
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

    def paths(self) -> list[list[tuple[int, int]]]:
        """Per node, the packed (start, stop) of its ancestors from the root down, and its own."""
        ends = {pair.k_start: pair.q_stop for level in self.levels for pair in level}
        found: list[list[tuple[int, int]]] = []
        path: list[tuple[int, int]] = []
        for start, stop in itertools.pairwise(self.bounds):
            while path and ends[path[-1][0]] <= start:
                path.pop()
            found.append([*path, (start, stop)])
            if start in ends:
                path.append((start, stop))
        return found

    def path_runs(self) -> list[WindowRun] | None:
        """Every node over the whole path to it; None if no node has another one before it."""
        return [_window_run(path, NO_WINDOW) for path in self.paths()] if self.levels else None

    def window_runs(self, window: int | None) -> list[WindowRun] | None:
        """The forest under a window; None if the window is at least as long as every path, and thus no window."""
        if window is None:
            return None
        known: dict[int, list[WindowRun] | None] = self.__dict__.setdefault("_window_runs", {})
        if window not in known:
            paths = self.paths()
            longest = max((sum(stop - start for start, stop in path) for path in paths), default=0)
            known[window] = None if longest <= window else [_window_run(path, window) for path in paths]
        return known[window]

    def window_varlen(self, window: int | None, device: torch.device) -> list[Varlen] | None:
        """`window_runs` as few variable-length calls, each over at most `MOST_WINDOW_KEYS` keys or one node."""
        runs = self.window_runs(window)
        if runs is None:
            return None
        known: dict[int | None, list[Varlen]] = self.__dict__.setdefault("_window_varlen", {})
        if window not in known:
            known[window] = _window_parts(runs, device)
        return known[window]

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


def _window_run(path: Sequence[tuple[int, int]], window: int) -> WindowRun:
    """The last node of a path, and what its first token sees of those before it."""
    start, stop = path[-1]
    parts, missing = [(start, stop)], window - 1
    for first, last in reversed(path[:-1]):
        if missing <= 0:
            break
        parts.append((max(first, last - missing), last))
        missing -= last - first
    parts.reverse()
    if all(a[1] == b[0] for a, b in itertools.pairwise(parts)):
        return WindowRun(slice(start, stop), slice(parts[0][0], stop))
    return WindowRun(slice(start, stop), torch.from_numpy(np.concatenate([np.arange(*part) for part in parts])))


def _window_parts(runs: Sequence[WindowRun], device: torch.device) -> list[Varlen]:
    groups: list[list[tuple[np.ndarray, np.ndarray]]] = [[]]
    num_keys = 0
    for run in runs:
        keys = np.arange(run.keys.start, run.keys.stop) if isinstance(run.keys, slice) else run.keys.numpy()
        if groups[-1] and num_keys + len(keys) > MOST_WINDOW_KEYS:
            groups.append([])
            num_keys = 0
        groups[-1].append((np.arange(run.rows.start, run.rows.stop), keys))
        num_keys += len(keys)
    return [_window_part(group, is_all=len(groups) == 1, device=device) for group in groups]


def _window_part(nodes: Sequence[tuple[np.ndarray, np.ndarray]], *, is_all: bool, device: torch.device) -> Varlen:
    queries, keys = zip(*nodes, strict=True)
    lengths = [[len(one) for one in side] for side in (queries, keys)]
    bounds = [np.append(0, np.cumsum(side)).astype(np.int32) for side in lengths]
    arrays = [*bounds, np.concatenate(queries), np.concatenate(keys)]
    q_bounds, k_bounds, q_index, k_index = for_device(device).transfer.upload_all(arrays)
    return Varlen(
        q_bounds=q_bounds,
        k_bounds=k_bounds,
        max_q=max(lengths[0]),
        max_k=max(lengths[1]),
        num_pairs=sum(q * k for q, k in zip(*lengths, strict=True)),
        q_index=None if is_all else q_index,
        k_index=k_index,
    )


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
    def forward(ctx, query, key, value, sinks, plan_and_rule):
        # The sinks are the rule's; autograd sees only tensors that are arguments themselves.
        plan, rule = plan_and_rule
        out, logsumexp = for_device(query.device).attention.tree_forward(query, key, value, plan, rule)
        ctx.save_for_backward(query, key, value, out, logsumexp, sinks)
        ctx.plan, ctx.rule = plan, rule
        return out

    @staticmethod
    def backward(ctx, grad_out):
        *sides, sinks = ctx.saved_tensors
        saved = Saved(*sides)
        attention = for_device(grad_out.device).attention
        grad_sinks = None
        if ctx.needs_input_grad[3]:
            grad_sinks = sink_gradients(grad_out, saved.out, saved.logsumexp, sinks)
        return *attention.tree_backward(grad_out, saved, ctx.plan, ctx.rule), grad_sinks, None


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
    window: int | None = None
    """What a token of these layers sees; blocks before it may be gone."""
    has_drafts: bool = False
    """Whether some decode rows see the tokens of others: all keys must be written before a row attends."""

    def cache_slots(self, layer: int) -> CacheSlots:
        """The cache slots for this pass's keys and values of a layer."""
        keys, values = self.cache.layer(layer)
        return CacheSlots(keys.flatten(0, 1), values.flatten(0, 1), self.slots)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        self.cache.write(layer, self.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return self.attend_written(layer, (query, key, value), rule, for_device(query.device).attention)

    def attend_written(
        self, layer: int, sides: tuple[Tensor, Tensor, Tensor], rule: AttentionRule, attention: AttentionOps
    ) -> Tensor:
        """Like `attend`, after the pass's keys and values are in the cache."""
        query, key, value = sides
        if self.window is not None and (rule.window is None or rule.window > self.window):
            # The model's code and its config are read apart. Where they disagree, this would read freed blocks.
            raise ModelError(f"layer {layer} asks for window={rule.window}; its KV cache keeps {self.window} tokens")
        parts: list[Tensor] = []
        if self.num_decode:
            rows = query[0, :, : self.num_decode].transpose(0, 1)
            parts.append(attention.paged_decode(rows, self.cache.layer(layer), self, rule)[None])
        if self.chunks:
            parts.append(attention.prefill(query, key, value, self, layer, rule))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def keys_of(self, chunk: Chunk, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that some token of a chunk sees, [1, KV heads, tokens, D]; the chunk's own are the last."""
        if not chunk.num_cached:
            return key[:, :, chunk.start : chunk.stop], value[:, :, chunk.start : chunk.stop]
        return self.cache.read(layer, chunk.blocks, self.first_seen(chunk), self._stop(chunk))

    def first_seen(self, chunk: Chunk) -> int:
        """The first position of its sequence that a chunk sees."""
        return 0 if self.window is None else max(0, chunk.num_cached - self.window + 1)

    def prompts(self) -> tuple[np.ndarray, np.ndarray]:
        """[chunks, 5] int64, and the blocks of all chunks, end to end.

        Of each chunk: its first new token after the decode rows, its new tokens, the first position that they see, how
        many they see, and where its blocks begin.
        """
        if "_prompts" not in self.__dict__:
            held = [chunk.blocks for chunk in self.chunks]
            starts = np.cumsum([0, *map(len, held)])
            firsts = [self.first_seen(chunk) for chunk in self.chunks]
            lines = [
                (chunk.start - self.num_decode, chunk.stop - chunk.start, first, self._stop(chunk) - first, start)
                for chunk, first, start in zip(self.chunks, firsts, starts, strict=False)
            ]
            self.__dict__["_prompts"] = np.array(lines, dtype=np.int64), np.concatenate(held).astype(np.int64)
        return self.__dict__["_prompts"]

    def _stop(self, chunk: Chunk) -> int:
        """The length of a chunk's sequence with its new tokens."""
        return chunk.num_cached + chunk.stop - chunk.start

    def prefill_varlen(self) -> Varlen:
        """All chunks in one variable-length call; keys come from the cache when some chunk continues a sequence."""
        if self.varlen is not None:
            return self.varlen
        if "_varlen" not in self.__dict__:
            transfer = for_device(self.slots.device).transfer
            new = np.array([chunk.stop - chunk.start for chunk in self.chunks])
            cached = np.array([chunk.num_cached for chunk in self.chunks])
            firsts = np.array([self.first_seen(chunk) for chunk in self.chunks])
            seen = cached + new - firsts
            q_bounds, k_bounds = (np.append(0, np.cumsum(n)).astype(np.int32) for n in (new, seen))
            sizes = int(new.max()), int(seen.max()), int((new * (2 * seen - new)).sum()) // 2
            if cached.any():
                blocks = [chunk.blocks for chunk in self.chunks]
                spans = make_spans(firsts, seen, [len(b) for b in blocks])
                q, k, lines, held = transfer.upload_all([q_bounds, k_bounds, spans, np.concatenate(blocks)])
                _, k_index = span_slots(lines, held, int(k_bounds[-1]), self.cache.block_size)
                varlen = Varlen(q, k, *sizes, k_index=k_index)
            else:
                bounds = transfer.upload(q_bounds)
                varlen = Varlen(bounds, bounds, *sizes)
            self.__dict__["_varlen"] = varlen
        return self.__dict__["_varlen"]


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """A sampler step of a model whose layers differ in what they keep: one plan for each group of layers."""

    plans: Sequence[PagedPlan]
    group_of: Sequence[int]
    """[layers] the plan of each layer."""

    def of_layer(self, layer: int) -> PagedPlan:
        return self.plans[self.group_of[layer]]

    def cache_slots(self, layer: int) -> CacheSlots:
        return self.of_layer(layer).cache_slots(layer)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        return self.of_layer(layer).attend(layer, query, key, value, rule)

    def attend_written(
        self, layer: int, sides: tuple[Tensor, Tensor, Tensor], rule: AttentionRule, attention: AttentionOps
    ) -> Tensor:
        return self.of_layer(layer).attend_written(layer, sides, rule, attention)


def join_plans(plans: Sequence[PagedPlan], group_of: Sequence[int]) -> PagedPlan | GroupedPlan:
    """The plan of a step; almost every model has one group of layers."""
    return plans[0] if len(plans) == 1 else GroupedPlan(plans, group_of)


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
