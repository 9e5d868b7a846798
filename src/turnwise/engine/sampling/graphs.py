"""CUDA graphs, and a decode step as one: one launch for the whole model, the head and the draw.

Eager decode spends its time on launching kernels, not on the card. A graph is captured per bucket of rows, with static
inputs that each step copies into; rows that pad a bucket write to a scratch block. A graph reads weights in place, so
merging a new policy into the same buffers needs no new capture. A row's last token never leaves the device: the graph
reads it from the row's lane and writes the next one there, so the host can launch a step before it has seen the tokens
of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from turnwise.engine.attention.plans import PagedPlan, join_plans
from turnwise.engine.model.load import CausalModel
from turnwise.engine.model.lora import Route
from turnwise.engine.model.lora_bank import count_tiles, make_tiles
from turnwise.engine.ops.interface import Captured, DrawSettings, GraphRecorder
from turnwise.engine.sampling.inputs import block_table, uniforms
from turnwise.engine.sampling.kvcache import KvCache
from turnwise.engine.sampling.requests import Ahead, Row

MIN_WIDTH = 16
NUM_COLUMNS = 4
"""Per row: lane, position, temperature, uniform (the last two as bits of a float32); then a slot for each group of
layers."""


_Weights = tuple[str | int, ...]


class GraphCache:
    """Graphs by what is built into them: the shape of their inputs, and where the weights lie."""

    def __init__(self, recorder: GraphRecorder) -> None:
        self._recorder = recorder
        self._captured: dict[tuple[Hashable, _Weights], Captured] = {}
        self._merged_key: _Weights | None = None

    def __len__(self) -> int:
        return len(self._captured)

    def weights_moved(self) -> None:
        """A policy was merged, so its weights may have new addresses."""
        self._merged_key = None

    def has(self, shape: Hashable, route: Route) -> bool:
        return (shape, self.weights_key(route)) in self._captured

    def get(
        self, shape: Hashable, route: Route, make_inputs: Callable[[], Tensor], step: Callable[[Tensor], Tensor]
    ) -> Captured:
        """The graph of `step`. If there is none, capture it, and drop the graphs whose weights are gone."""
        weights = self.weights_key(route)
        if (shape, weights) not in self._captured:
            self._captured = {k: c for k, c in self._captured.items() if not _is_given_up(k[1], weights)}
            self._captured[shape, weights] = self._recorder.capture(make_inputs(), step)
        return self._captured[shape, weights]

    def weights_key(self, route: Route) -> _Weights:
        """What a graph has built in of a route: the addresses of the merged weights, or the layout of the banks."""
        if route.bank is not None:
            return "bank", route.bank.generation, _num_tiles(route)
        if route.full is not None:
            return "full", route.full.weights.flat.data_ptr()
        if route.merged is None:
            return ("base",)
        if self._merged_key is None:
            # By name: if two layers exchange their buffers, the addresses are the same, but the graph is wrong.
            places = (part for name in sorted(route.merged) for part in (name, route.merged[name].data_ptr()))
            self._merged_key = ("merged", *places)
        return self._merged_key


class StepGraphs:
    """What the graphs of a sampler's steps read and write besides their inputs."""

    def __init__(self, model: CausalModel, cache: KvCache, scratch_blocks: Sequence[int], last_tokens: Tensor) -> None:
        self.model = model
        self.cache = cache
        self.scratch_slots = [block * cache.block_size for block in scratch_blocks]
        """The slots for keys and values of padding, in each group of layers."""
        self.last_tokens = last_tokens
        """[lanes + 1] int64"""
        assert model.ops.new_graph_recorder is not None, "asked for where steps can be captured"
        self.captures = GraphCache(model.ops.new_graph_recorder())

    @property
    def scratch_lane(self) -> int:
        """The slot for the tokens of padding."""
        return len(self.last_tokens) - 1

    def draw_to_lanes(self, logits: Tensor, temperatures: Tensor, drawn: Tensor, lanes: Tensor) -> Tensor:
        """[2, rows] float32: token ids, which go to the rows' lanes too, and logprobs.

        Temperatures and random numbers come as the bits of a float32.
        """
        settings = DrawSettings(temperatures.view(torch.float32), drawn.view(torch.float32))
        tokens, logprobs = self.model.ops.draw(logits, settings)
        self.last_tokens.index_copy_(0, lanes, tokens)
        return torch.stack([tokens.float(), logprobs])


