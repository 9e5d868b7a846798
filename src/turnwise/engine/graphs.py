"""A decode step as a captured CUDA graph: one launch for the whole model, the head and the draw.

Eager decode is bound by launches, not by the card. A graph is captured per bucket of rows (powers of two), with
static inputs that each step copies into; rows that pad a bucket write to a scratch block. Weights are read where they
lie, so merging a new policy into the same buffers needs no new capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnwise.engine.attention import PagedPlan
from turnwise.engine.draw import DrawSettings, draw_torch, uniforms
from turnwise.engine.kvcache import KvCache
from turnwise.engine.lora import Route
from turnwise.engine.models import CausalModel
from turnwise.engine.scheduler import Row

WARMUPS = 2


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    integers: Tensor
    """[4, rows] int64: token, position, slot, context length."""
    floats: Tensor
    """[2, rows]: temperature, uniform."""
    table: Tensor
    """[rows, width] int32"""
    tokens: Tensor
    logprobs: Tensor


class DecodeGraphs:
    """Captured lazily, per bucket of rows, table width, and set of merged weights."""

    def __init__(self, model: CausalModel, cache: KvCache, scratch_block: int) -> None:
        self.model = model
        self.cache = cache
        self.scratch_slot = scratch_block * cache.block_size
        self._captured: dict[tuple[int, int, tuple[int, ...]], _Captured] = {}
        self._pool: Any = None

    def decode(self, rows: Sequence[Row], route: Route) -> tuple[list[int], list[float]]:
        """One token and its logprob for every row; no row may cut its tail."""
        size = self.cache.block_size
        bucket = _power_of_two(len(rows))
        width = _power_of_two(max(len(row.blocks) for row in rows))
        captured = self._get(bucket, width, route)
        integers = np.zeros((4, bucket), dtype=np.int64)
        integers[2], integers[3] = self.scratch_slot, 1
        table = np.zeros((bucket, width), dtype=np.int32)
        for i, row in enumerate(rows):
            position = len(row.tokens) - 1
            slot = row.blocks[position // size] * size + position % size
            integers[:, i] = row.tokens[-1], position, slot, position + 1
            table[i, : len(row.blocks)] = row.blocks
        floats = np.ones((2, bucket), dtype=np.float32)
        floats[0, : len(rows)] = [row.request.params.temperature for row in rows]
        noise = uniforms([r.request.seed for r in rows], [r.index for r in rows], [r.num_sampled for r in rows])
        floats[1, : len(rows)] = noise
        captured.integers.copy_(torch.from_numpy(integers))
        captured.floats.copy_(torch.from_numpy(floats))
        captured.table.copy_(torch.from_numpy(table))
        captured.graph.replay()
        return captured.tokens[: len(rows)].tolist(), captured.logprobs[: len(rows)].tolist()

    def _get(self, bucket: int, width: int, route: Route) -> _Captured:
        merged = tuple(sorted(tensor.data_ptr() for tensor in route.merged.values())) if route.merged else ()
        key = (bucket, width, merged)
        if key not in self._captured:
            self._captured[key] = self._capture(bucket, width, route)
        return self._captured[key]

    def _capture(self, bucket: int, width: int, route: Route) -> _Captured:
        device = self.model.device
        integers = torch.ones((4, bucket), dtype=torch.int64, device=device)
        integers[2] = self.scratch_slot
        floats = torch.ones((2, bucket), device=device) / 2
        table = torch.zeros((bucket, width), dtype=torch.int32, device=device)
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARMUPS):
                self._step(integers, floats, table, route)
        torch.cuda.current_stream(device).wait_stream(side)
        with torch.cuda.graph(graph, pool=self._pool):
            tokens, logprobs = self._step(integers, floats, table, route)
        self._pool = self._pool or graph.pool()
        return _Captured(graph, integers, floats, table, tokens, logprobs)

    def _step(self, integers: Tensor, floats: Tensor, table: Tensor, route: Route) -> tuple[Tensor, Tensor]:
        plan = PagedPlan(
            cache=self.cache,
            slots=integers[2],
            num_decode=len(table),
            block_table=table,
            context_lens=integers[3].to(torch.int32),
            max_context=table.shape[1] * self.cache.block_size,
            chunks=(),
        )
        hidden = self.model.hidden(integers[0], integers[1], plan, route)
        logits = self.model.head.apply_route(hidden, route)
        off = torch.zeros(len(table), device=logits.device)
        settings = DrawSettings(floats[0], off, off + 1, off, floats[1], is_cut=False)
        return draw_torch(logits, settings)


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
