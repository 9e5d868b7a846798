"""A pass over a few prompts as a captured CUDA graph: the next turns of dialogues, some tokens each.

A dialogue with short turns reads new tokens as often as it ends a reply. Launched kernel by kernel such a pass takes
the host ten times as long as the card, and holds Python's lock while the rollout would play on. Here it is one launch.
Graphs are captured per `PromptShape`, when a shape comes for the second time; what pads a shape belongs to no prompt
and is written to a scratch block. Passes whose products take the card longer than the host are not captured.

Shape legend: N tokens, R runs (one per prompt), K keys that the runs see, each of a shape and thus padded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from turnwise.engine.attention import Chunk, PagedPlan, Varlen
from turnwise.engine.graphs import Captures
from turnwise.engine.inputs import join
from turnwise.engine.kvcache import KvCache
from turnwise.engine.lora import Route
from turnwise.engine.models import CausalModel
from turnwise.engine.scheduler import Piece

MOST_OPERATIONS = 2e12
"""Of the products of a padded pass: what a large card does in the time that launching the pass takes."""
MOST_TOKENS, MOST_KEYS = 4096, 1 << 16
NUM_SEEN = 2
"""A shape is captured when it comes for this time."""
_NOBODY = np.zeros(0, dtype=np.int64)


class PromptShape(NamedTuple):
    """What is built into a graph; few values of each, so that few graphs serve a run."""

    tokens: int
    runs: int
    longest: int
    """Tokens of one run, at most."""
    keys: int

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> PromptShape:
        lengths = [piece.stop - piece.start for piece in pieces]
        return cls(
            tokens=_power(sum(lengths), 64, 2),
            runs=_power(len(pieces), 16, 4),
            longest=_power(max(lengths), 128, 4),
            keys=_power(sum(piece.stop for piece in pieces), 1024, 4),
        )

    def num_blocks(self, block_size: int) -> int:
        """Blocks that hold the keys of all runs; each run may have begun one, and reserved another."""
        return self.keys // block_size + 2 * self.runs

    def input_size(self, block_size: int) -> int:
        return self.tokens + 4 * (self.runs + 1) + self.num_blocks(block_size)


class PromptGraphs:
    """Captured lazily, per shape and weights."""

    def __init__(self, model: CausalModel, cache: KvCache, scratch_block: int) -> None:
        self.model = model
        self.cache = cache
        self.scratch_slot = scratch_block * cache.block_size
        self.captures = Captures(model.device)
        self._seen: Counter[PromptShape] = Counter()
        sizes = model.sizes
        heads = (2 * sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_size
        self._token_operations = 2 * sizes.num_layers * sizes.hidden_size * (heads + 3 * sizes.inner_size)

    def hidden(self, pieces: Sequence[Piece], route: Route) -> Tensor | None:
        """Last hidden states [N, H] of the pieces end to end, valid until the next pass; None: no graph takes them."""
        shape = PromptShape.of(pieces)
        operations = shape.tokens * self._token_operations
        if shape.tokens > MOST_TOKENS or shape.keys > MOST_KEYS or operations > MOST_OPERATIONS:
            return None
        self._seen[shape] += 1
        if self._seen[shape] < NUM_SEEN:
            return None
        size, device = shape.input_size(self.cache.block_size), self.model.device
        captured = self.captures.get(
            shape,
            route,
            lambda: torch.zeros(size, dtype=torch.int64, device=device),
            lambda inputs: self._pass(shape, inputs, route),
        )
        captured.inputs.copy_(self._pack(pieces, shape), non_blocking=True)
        captured.graph.replay()
        return captured.outputs

    def _pack(self, pieces: Sequence[Piece], shape: PromptShape) -> Tensor:
        """The pass's inputs in pinned memory: tokens, bounds of queries and keys, shifts, first blocks, blocks."""
        size, count = self.cache.block_size, len(pieces)
        packed = torch.zeros(shape.input_size(size), dtype=torch.int64, pin_memory=self.model.device.type == "cuda")
        array = packed.numpy()
        starts = np.array([piece.start for piece in pieces])
        stops = np.array([piece.stop for piece in pieces])
        num_blocks = np.array([-(-piece.stop // size) for piece in pieces])
        ends = np.cumsum(stops - starts)
        array[: ends[-1]] = join([piece.row.tokens[piece.start : piece.stop] for piece in pieces])
        columns = array[shape.tokens :][: 4 * (shape.runs + 1)].reshape(4, shape.runs + 1)
        columns[0, 1 : count + 1], columns[0, count + 1 :] = ends, ends[-1]
        key_ends = np.cumsum(stops)
        columns[1, 1 : count + 1], columns[1, count + 1 :] = key_ends, key_ends[-1]
        columns[2, :count] = starts - (ends - (stops - starts))
        columns[3, :count] = np.cumsum(num_blocks) - num_blocks
        blocks = join([piece.row.blocks[:held] for piece, held in zip(pieces, num_blocks.tolist(), strict=True)])
        array[len(array) - shape.num_blocks(size) :][: len(blocks)] = blocks
        return packed

    def _pass(self, shape: PromptShape, inputs: Tensor, route: Route) -> Tensor:
        size = self.cache.block_size
        tokens = inputs[: shape.tokens]
        columns = inputs[shape.tokens :][: 4 * (shape.runs + 1)].view(4, shape.runs + 1)
        q_bounds, k_bounds, shifts, first_blocks = columns
        blocks = inputs[len(inputs) - shape.num_blocks(size) :]

        def places(count: int, bounds: Tensor, shifts: Tensor) -> tuple[Tensor, Tensor]:
            """Positions and slots of tokens or keys; what pads them stands at 0 and in the scratch block."""
            index = torch.arange(count, device=inputs.device)
            owners = torch.searchsorted(bounds[1:], index, right=True)
            is_real = owners < shape.runs
            positions = (index + shifts[owners]) * is_real
            held = blocks[first_blocks[owners] + positions // size]
            return positions, torch.where(is_real, held * size + positions % size, self.scratch_slot)

        positions, slots = places(shape.tokens, q_bounds, shifts)
        _, k_index = places(shape.keys, k_bounds, -k_bounds)
        varlen = Varlen(
            q_bounds=q_bounds.int(),
            k_bounds=k_bounds.int(),
            max_q=shape.longest,
            max_k=shape.keys,
            num_pairs=0,
            k_index=k_index,
        )
        plan = PagedPlan(
            cache=self.cache,
            slots=slots,
            num_decode=0,
            block_table=inputs[:0],
            context_lens=inputs[:0],
            max_context=0,
            chunks=[Chunk(0, shape.tokens, 0, _NOBODY)],
            varlen=varlen,
        )
        return self.model.hidden(tokens, positions, plan, route)


def fits(model: CausalModel) -> bool:
    """Whether such a pass can be captured: our body, on the flash kernels."""
    from turnwise.engine.attention_cuda import fits_flash, has_triton

    is_cuda = model.device.type == "cuda" and model.fused is not None
    return is_cuda and has_triton() and fits_flash(model.dtype, model.sizes.head_size)


def _power(count: int, least: int, base: int) -> int:
    """The first of least, least * base, ... that is not below `count`."""
    value = least
    while value < count:
        value *= base
    return value