@dataclass(slots=True)
class _Batch:
    """The rows of the last step, as arrays that a step with the same rows only counts up."""

    rows: list[Row]
    bucket: int
    width: int
    lanes: np.ndarray
    positions: np.ndarray
    temperatures: np.ndarray
    seeds: np.ndarray
    samples: np.ndarray
    num_sampled: np.ndarray
    tables: list[np.ndarray]
    """The rows' block tables, for each group of layers."""

    @staticmethod
    def of(rows: Sequence[Row], least_drafted: int) -> _Batch:
        """`least_drafted`: rows of the smallest graph that may run drafts."""
        width = table_width(max(len(row.blocks) for row in rows))
        has_drafts = any(isinstance(row, Ahead) for row in rows)
        return _Batch(
            rows=list(rows),
            bucket=row_bucket(max(len(rows), least_drafted) if has_drafts else len(rows)),
            width=width,
            lanes=np.array([row.lane for row in rows], dtype=np.int32),
            positions=np.array([row.length - 1 for row in rows], dtype=np.int32),
            temperatures=np.array([row.request.params.temperature for row in rows], dtype=np.float32),
            seeds=np.array([row.request.seed for row in rows], dtype=np.uint64),
            samples=np.array([row.index for row in rows], dtype=np.uint64),
            num_sampled=np.array([row.num_sampled + row.num_pending for row in rows], dtype=np.uint64),
            tables=[
                block_table([row.tables[group].blocks for row in rows], width) for group in range(len(rows[0].tables))
            ],
        )

    def advance(self, block_size: int) -> bool:
        """Go one token further with the same rows; False if the block table is too narrow for it."""
        self.positions += 1
        self.num_sampled += np.uint64(1)
        if self.positions.max() >= self.width * block_size:
            return False
        for i in np.nonzero(self.positions % block_size == 0)[0].tolist():
            column = int(self.positions[i]) // block_size
            for table, own in zip(self.tables, self.rows[i].tables, strict=True):
                table[i, column] = own.blocks[column]
        return True


