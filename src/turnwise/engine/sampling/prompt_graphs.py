"""A pass over a few prompts as a captured CUDA graph: the next turns of dialogues, some tokens each.

A dialogue with short turns has such a pass before every reply. To launch it kernel by kernel takes the host ten times
as long as the card needs for it, and holds Python's lock, which the rollout needs. Here it is one launch.
A graph is captured per `PromptShape`, when a shape comes for the second time. Padding belongs to no prompt and is
written to a scratch block. A pass that keeps the card busy for longer than the launches take is not captured.

Shape legend: N tokens, R runs (one per prompt), K keys that the runs see, each of a shape and thus padded.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from turnwise.engine.attention.plans import Chunk, PagedPlan, Varlen
from turnwise.engine.model.load import CausalModel
from turnwise.engine.model.lora import Route
from turnwise.engine.ops.interface import Captured, padded_size
from turnwise.engine.sampling.graphs import StepGraphs
from turnwise.engine.sampling.inputs import join, next_uniforms
from turnwise.engine.sampling.kvcache import KvCache
from turnwise.engine.sampling.requests import Piece

log = logging.getLogger(__name__)

MOST_OPERATIONS = 2e12
"""Operations of a padded pass that a large card computes in the time that the host needs to launch the pass."""
MOST_TOKENS, MOST_KEYS = 8192, 1 << 16
NUM_SEEN = 2
"""A shape is captured when it has come this many times."""
NUM_COLUMNS = 7
"""Per run, and for what pads them: end of its tokens and of its keys (both after a 0), what turns a place among the
tokens into a position, its first block, lane, temperature, uniform; the last two as bits of a float32."""
LANE = 4
_NOBODY = np.zeros(0, dtype=np.int64)


class PromptShape(NamedTuple):
    """What is built into a graph; few values of each, so that few graphs serve a run."""

    tokens: int
    runs: int
    longest: int
    """Tokens of one run, at most."""
    keys: int
    draws: bool
    """True: it draws the token after each run. False: it ends with the hidden states."""

    @classmethod
    def of(cls, pieces: Sequence[Piece], *, draws: bool) -> PromptShape:
        lengths = [piece.stop - piece.start for piece in pieces]
        return cls(
            tokens=padded_size(sum(lengths), 64, 2),
            runs=padded_size(len(pieces), 16, 4),
            longest=padded_size(max(lengths), 128, 4),
            keys=padded_size(sum(piece.stop for piece in pieces), 1024, 4),
            draws=draws,
        )

    def num_blocks(self, block_size: int) -> int:
        """Blocks that hold the keys of all runs; each run may fill its last block only in part."""
        return self.keys // block_size + self.runs

    def input_size(self, block_size: int) -> int:
        return self.tokens + NUM_COLUMNS * (self.runs + 1) + self.num_blocks(block_size)

    def views(self, inputs: Any, block_size: int) -> tuple[Any, Any, Any]:
        """Tokens [N], columns [7, R + 1] and blocks, of an array or of a tensor."""
        columns = inputs[self.tokens :][: NUM_COLUMNS * (self.runs + 1)].reshape(NUM_COLUMNS, self.runs + 1)
        return inputs[: self.tokens], columns, inputs[len(inputs) - self.num_blocks(block_size) :]


class Found(NamedTuple):
    """A graph that takes a pass."""

    shape: PromptShape
    captured: Captured


class PromptGraphs(StepGraphs):
    """Captured lazily, per shape and weights."""

    def __init__(self, model: CausalModel, cache: KvCache, scratch_blocks: Sequence[int], last_tokens: Tensor) -> None:
        super().__init__(model, cache, scratch_blocks, last_tokens)
        (self.scratch_slot,) = self.scratch_slots
        self._seen: Counter[PromptShape] = Counter()
        self._is_full = False
        sizes = model.sizes
        heads = 2 * (sizes.query_size + sizes.key_size)
        token_operations = 2 * sizes.num_layers * sizes.hidden_size * (heads + 3 * sizes.active_inner_size)
        self._most_tokens = min(MOST_TOKENS, int(MOST_OPERATIONS / token_operations))

    def are_few(self, pieces: Sequence[Piece]) -> bool:
        """A quick check: False means that no graph can take these pieces."""
        return sum(piece.stop - piece.start for piece in pieces) <= self._most_tokens

    def find(self, pieces: Sequence[Piece], route: Route, *, draws: bool) -> Found | None:
        """The graph for these pieces. None means: launch one kernel after the other."""
        shape = PromptShape.of(pieces, draws=draws)
        if shape.tokens > self._most_tokens or shape.keys > MOST_KEYS or self._is_full:
            return None
        self._seen[shape] += 1
        if self._seen[shape] < NUM_SEEN:
            return None
        try:
            return Found(shape, self._get(shape, route))
        except torch.OutOfMemoryError:
            log.warning("no memory is left to capture passes over prompts: they are launched kernel by kernel, slower")
            self._is_full = True
            return None

    def replay(self, found: Found, pieces: Sequence[Piece]) -> Tensor:
        """Valid until the next pass: hidden states [N, H] of the pieces end to end, or tokens and logprobs [2, R].

        With `draws`, every piece is the last of its row, and the row has its lane.
        """
        found.captured.inputs.copy_(self._pack(pieces, found.shape), non_blocking=True)
        found.captured.replay()
        return found.captured.outputs

    def _get(self, shape: PromptShape, route: Route) -> Captured:
        def make_inputs() -> Tensor:
            """Inputs without any prompt; drawn tokens go to a lane that nobody reads."""
            size = self.cache.block_size
            inputs = torch.zeros(shape.input_size(size), dtype=torch.int64, device=self.model.device)
            _, columns, _ = shape.views(inputs, size)
            columns[LANE] = self.scratch_lane
            return inputs

        return self.captures.get(shape, route, make_inputs, lambda inputs: self._pass(shape, inputs, route))

    def _pack(self, pieces: Sequence[Piece], shape: PromptShape) -> Tensor:
        """The pass's inputs in pinned memory."""
        size, count = self.cache.block_size, len(pieces)
        packed = self.model.ops.transfer.host_buffer(shape.input_size(size), torch.int64).zero_()
        tokens, columns, blocks = shape.views(packed.numpy(), size)
        starts = np.array([piece.start for piece in pieces])
        stops = np.array([piece.stop for piece in pieces])
        num_blocks = -(-stops // size)
        ends, key_ends = np.cumsum(stops - starts), np.cumsum(stops)
        tokens[: ends[-1]] = join([piece.row.tokens[piece.start : piece.stop] for piece in pieces])
        columns[:2, 1 : count + 1] = ends, key_ends
        columns[:2, count + 1 :] = columns[:2, count : count + 1]
        columns[2, :count] = stops - ends
        columns[3, :count] = np.cumsum(num_blocks) - num_blocks
        held = join([piece.row.blocks[:held] for piece, held in zip(pieces, num_blocks.tolist(), strict=True)])
        blocks[: len(held)] = held
        if shape.draws:
            rows = [piece.row for piece in pieces]
            columns[LANE] = self.scratch_lane
            columns[LANE, :count] = [row.lane for row in rows]
            temperatures = np.array([row.request.params.temperature for row in rows], dtype=np.float32)
            columns[5, :count] = temperatures.view(np.int32)
            columns[6, :count] = next_uniforms(rows).view(np.int32)
        return packed

    def _pass(self, shape: PromptShape, inputs: Tensor, route: Route) -> Tensor:
        size = self.cache.block_size
        tokens, columns, blocks = shape.views(inputs, size)
        q_bounds, k_bounds, shifts, first_blocks, lanes, temperatures, drawn = columns

        def places(count: int, bounds: Tensor, shifts: Tensor) -> tuple[Tensor, Tensor]:
            """Positions and slots of tokens or keys. Padding has position 0 and the scratch block."""
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
        hidden = self.model.hidden(tokens, positions, plan, route)
        if not shape.draws:
            return hidden
        lasts = (q_bounds[1:] - 1).clamp_min(0)
        logits = self.model.logits(hidden[lasts], route)
        return self.draw_to_lanes(logits, temperatures[:-1].int(), drawn[:-1].int(), lanes[:-1])
