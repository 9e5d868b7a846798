"""Passes of the trainer as captured graphs: the layers of a pass forward are one launch, and backward another.

A pass has some seventy launches a layer, and of a small model the device computes them faster than the host launches
them. So a pass is captured, per padded shape and adapter, when its shape comes for the second time. Padding is tokens
that nobody attends to and whose gradient is zero; it adds zero to the adapter's gradient. Between both graphs the head
and the loss run as always. A pass that keeps the device busy for longer than its launches take is not captured.

Shape legend: N packed tokens with padding, H hidden size, R rows that the head reads.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from turnwise.engine.attention.plans import Pair, TreePlan, Varlen
from turnwise.engine.model.body import FusedBody, KeptPass
from turnwise.engine.model.load import CausalModel
from turnwise.engine.model.lora import LoraWeights, Route
from turnwise.engine.ops.interface import Captured, padded_size
from turnwise.engine.training.pack import PackedBatch

log = logging.getLogger(__name__)

MOST_OPERATIONS = 1e12
"""Operations of one layer, forward and backward, that a large card computes in the time of its launches."""
MOST_SHARE = 8
"""Captured passes may keep this part of the memory for training."""
MOST_GRAPHS = 24
MOST_LEVELS = 3
NUM_SEEN = 2
"""A shape is captured when it has come this many times."""
EXACT_TOKENS = 4096
"""Longer passes are padded less: there the device's time counts."""
PAD_RUNS = 8
NUM_PADS = 2 * PAD_RUNS
"""Least padding of what a level of the tree gathers."""


class LevelShape(NamedTuple):
    """One level of a tree: queries attend to the keys of an ancestor."""

    runs: int
    queries: int
    keys: int
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, level: Sequence[Pair]) -> LevelShape:
        queries = [pair.q_stop - pair.q_start for pair in level]
        keys = [pair.k_stop - pair.k_start for pair in level]
        num_queries, num_keys = (padded_size(sum(each) + NUM_PADS, 128, 2) for each in (queries, keys))
        return cls(
            runs=padded_size(len(level) + NUM_PADS, 32, 4),
            queries=num_queries,
            keys=num_keys,
            longest_query=_longest(queries, num_queries),
            longest_key=_longest(keys, num_keys),
        )

    @property
    def size(self) -> int:
        return 2 * (self.runs + 1) + self.queries + self.keys


class PassShape(NamedTuple):
    """What is built into the graphs of a pass; few values of each, so that few graphs serve a run."""

    tokens: int
    nodes: int
    longest: int
    levels: tuple[LevelShape, ...]

    @classmethod
    def of(cls, batch: PackedBatch) -> PassShape:
        bounds, levels = batch.plan.bounds, batch.plan.levels
        tokens = token_bucket(batch.num_tokens + bool(levels))  # what levels pad is gathered from padding
        return cls(
            tokens=tokens,
            nodes=padded_size(len(bounds) - 1 + NUM_PADS, 32, 4),
            longest=_longest(np.diff(bounds).tolist(), tokens),
            levels=tuple(LevelShape.of(level) for level in levels),
        )

    @property
    def size(self) -> int:
        return 2 * self.tokens + self.nodes + 1 + sum(level.size for level in self.levels)

    def lay_out(self, batch: PackedBatch, inputs: np.ndarray) -> None:
        """Write the batch, padded, to `inputs` [size]: tokens, positions, bounds of nodes; then, level by level,
        bounds of queries and of keys, and which tokens they are."""
        inputs[:] = 0
        inputs[: batch.num_tokens] = batch.input_ids
        inputs[self.tokens :][: batch.num_tokens] = batch.position_ids
        lengths = [*np.diff(batch.plan.bounds).tolist(), *_shares(self.tokens - batch.num_tokens)]
        rest = inputs[2 * self.tokens :]
        rest[: self.nodes + 1] = _bounds(lengths, self.nodes)
        rest = rest[self.nodes + 1 :]
        for shape, level in zip(self.levels, batch.plan.levels, strict=True):
            _lay_out_level(shape, level, rest[: shape.size], pad=self.tokens - 1)
            rest = rest[shape.size :]

    def padding(self) -> np.ndarray:
        """Inputs of this shape that hold padding alone."""
        inputs = np.empty(self.size, dtype=np.int64)
        none = np.zeros(0, dtype=np.int64)
        self.lay_out(PackedBatch(none, none, TreePlan([0], [()] * len(self.levels)), [], []), inputs)
        return inputs

    def views(self, inputs: Tensor) -> tuple[Tensor, Tensor, TreePlan]:
        """Tokens, positions and attention of what `lay_out` wrote."""
        tokens, positions, rest = inputs.split([self.tokens, self.tokens, self.size - 2 * self.tokens])
        bounds = rest[: self.nodes + 1].int()
        parts = [Varlen(bounds, bounds, self.longest, self.longest, num_pairs=0)]
        rest = rest[self.nodes + 1 :]
        for level in self.levels:
            own, rest = rest.split([level.size, len(rest) - level.size])
            sizes = [level.runs + 1, level.runs + 1, level.queries, level.keys]
            q_bounds, k_bounds, q_index, k_index = own.split(sizes)
            longest = level.longest_query, level.longest_key
            parts.append(Varlen(q_bounds.int(), k_bounds.int(), *longest, 0, q_index=q_index, k_index=k_index))
        return tokens, positions, TreePlan.of_parts(parts)