class DecodeGraphs(StepGraphs):
    """Captured lazily, per bucket of rows, table width, and weights."""

    def __init__(self, model: CausalModel, cache: KvCache, scratch_blocks: Sequence[int], last_tokens: Tensor) -> None:
        super().__init__(model, cache, scratch_blocks, last_tokens)
        self._num_groups = len(cache.windows)
        self._batch: _Batch | None = None
        self._least_drafted = 1
        few, dtype = model.ops.few_rows, model.activation_dtype
        while few is not None and few.takes(row_bucket(self._least_drafted), dtype):
            self._least_drafted *= 2  # the kernels for few rows attend before all keys are written

    def forget_rows(self) -> None:
        """Pack the rows anew for the next replay, because they moved on without one."""
        self._batch = None

    def decode(self, rows: Sequence[Row], route: Route) -> Tensor:
        """Launch one step; [2, rows] token ids and logprobs, valid until the next replay of the same graph."""
        batch = self._batch
        if batch is None or batch.rows != rows or not batch.advance(self.cache.block_size):
            batch = self._batch = _Batch.of(rows, self._least_drafted)
        captured = self._get(batch.bucket, batch.width, route)
        captured.inputs.copy_(self._pack(batch, route), non_blocking=True)
        captured.replay()
        return captured.outputs[:, : len(rows)]

    def _pack(self, batch: _Batch, route: Route) -> Tensor:
        """The step's inputs in pinned memory."""
        size, count, bucket = self.cache.block_size, len(batch.rows), batch.bucket
        num_tiles = _num_tiles(route)
        num_inputs = self._input_size(bucket, batch.width, num_tiles)
        packed = self.model.ops.transfer.host_buffer(num_inputs, torch.int32)
        array = packed.numpy()
        num_columns = NUM_COLUMNS + self._num_groups
        columns = array[: num_columns * bucket].reshape(num_columns, bucket)
        columns[:, count:] = np.array(self._padding(), dtype=np.int32)[:, None]
        columns[0, :count] = batch.lanes
        columns[1, :count] = batch.positions
        columns[2, :count] = batch.temperatures.view(np.int32)
        columns[3, :count] = uniforms(batch.seeds, batch.samples, batch.num_sampled).view(np.int32)
        tables = array[num_columns * bucket :][: self._num_groups * bucket * batch.width]
        for group, table in enumerate(tables.reshape(self._num_groups, bucket, batch.width)):
            blocks = batch.tables[group][np.arange(count), batch.positions // size]
            columns[NUM_COLUMNS + group, :count] = blocks * size + batch.positions % size
            table[:count] = batch.tables[group]
            table[count:] = 0
        if route.bank is not None:
            array[-3 * num_tiles :] = make_tiles(route.bank.runs, num_tiles).ravel()
        return packed

    def _padding(self) -> list[int]:
        """Columns of a row that only pads the batch."""
        ones, halves = np.array([1.0, 0.5], dtype=np.float32).view(np.int32).tolist()
        return [self.scratch_lane, 0, ones, halves, *self.scratch_slots]

    def _get(self, bucket: int, width: int, route: Route) -> Captured:
        def make_inputs() -> Tensor:
            size = self._input_size(bucket, width, _num_tiles(route))
            inputs = torch.zeros(size, dtype=torch.int32, device=self.model.device)
            columns, _, _ = self._views(inputs, bucket, width, route)
            columns.copy_(torch.tensor(self._padding(), dtype=torch.int32)[:, None])
            return inputs

        return self.captures.get(
            (bucket, width), route, make_inputs, lambda inputs: self._step(*self._views(inputs, bucket, width, route))
        )

    def missing(self, max_rows: int, num_blocks: int, route: Route) -> list[tuple[int, int]]:
        """(bucket, width) of the graphs that this many rows and blocks may need and that are not captured yet."""
        widths = sorted({table_width(count) for count in range(1, num_blocks + 1)})
        buckets = sorted({row_bucket(count) for count in range(1, max_rows + 1)})
        return [(b, w) for w in widths for b in buckets if not self.captures.has((b, w), route)]

    def capture(self, bucket: int, width: int, route: Route) -> None:
        """Capture graphs before they are needed; those that exist stay."""
        with torch.inference_mode():
            self._get(bucket, width, route)

    def _step(self, columns: Tensor, tables: Tensor, route: Route) -> Tensor:
        """[2, rows] float32: token ids, logprobs."""
        lanes, context_lens = columns[0].long(), columns[1] + 1
        plans = [
            PagedPlan(
                cache=self.cache,
                slots=columns[NUM_COLUMNS + group].long(),
                num_decode=len(table),
                block_table=table,
                context_lens=context_lens,
                max_context=table.shape[1] * self.cache.block_size,
                chunks=(),
                window=self.cache.windows[group],
            )
            for group, table in enumerate(tables)
        ]
        plan = join_plans(plans, self.cache.group_of)
        hidden = self.model.hidden(self.last_tokens[lanes], columns[1].long(), plan, route)
        return self.draw_to_lanes(self.model.logits(hidden, route), columns[2], columns[3], lanes)

    def _input_size(self, bucket: int, width: int, num_tiles: int) -> int:
        return bucket * (NUM_COLUMNS + self._num_groups * (1 + width)) + 3 * num_tiles

    def _views(self, inputs: Tensor, bucket: int, width: int, route: Route) -> tuple[Tensor, Tensor, Route]:
        """What `_pack` laid out: columns [4 + groups, rows], block tables [groups, rows, width], and the route that
        reads its tiles there."""
        num_columns = NUM_COLUMNS + self._num_groups
        columns = inputs[: num_columns * bucket].view(num_columns, bucket)
        tables = inputs[num_columns * bucket :][: self._num_groups * bucket * width]
        if route.bank is not None:
            num_tiles = _num_tiles(route)
            route = Route(bank=replace(route.bank, tiles=inputs[-3 * num_tiles :].view(3, num_tiles)))
        return columns, tables.view(self._num_groups, bucket, width), route


def _is_given_up(old: _Weights, new: _Weights) -> bool:
    """Whether a graph's weights are gone: its bank was replaced, or merged weights have other addresses now.

    Copies of all weights are used in turn, so the graphs of each of them stay.
    """
    if old[0] != new[0] or old[0] == "full":
        return False
    return old[1] != new[1] if old[0] == "bank" else old != new


def _num_tiles(route: Route) -> int:
    """Tiles of the graph. There are few sizes, so that few graphs are captured, and few of the tiles are empty."""
    return 0 if route.bank is None else _power_of_two(count_tiles([count for _, count, _ in route.bank.runs]))


def table_width(num_blocks: int) -> int:
    """Columns of the block table of a graph. There are few sizes, and even the smallest lasts for a while."""
    return max(MIN_WIDTH, _power_of_two(num_blocks))


def row_bucket(count: int) -> int:
    """Rows of the graph for `count` rows: powers of two up to 16, above that at most a quarter more than `count`."""
    power = _power_of_two(count)
    if power <= 16:
        return power
    step = power // 8
    return -(-count // step) * step


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
