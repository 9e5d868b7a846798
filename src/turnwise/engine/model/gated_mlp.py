"""The MLP of a decoder block: its interface (`Mlp`), and the gated one, act(x Wgate') * (x Wup') Wdown'.

A body runs any `Mlp`; `routed_mlp.py` has the one that chooses experts for every token.

Shape legend: N packed tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from turnwise.engine.model.lora import LinearGroup, Route
from turnwise.engine.model.lora_products import (
    NormedInput,
    SpanWeights,
    add_a_gradients,
    input_gradient,
    project,
)
from turnwise.engine.model.weight_gradients import add_product_gradient
from turnwise.engine.ops import for_device


@dataclass(slots=True)
class Scratch:
    """Temporary tensors of a block; the next block overwrites them.

    If they were freed one by one, they would leave gaps between the tensors that are kept, and a pass would need a
    third more memory.
    """

    normed: Tensor | None = None
    act: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MlpPass:
    """How the rows of one block's MLP run: which weights each row uses, and room for temporary tensors."""

    route: Route
    spans: Sequence[SpanWeights]
    scratch: Scratch | None = None
    rows: Tensor | None = None
    """The tokens of the pass that run here; None: all."""


class KeptMlp(Protocol):
    """What the backward pass of an MLP reads of its forward pass."""

    def tensors(self) -> list[Tensor]: ...


TensorByName = Callable[[str], Tensor]
JoinedGroup = Callable[[LinearGroup], LinearGroup]


class Mlp(Protocol):
    """The part of a block after its attention."""

    @property
    def groups(self) -> tuple[LinearGroup, ...]:
        """The linears that can carry adapters."""
        ...

    @property
    def expert_names(self) -> tuple[str, ...]:
        """The names of what else can carry adapters: the matrices of routed experts."""
        ...

    def forward(self, x_NH: Tensor, work: MlpPass) -> tuple[Tensor, KeptMlp]:
        """What is added to the residual stream, and what backward reads."""
        ...

    def backward(
        self, dy_NH: Tensor, x_NH: Tensor | NormedInput, kept: Any, spans: Sequence[SpanWeights], grads: Any
    ) -> Tensor:
        """The gradient of x; adds those of adapters in place, and those of all weights to `grads` (an MLP like this
        one, or None)."""
        ...

    def with_tensors(self, tensor: TensorByName, join: JoinedGroup) -> Mlp:
        """The same MLP over other tensors; `tensor` finds one by its parameter's name in the whole model."""
        ...


@dataclass(frozen=True, slots=True)
class KeptGatedMlp:
    low_gate_up: list[Tensor]
    gate_up: Tensor
    low_down: list[Tensor]

    def tensors(self) -> list[Tensor]:
        return [*self.low_gate_up, self.gate_up, *self.low_down]


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Gate and up in one product, then silu(gate) * up, then down."""

    gate_up: LinearGroup
    down: LinearGroup

    @property
    def groups(self) -> tuple[LinearGroup, ...]:
        return self.gate_up, self.down

    @property
    def expert_names(self) -> tuple[str, ...]:
        return ()

    def forward(self, x_NH: Tensor, work: MlpPass) -> tuple[Tensor, KeptGatedMlp]:
        gate_up, low_gate_up = project(self.gate_up, x_NH, work.route, work.spans)
        delta, low_down = project(self.down, _swiglu(gate_up, work), work.route, work.spans)
        return delta, KeptGatedMlp(low_gate_up, gate_up, low_down)

    def backward(
        self,
        dy_NH: Tensor,
        x_NH: Tensor | NormedInput,
        kept: KeptGatedMlp,
        spans: Sequence[SpanWeights],
        grads: GatedMlp | None,
    ) -> Tensor:
        dact, dlow = input_gradient(self.down, dy_NH, kept.low_down, spans)
        dgate_up, act = for_device(dy_NH.device).layers.swiglu_backward(dact, kept.gate_up)
        add_a_gradients(self.down, act, dlow, spans)
        if grads is not None:
            add_product_gradient(grads.down, dy_NH, act)
            add_product_gradient(grads.gate_up, dgate_up, x_NH)
        dx, dlow = input_gradient(self.gate_up, dgate_up, kept.low_gate_up, spans)
        add_a_gradients(self.gate_up, x_NH, dlow, spans)
        return dx

    def with_tensors(self, tensor: TensorByName, join: JoinedGroup) -> GatedMlp:  # noqa: ARG002 - only groups here
        return GatedMlp(join(self.gate_up), join(self.down))


def _swiglu(gate_up: Tensor, work: MlpPass) -> Tensor:
    layers, scratch = work.route.ops_for(gate_up.device).layers, work.scratch
    if scratch is None:
        return layers.swiglu(gate_up)
    scratch.act = layers.swiglu(gate_up, room=scratch.act)
    return scratch.act