def _lay_out_level(shape: LevelShape, level: Sequence[Pair], inputs: np.ndarray, pad: int) -> None:
    """The kernels leave untouched what is in no run, so padding is in runs too: some of many queries that see one key,
    then some of one query that sees many keys."""
    queries = [pair.q_stop - pair.q_start for pair in level]
    keys = [pair.k_stop - pair.k_start for pair in level]
    more_queries, more_keys = (
        _shares(total - sum(own) - PAD_RUNS) for total, own in ((shape.queries, queries), (shape.keys, keys))
    )
    ones = [1] * PAD_RUNS
    middle = 2 * (shape.runs + 1)
    inputs[: shape.runs + 1] = _bounds([*queries, *more_queries, *ones], shape.runs)
    inputs[shape.runs + 1 : middle] = _bounds([*keys, *ones, *more_keys], shape.runs)
    inputs[middle:] = pad
    _join([(pair.q_start, pair.q_stop) for pair in level], inputs[middle:])
    _join([(pair.k_start, pair.k_stop) for pair in level], inputs[middle + shape.queries :])


def _join(runs: Sequence[tuple[int, int]], out: np.ndarray) -> None:
    """Write the tokens of all runs, end to end."""
    first = 0
    for start, stop in runs:
        out[first : first + stop - start] = np.arange(start, stop)
        first += stop - start


def _shares(count: int) -> list[int]:
    """`count` things in `PAD_RUNS` runs of almost the same length."""
    each, more = divmod(count, PAD_RUNS)
    return [each + (index < more) for index in range(PAD_RUNS)]


def _bounds(lengths: Sequence[int], num_runs: int) -> np.ndarray:
    """[num_runs + 1] where runs end; those that are missing are empty."""
    return np.cumsum([0, *lengths, *([0] * (num_runs - len(lengths)))])


