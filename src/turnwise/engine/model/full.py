"""All weights of a model in one flat tensor, for policies whose every weight is trained.

A `WeightLayout` says where each parameter lies. Linears that the fused body joins are neighbours, so the joined weight
is a view too, and optimizer, snapshot, norm and transfer are single calls. Tied weights lie there once. The same layout
serves the weights that a pass reads (in the model's dtype), the float32 masters, and the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from turnwise.engine.model.body_weights import BodyWeights
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

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + math.prod(self.shape)].view(self.shape)


class WeightLayout:
    """Where every parameter of a model lies in a flat tensor."""

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
        self._joined: dict[str, _FlatPlace] = {}
        for group in groups:
            self._place_together(group.name, [f"{name}.weight" for name in group.names], parameters)
            if group.bias is not None:
                self._place_together(f"{group.name}:bias", [f"{name}.bias" for name in group.names], parameters)
        for name in parameters:
            if name not in self.places:
                self._place_together(name, [name], parameters)
        self.num_parameters = sum(math.prod(place.shape) for place in self.places.values())
        self._body = body
        self._prefix = body_prefix
        self._head = head
        self._parameters = dict(parameters)

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
        if self._body is None:
            return None

        def join(group: LinearGroup) -> LinearGroup:
            bias = None if group.bias is None else self._joined[f"{group.name}:bias"].of(flat)
            return replace(group, weight=self._joined[group.name].of(flat), bias=bias)

        names = self._body.spec.names
        return self._body.base.with_tensors(names, self._prefix, lambda name: self.places[name].of(flat), join)

    def of_body(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters of the body under their names inside it."""
        prefix = self._prefix
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    def head(self, flat: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the output head."""
        weight, bias = self._head
        return self.places[weight].of(flat), None if bias is None else self.places[bias].of(flat)


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
    """Where a backward pass adds the gradients; None for weights that are not trained."""
    leaves: Mapping[str, Tensor] | None = None
    """The weights as autograd's leaves, for models that transformers' own code runs."""


class FullPolicy(Policy):
    """A published version of all weights."""

    def __init__(self, weights: ModelWeights) -> None:
        super().__init__(LoraConfig(), {}, torch.zeros(0), torch.float32)
        self.full = FullRoute(weights)
