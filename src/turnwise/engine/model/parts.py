"""One long sequence as a training pass in parts: exact gradients with the activations of one part at a time.

Forward runs part after part and keeps nothing but the keys and values of all layers. Backward begins with the last
part: it runs the part again, now with all that its backward pass reads, and that pass also gives gradients of the keys
and values before the part. They are summed, in float32, until their own part's turn comes. So a token costs its keys
and values and their gradients, and one part costs its activations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from turnwise.engine.attention.plans import TreePlan, WindowRun


@dataclass(frozen=True)
class PathPart(TreePlan):
    """Attention of a part of one sequence: its keys are those before it, and then its own."""

    first: int = 0
    """How many keys are before it."""

    def path_runs(self) -> list[WindowRun]:
        return self.window_runs(None)

    def window_runs(self, window: int | None) -> list[WindowRun]:
        num_tokens = self.bounds[-1]
        begin = 0 if window is None else max(0, self.first - window + 1)
        return [WindowRun(slice(0, num_tokens), slice(begin, self.first + num_tokens))]


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens [start, stop) of the sequence."""

    start: int
    stop: int
    rows: Tensor
    """The tokens whose hidden states the caller wants, counted from `start`."""
    places: slice
    """Their positions among all that the caller wants."""

    @property
    def plan(self) -> PathPart:
        return PathPart((0, self.stop - self.start), (), self.start)


def cut_sequence(rows: Tensor, num_tokens: int, part_tokens: int) -> list[Part]:
    """Few parts of similar size; `rows` are all wanted tokens, sorted."""
    count = -(-num_tokens // part_tokens)
    edges = [num_tokens * i // count for i in range(count + 1)]
    places = torch.searchsorted(rows, torch.tensor(edges, device=rows.device)).tolist()
    return [
        Part(edges[i], edges[i + 1], rows[places[i] : places[i + 1]] - edges[i], slice(places[i], places[i + 1]))
        for i in range(count)
    ]


class PastKeys:
    """Keys and values of all layers of one sequence, and their gradients; sides are [1, heads, tokens, D]."""

    def __init__(self, num_layers: int, num_tokens: int) -> None:
        self.first = 0
        """The first token of the part that runs now."""
        self._num_tokens = num_tokens
        self._sides: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self._grads: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the part's keys and values; returns those from the sequence's begin to the part's end, as views."""
        sides = self._sides[layer]
        if sides is None:
            shape = (1, key.shape[1], self._num_tokens, key.shape[3])
            sides = self._sides[layer] = (key.new_empty(shape), value.new_empty(shape))
        stop = self.first + key.shape[2]
        for side, new in zip(sides, (key, value), strict=True):
            side[:, :, self.first : stop] = new
        return sides[0][:, :, :stop], sides[1][:, :, :stop]

    def own_gradients(self, layer: int, *grads: Tensor) -> list[Tensor]:
        """Add gradients of all keys and values up to the part's end; returns the whole gradients of the part's own."""
        totals = self._grads[layer]
        if totals is None:
            key, value = (torch.zeros_like(grad, dtype=torch.float32) for grad in grads)
            totals = self._grads[layer] = (key, value)
        stop = grads[0].shape[2]
        own = []
        for total, grad in zip(totals, grads, strict=True):
            total[:, :, :stop] += grad
            own.append(total[:, :, self.first : stop].to(grad.dtype))
        return own