def _longest(lengths: Sequence[int], total: int) -> int:
    """A length that no run exceeds, even if all is padding."""
    return padded_size(max(0, *lengths, total // PAD_RUNS + 1), 128, 4)


def token_bucket(count: int) -> int:
    """Tokens of the graph for `count` tokens."""
    power = padded_size(count, 128, 2)
    if power <= EXACT_TOKENS:
        return power
    step = power // 8
    return -(-count // step) * step


@dataclass(slots=True)
class _PassPair:
    """The graphs of one shape and adapter."""

    forward: Captured
    backward: Captured | None
    """None for a pass that only reads."""


class PassGraphs:
    """Captured lazily, per shape and adapter; the one used longest ago goes first."""

    def __init__(self, model: CausalModel) -> None:
        assert model.fused is not None, "ask `supports` first"
        assert model.ops.new_graph_recorder is not None, "ask `supports` first"
        self._model = model
        self._body: FusedBody = model.fused
        self._new_recorder = model.ops.new_graph_recorder
        self._recorder = self._new_recorder()
        self._graphs: dict[Any, _PassPair] = {}
        self._seen: Counter[Any] = Counter()
        self._is_full = False
        sizes = model.sizes
        heads = 2 * (sizes.query_size + sizes.key_size)
        in_layer = 4 * sizes.hidden_size * (heads + 3 * sizes.inner_size)
        self._most_tokens = int(MOST_OPERATIONS / in_layer)
        self._anchor = torch.zeros(1, device=model.device, requires_grad=True)

    @staticmethod
    def supports(model: CausalModel) -> bool:
        """Whether passes of this model can be captured: dense blocks, whole attention, kernels that the host need not
        wait for."""
        return (
            model.ops.new_graph_recorder is not None
            and model.fused is not None
            and model.shards is None
            and not model.experts
            and all(window is None for window in model.sizes.windows)
            and model.ops.attention.can_capture_prefill(model.dtype, model.sizes.largest_head)
        )

    def __len__(self) -> int:
        return len(self._graphs)

    def hidden(self, batch: PackedBatch, route: Route, rows: Tensor) -> Tensor | None:
        """Last hidden states [R, H] of `rows`; None: launch the pass as usual.

        With gradients enabled, autograd can run backward from them.
        """
        trains = torch.is_grad_enabled()
        shape = self._shape(batch, route, trains=trains)
        if shape is None:
            return None
        try:
            graphs = self._get(shape, route.spans[0].weights, trains=trains)
        except torch.OutOfMemoryError:
            log.warning("no memory is left to capture training passes: they are launched kernel by kernel, slower")
            self._is_full = True
            self.forget()
            return None
        if graphs is None:
            return None
        packed = self._model.ops.transfer.host_buffer(shape.size, torch.int64)
        shape.lay_out(batch, packed.numpy())
        graphs.forward.inputs.copy_(packed, non_blocking=True)
        if trains:
            return _CapturedPass.apply(self._anchor, graphs, rows)
        graphs.forward.replay()
        return graphs.forward.outputs[rows]

    def forget(self) -> None:
        """Drop all graphs and give their memory back."""
        self._graphs.clear()
        self._recorder = self._new_recorder()

    def _shape(self, batch: PackedBatch, route: Route, *, trains: bool) -> PassShape | None:
        """The shape of a pass that a graph may take."""
        is_plain = len(route.spans) == 1 and route.full is None and route.routing is None
        if not is_plain or self._is_full or len(batch.plan.levels) > MOST_LEVELS:
            return None
        shape = PassShape.of(batch)
        if shape.tokens > self._most_tokens:
            return None
        has_room = not trains or self._body.keeps_all(MOST_SHARE * shape.tokens, route)
        return shape if has_room else None

    def _get(self, shape: PassShape, weights: LoraWeights, *, trains: bool) -> _PassPair | None:
        """The graphs of a shape with these weights; None until it has come often enough."""
        grads = weights.grad_pairs if trains else None
        places = (
            tensor.data_ptr() for pairs in (weights.pairs, grads or {}) for tensor in next(iter(pairs.values()), ())
        )
        key = shape, weights.flat.data_ptr(), tuple(places), weights.scale, tuple(weights.pairs), trains
        found = self._graphs.pop(key, None)
        if found is None:
            self._seen[key] += 1
            if self._seen[key] < NUM_SEEN:
                return None
            del self._seen[key]
            route = Route.of([weights.span(0, shape.tokens)])
            with torch.no_grad():
                found = self._capture(shape, route) if trains else _PassPair(self._capture_reading(shape, route), None)
        self._graphs[key] = found
        while len(self._graphs) > MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return found

    def _capture(self, shape: PassShape, route: Route) -> _PassPair:
        body, kept = self._body, list[KeptPass]()

        def run(inputs: Tensor) -> Tensor:
            hidden, own = body.start(*shape.views(inputs), route)
            kept[:] = [own]
            return hidden

        def run_backward(grad: Tensor) -> Tensor:
            own = kept[0]
            # Backward takes the blocks out of its list and overwrites activations, which forward writes anew.
            body.run_backward(grad, replace(own, blocks=list(own.blocks)))
            return grad

        forward = self._recorder.capture(self._padding(shape), run)
        # Capturing runs backward once: over the activations of padding alone, whose gradient is zero.
        forward.replay()
        return _PassPair(forward, self._recorder.capture(torch.zeros_like(forward.outputs), run_backward))

    def _capture_reading(self, shape: PassShape, route: Route) -> Captured:
        """A pass without a backward pass."""
        return self._recorder.capture(
            self._padding(shape), lambda inputs: self._body.hidden(*shape.views(inputs), route)
        )

    def _padding(self, shape: PassShape) -> Tensor:
        return torch.from_numpy(shape.padding()).to(self._model.device)


class _CapturedPass(torch.autograd.Function):
    """Both graphs as one autograd function; backward adds gradients in place and does not return them."""

    @staticmethod
    def forward(ctx, anchor, graphs, rows):  # noqa: ARG004 - the anchor asks for a gradient
        ctx.graphs, ctx.rows = graphs, rows
        graphs.forward.replay()
        return graphs.forward.outputs[rows]

    @staticmethod
    def backward(ctx, grad):
        backward: Captured = ctx.graphs.backward
        backward.inputs.zero_().index_add_(0, ctx.rows, grad)
        backward.replay()
        return torch.zeros(1, device=grad.device), None, None
