"""The MLP of a mixture of experts: a router, the experts that it chooses, and an expert that every token uses.

Shape legend: N packed tokens, K experts of one token, E experts, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turnwise.engine.model.expert_products import ExpertWeights, KeptExperts, experts_backward, run_experts
from turnwise.engine.model.gated_mlp import GatedMlp, JoinedGroup, KeptGatedMlp, MlpPass, TensorByName
from turnwise.engine.model.lora import LinearGroup
from turnwise.engine.model.lora_products import (
    NormedInput,
    SpanWeights,
    add_a_gradients,
    input_gradient,
    project,
)
from turnwise.engine.model.routing import choose_experts, score_experts
from turnwise.engine.model.weight_gradients import add_product_gradient
from turnwise.models.experts import ExpertSpec


@dataclass(frozen=True, slots=True)
class KeptShared:
    """What the backward pass keeps of the shared expert."""

    mlp: KeptGatedMlp
    out: Tensor | None
    """The output before the gate; None if there is no gate."""
    gate: Tensor | None
    low_gate: list[Tensor]

    def tensors(self) -> list[Tensor]:
        own = [one for one in (self.out, self.gate) if one is not None]
        return [*self.mlp.tensors(), *own, *self.low_gate]


@dataclass(frozen=True, slots=True)
class KeptRoutedMlp:
    logits: Tensor
    low_router: list[Tensor]
    experts: KeptExperts
    shared: KeptShared | None

    def tensors(self) -> list[Tensor]:
        shared = [] if self.shared is None else self.shared.tensors()
        return [self.logits, *self.low_router, *self.experts.tensors(), *shared]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedMlp:
    """Experts of one layer with their router."""

    layer: int
    """Its number among the layers with experts."""
    spec: ExpertSpec
    router: LinearGroup
    correction: Tensor | None
    """[E] what the router adds to scores for the choice alone, in some families."""
    experts: ExpertWeights
    shared: GatedMlp | None
    shared_gate: LinearGroup | None

    @property
    def groups(self) -> tuple[LinearGroup, ...]:
        shared = () if self.shared is None else self.shared.groups
        return self.router, *shared, *(() if self.shared_gate is None else (self.shared_gate,))

    @property
    def expert_names(self) -> tuple[str, ...]:
        return self.experts.names

    def forward(self, x_NH: Tensor, work: MlpPass) -> tuple[Tensor, KeptRoutedMlp]:
        route, spans = work.route, work.spans
        logits, low_router = project(self.router, x_NH, route, spans)
        choice = choose_experts(logits, self.spec, self.correction)
        if route.routing is not None:
            choice = route.routing.choose(self.layer, choice, work.rows)
        scores = score_experts(logits, choice, self.spec)
        y, experts = run_experts(x_NH, choice, scores, self.experts, (route, spans))
        shared = None
        if self.shared is not None:
            more, shared = self._run_shared(self.shared, x_NH, work)
            y = y.add_(more)
        return y, KeptRoutedMlp(logits, low_router, experts, shared)

    def _run_shared(self, shared: GatedMlp, x_NH: Tensor, work: MlpPass) -> tuple[Tensor, KeptShared]:
        out, kept = shared.forward(x_NH, work)
        if self.shared_gate is None:
            return out, KeptShared(kept, None, None, [])
        logit, low = project(self.shared_gate, x_NH, work.route, work.spans)
        gate = torch.sigmoid(logit)
        return out * gate, KeptShared(kept, out, gate, low)

    def backward(
        self,
        dy_NH: Tensor,
        x_NH: Tensor | NormedInput,
        kept: KeptRoutedMlp,
        spans: Sequence[SpanWeights],
        grads: RoutedMlp | None,
    ) -> Tensor:
        x = x_NH if isinstance(x_NH, Tensor) else x_NH.formed()
        own = None if grads is None else grads.experts
        dx, dscores = experts_backward(dy_NH, x, self.experts, kept.experts, own)
        with torch.enable_grad():
            leaf = kept.logits.detach().requires_grad_(True)
            scores = score_experts(leaf, kept.experts.choice, self.spec)
            (dlogits,) = torch.autograd.grad(scores, leaf, dscores)
        dx += self._linear_backward(self.router, dlogits, x, kept.low_router, spans, grads and grads.router)
        if self.shared is not None and kept.shared is not None:
            dx += self._shared_backward(self.shared, dy_NH, x, kept.shared, spans, grads)
        return dx

    def _shared_backward(
        self,
        shared: GatedMlp,
        dy_NH: Tensor,
        x_NH: Tensor,
        kept: KeptShared,
        spans: Sequence[SpanWeights],
        grads: RoutedMlp | None,
    ) -> Tensor:
        gate, out = kept.gate, kept.out
        if self.shared_gate is None or gate is None or out is None:
            return shared.backward(dy_NH, x_NH, kept.mlp, spans, grads and grads.shared)
        dlogit = (dy_NH.float() * out.float()).sum(dim=-1, keepdim=True) * (gate * (1 - gate)).float()
        dx = shared.backward(dy_NH * gate, x_NH, kept.mlp, spans, grads and grads.shared)
        more = self._linear_backward(
            self.shared_gate, dlogit.to(x_NH.dtype), x_NH, kept.low_gate, spans, grads and grads.shared_gate
        )
        return dx.add_(more)

    @staticmethod
    def _linear_backward(
        group: LinearGroup,
        dy_NO: Tensor,
        x_NH: Tensor,
        lows: Sequence[Tensor],
        spans: Sequence[SpanWeights],
        grads: LinearGroup | None,
    ) -> Tensor:
        dx, dlows = input_gradient(group, dy_NO, lows, spans)
        add_a_gradients(group, x_NH, dlows, spans)
        if grads is not None:
            add_product_gradient(grads, dy_NO, x_NH)
        return dx

    def with_tensors(self, tensor: TensorByName, join: JoinedGroup) -> RoutedMlp:
        experts = self.experts
        return replace(
            self,
            router=join(self.router),
            experts=replace(experts, gate_up=tensor(experts.gate_up_name), down=tensor(experts.down_name)),
            shared=None if self.shared is None else self.shared.with_tensors(tensor, join),
            shared_gate=None if self.shared_gate is None else join(self.shared_gate),
        )
