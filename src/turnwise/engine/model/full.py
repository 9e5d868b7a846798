"""All weights of a model in one flat tensor, for policies whose every weight is trained.

A `WeightLayout` says where each parameter lies. Linears that the fused body joins are neighbours, so the joined weight
is a view too, and optimizer, snapshot, norm and transfer are single calls. Tied weights lie there once. The same layout
serves the weights that a pass reads (in the model's dtype), the float32 masters, and the gradients.

The tensors of one decoder block are neighbours: a unit of the layout. What lies outside the blocks is one unit or two.
Learners that share the weights out (`sharded.py`) gather one unit at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from turnwise.engine.model.body_weights import BlockWeights, BodyWeights
from turnwise.engine.model.gated_mlp import JoinedGroup, TensorByName
from turnwise.engine.model.lora import LinearGroup, Policy
from turnwise.types import LoraConfig

if TYPE_CHECKING:
    from turnwise.engine.model.body import FusedBody

ALIGNMENT = 64
"""Each tensor begins at a multiple of this many numbers, so that every kernel can read it at full width."""


@dataclass(frozen=True, slots=True)
class _FlatPlace:
    start: int
    shape: tuple[int, ...]

    def of(self, flat: Tensor, first: int = 0) -> Tensor:
        """The view of `flat`, which begins at number `first` of the layout."""
        start = self.start - first
        return flat[start : start + math.prod(self.shape)].view(self.shape)


@dataclass(frozen=True, slots=True)
class LayoutUnit:
    """Neighbours in a flat tensor: numbers [start, stop), and the parameters that lie there."""

    start: int
    stop: int
    names: tuple[str, ...]

    @property
    def size(self) -> int:
        return self.stop - self.start


class WeightLayout:
    """The range of every parameter of a model in a flat tensor."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        groups: Sequence[LinearGroup],
        *,
        body: FusedBody | None,
        body_prefix: str,
        head: tuple[str, str | None],
    ) -> None:
        """Args:
        parameters: all of the model by name, tied ones once.
        groups: linears that are to lie together.
        body: the fused body; None if transformers' own code runs the model.
        body_prefix: what stands before the names of the body's parameters.
        head: names of the output head's weight (the embedding's, where the two are tied) and bias.
        """
        self.places: dict[str, _FlatPlace] = {}
        self.size = 0
        self.units: list[LayoutUnit] = []
        """The blocks in their order, then what the head reads, then the rest, if there is any."""
        self._joined: dict[str, _FlatPlace] = {}
        self._names = None if body is None else body.spec.names
        self._body = None if body is None else body.base
        self._prefix = body_prefix
        self._head = head
        for members in self._unit_members(parameters):
            start = self.size
            self._place_unit(members, groups, parameters)
            self.units.append(LayoutUnit(start, self.size, tuple(members)))
        self.num_parameters = sum(math.prod(place.shape) for place in self.places.values())
        self._parameters = dict(parameters)

    def _unit_members(self, parameters: Iterable[str]) -> list[list[str]]:
        if self._names is None or self._body is None:
            return [list(parameters)]
        names, prefix = self._names, self._prefix
        of_head = {*self._head, f"{prefix}{names.last_norm}.weight"}
        blocks: list[list[str]] = [[] for _ in self._body.blocks]
        head, rest = [], []
        for name in parameters:
            if name.startswith(layers := f"{prefix}{names.layers}."):
                blocks[int(name.removeprefix(layers).partition(".")[0])].append(name)
            else:
                (head if name in of_head else rest).append(name)
        return [*blocks, head, *([rest] if rest else [])]

    def _place_unit(
        self, members: Sequence[str], groups: Sequence[LinearGroup], parameters: Mapping[str, Tensor]
    ) -> None:
        for group in groups:
            if f"{group.names[0]}.weight" in members:
                self._place_together(group.name, [f"{name}.weight" for name in group.names], parameters)
                if group.bias is not None:
                    self._place_together(f"{group.name}:bias", [f"{name}.bias" for name in group.names], parameters)
        for name in members:
            if name not in self.places:
                self._place_together(name, [name], parameters)

    def _place_together(self, name: str, members: Sequence[str], parameters: Mapping[str, Tensor]) -> None:
        start = self.size
        for member in members:
            shape = tuple(parameters[member].shape)
            self.places[member] = _FlatPlace(self.size, shape)
            self.size += math.prod(shape)
        rows = sum(parameters[member].shape[0] for member in members)
        self._joined[name] = _FlatPlace(start, (rows, *parameters[members[0]].shape[1:]))
        self.size = -(-self.size // ALIGNMENT) * ALIGNMENT

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Every parameter by name, as views of `flat`."""
        return {name: place.of(flat) for name, place in self.places.items()}

    @torch.no_grad()
    def read_base(self, flat: Tensor) -> None:
        """Fill `flat` with the base model's weights."""
        for name, view in self.views(flat).items():
            view.copy_(self._parameters[name])

    def body(self, flat: Tensor) -> BodyWeights | None:
        """What the fused body reads, as views of `flat`; None if transformers' own code runs the model."""
        if self._body is None or self._names is None:
            return None
        return self._body.with_tensors(self._names, self._prefix, *self._finders(flat, 0))

    def block(self, index: int, whole: Tensor) -> BlockWeights:
        """One decoder block, as views of its unit."""
        assert self._body is not None, "only a fused body has blocks"
        assert self._names is not None, "only a fused body has blocks"
        layer = f"{self._prefix}{self._names.layers}.{index}."
        return self._body.blocks[index].with_tensors(self._names, layer, *self._finders(whole, self.units[index].start))

    def _finders(self, flat: Tensor, first: int) -> tuple[TensorByName, JoinedGroup]:
        """What finds a tensor by name, and the joined tensors of a group."""

        def join(group: LinearGroup) -> LinearGroup:
            bias = None if group.bias is None else self._joined[f"{group.name}:bias"].of(flat, first)
            return replace(group, weight=self._joined[group.name].of(flat, first), bias=bias)

        return lambda name: self.places[name].of(flat, first), join

    def forget_tensors(self) -> BodyWeights | None:
        """Keep names and shapes only, and let the base model's tensors go; returns the body without its tensors."""
        self._parameters = {}
        self._body = self.body(torch.empty(self.size, device="meta"))
        return self._body

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The base model's own tensors by name."""
        return self._parameters

    @property
    def head_unit(self) -> int:
        """The unit of the last norm and the output head."""
        return 0 if self._body is None else len(self._body.blocks)

    @property
    def embedding_name(self) -> str:
        assert self._names is not None, "only a fused body has parts"
        return f"{self._prefix}{self._names.embedding}.weight"

    @property
    def last_norm_name(self) -> str:
        assert self._names is not None, "only a fused body has parts"
        return f"{self._prefix}{self._names.last_norm}.weight"

    def of_body(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters of the body under their names inside it."""
        prefix = self._prefix
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    def head(self, flat: Tensor, first: int = 0) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the output head, in a tensor that begins at number `first`."""
        weight, bias = self._head
        return self.places[weight].of(flat, first), None if bias is None else self.places[bias].of(flat, first)


class ModelWeights:
    """Views of one flat tensor that a pass can run with, or add its gradients to."""

    def __init__(self, layout: WeightLayout, flat: Tensor) -> None:
        self.layout = layout
        self.flat = flat

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every parameter by name."""
        return self.layout.views(self.flat)

    @cached_property
    def body(self) -> BodyWeights | None:
        return self.layout.body(self.flat)

    def views_of(self, linear: str) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a linear. A head that is tied to the embedding has no place of its own."""
        weight = self.tensors.get(f"{linear}.weight")
        return self.head if weight is None else (weight, self.tensors.get(f"{linear}.bias"))

    @cached_property
    def head(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the output head."""
        return self.layout.head(self.flat)


@dataclass(frozen=True, slots=True)
class FullRoute:
    """All tokens of a pass run with `weights` in place of the base's."""

    weights: ModelWeights
    grads: ModelWeights | None = None
    """The tensor to which a backward pass adds the gradients; None for weights that are not trained."""
    leaves: Mapping[str, Tensor] | None = None
    """The weights as autograd's leaves, for models that transformers' own code runs."""


class FullPolicy(Policy):
    """A published version of all weights."""

    def __init__(self, weights: ModelWeights) -> None:
        super().__init__(LoraConfig(), {}, torch.zeros(0), torch.float32)
        self.full = FullRoute(weights)
