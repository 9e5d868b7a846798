"""Weights of which every learner holds a part: a pass gathers one unit of the layout, uses it, and lets it go.

A unit (`full.LayoutUnit`) is a decoder block, or what lies outside the blocks. Each learner holds an equal part of
every unit, as one flat tensor. `ShardedWeights` looks like whole weights to a pass, and `ShardedGradients` like a place
for whole gradients: it keeps the gradient of one unit, and hands it to all learners when the pass goes on to another
unit. Who moves the numbers is a `ShardExchange` (`learners/rounds.py`).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, overload

import torch
from torch import Tensor, nn

from turnwise.engine.model.body_weights import BlockWeights, BodyWeights
from turnwise.engine.model.full import ModelWeights, WeightLayout
from turnwise.engine.model.lora import LoraLinear

BASE_SOURCE = 0
"""The number under which every learner holds its part of the frozen base."""


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Which of the parts a learner holds."""

    rank: int
    size: int


class ShardLayout:
    """Which numbers of each unit a learner holds: equal parts; the last ones are filled up with zeros."""

    def __init__(self, layout: WeightLayout, place: ShardPlace) -> None:
        self.layout, self.place = layout, place
        self._parts = [-(-unit.size // place.size) for unit in layout.units]
        self._starts = [0, *itertools.accumulate(self._parts)]

    @property
    def size(self) -> int:
        """Numbers that this learner holds."""
        return self._starts[-1]

    @property
    def num_units(self) -> int:
        return len(self._parts)

    def whole_size(self, unit: int) -> int:
        """Numbers of a gathered unit, those that fill it up among them."""
        return self._parts[unit] * self.place.size

    @property
    def largest_unit(self) -> int:
        """Numbers of the largest gathered unit."""
        return max(map(self.whole_size, range(self.num_units)))

    def part(self, unit: int, local: Tensor) -> Tensor:
        """This learner's part of a unit, as a view of the tensor that holds all its parts."""
        return local[self._starts[unit] : self._starts[unit + 1]]

    def known_part(self, unit: int, local: Tensor) -> Tensor:
        """The same without the zeros that fill the unit up."""
        length = self._parts[unit]
        known = self.layout.units[unit].size - self.place.rank * length
        return self.part(unit, local)[: max(0, min(length, known))]

    @torch.no_grad()
    def cut(self, tensors: Mapping[str, Tensor], local: Tensor) -> None:
        """Fill `local` with this learner's parts of tensors by parameter name."""
        for number, unit in enumerate(self.layout.units):
            whole = torch.zeros(self.whole_size(number), dtype=local.dtype)
            for name in unit.names:
                self.layout.places[name].of(whole, unit.start).copy_(tensors[name])
            start = self.place.rank * self._parts[number]
            self.part(number, local).copy_(whole[start : start + self._parts[number]])


class ShardExchange(Protocol):
    """Moves units between learners. Every learner has tensors under the same numbers, called sources."""

    @property
    def place(self) -> ShardPlace: ...

    def use(self, shards: ShardLayout) -> None:
        """Say how units are cut; before anything else."""
        ...

    def add(self, source: int, local: Tensor) -> None:
        """Offer this learner's parts of a source."""
        ...

    def local(self, source: int) -> Tensor:
        """This learner's parts of a source."""
        ...

    def drop(self, source: int) -> None:
        """Offer a source no longer."""
        ...

    def forget(self) -> None:
        """Called when the numbers of a source have changed."""
        ...

    def gather(self, source: int, unit: int) -> Tensor:
        """A whole unit. It must not be changed, and it may be freed when another one is asked for."""
        ...

    def reduce(self, source: int, unit: int, whole: Tensor) -> None:
        """Add `whole` to the source, of which each learner holds its part."""
        ...


class _UnitTensors(ModelWeights, ABC):
    """What a pass reads or writes, one unit at a time."""

    def __init__(self, shards: ShardLayout) -> None:
        self.layout = shards.layout
        self.shards = shards

    @abstractmethod
    def whole(self, unit: int) -> Tensor:
        """The unit as one flat tensor."""

    @property
    def body(self) -> BodyWeights:
        return cast(BodyWeights, _ShardedBody(self))

    @property
    def head(self) -> tuple[Tensor, Tensor | None]:
        unit = self.layout.head_unit
        return self.layout.head(self.whole(unit), self.layout.units[unit].start)

    def views_of(self, linear: str) -> tuple[Tensor, Tensor | None]:  # noqa: ARG002 - blocks are read through `body`
        return self.head

    def outside(self, name: str) -> Tensor:
        """A tensor that lies outside the blocks."""
        unit = next(
            i for i in range(self.layout.head_unit, self.shards.num_units) if name in self.layout.units[i].names
        )
        return self.layout.places[name].of(self.whole(unit), self.layout.units[unit].start)


class ShardedWeights(_UnitTensors):
    """Weights whose units are gathered when a pass reads them."""

    def __init__(self, shards: ShardLayout, exchange: ShardExchange, source: int) -> None:
        super().__init__(shards)
        self.source = source
        self._exchange = exchange

    def whole(self, unit: int) -> Tensor:
        return self._exchange.gather(self.source, unit)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every parameter by name, in the memory of the host."""
        found: dict[str, Tensor] = {}
        for number, unit in enumerate(self.layout.units):
            whole = self.whole(number).to("cpu", copy=True)
            found.update({name: self.layout.places[name].of(whole, unit.start) for name in unit.names})
        return {name: found[name] for name in self.layout.places}


class ShardedGradients(_UnitTensors):
    """Room for the gradient of one unit; `flush` hands it to the learners."""

    def __init__(self, shards: ShardLayout, exchange: ShardExchange, source: int, device: torch.device) -> None:
        super().__init__(shards)
        self._exchange, self._source, self._device = exchange, source, device
        self._room: tuple[int, Tensor] | None = None

    def whole(self, unit: int) -> Tensor:
        if self._room is None or self._room[0] != unit:
            self.flush()
            self._room = unit, torch.zeros(self.shards.whole_size(unit), device=self._device)
        return self._room[1]

    def flush(self) -> None:
        """Add the gradient that was collected to the parts of all learners."""
        if self._room is not None:
            (unit, whole), self._room = self._room, None
            self._exchange.reduce(self._source, unit, whole)

    def forget(self) -> None:
        """Drop what was collected and not handed over."""
        self._room = None


class _ShardedBody:
    """Everything from the embedding to the last norm (`BodyWeights`), one unit at a time."""

    def __init__(self, units: _UnitTensors) -> None:
        self._units = units
        self.blocks = _ShardedBlocks(units)

    @property
    def embedding(self) -> Tensor:
        return self._units.outside(self._units.layout.embedding_name)

    @property
    def last_norm(self) -> Tensor:
        return self._units.outside(self._units.layout.last_norm_name)


class _ShardedBlocks(Sequence[BlockWeights]):
    def __init__(self, units: _UnitTensors) -> None:
        self._units = units

    def __len__(self) -> int:
        return self._units.layout.head_unit

    @overload
    def __getitem__(self, index: int) -> BlockWeights: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BlockWeights]: ...
    def __getitem__(self, index: int | slice) -> BlockWeights | Sequence[BlockWeights]:
        assert isinstance(index, int), "a slice would gather many blocks at once"
        return self._units.layout.block(index, self._units.whole(index))


class ShardedHead(LoraLinear):
    """The output head, gathered when it is read."""

    def __init__(self, head: LoraLinear, weights: ShardedWeights) -> None:
        nn.Module.__init__(self)
        self.name, self.holder = head.name, head.holder
        self.in_features, self.out_features = head.in_features, head.out_features
        self._weights = weights

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._weights.head[0]

    @property
    def bias(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._weights.head[1]
