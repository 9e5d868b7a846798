"""Routed experts inside transformers' own modelling code: their products, their adapters and their routers are ours.

transformers keeps the experts of a layer in two tensors, and lets their computation be replaced by name. Ours sorts
rows by expert and adds the adapters of the current route (`expert_products.py`). Routers whose scores we can compute
are replaced too, so that they can carry an adapter, and so that a choice can be recorded and replayed.

Shape legend: N tokens, K experts of one token, E experts, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from turnwise.engine.model.expert_products import (
    ExpertWeights,
    OwnGate,
    SwigluGate,
    experts_backward,
    run_experts,
)
from turnwise.engine.model.lora import LoraLinear, RouteHolder
from turnwise.engine.model.lora_products import read_spans
from turnwise.engine.model.routing import choose_experts, score_experts
from turnwise.models.experts import ExpertSpec
from turnwise.models.linears import ROUTERS, Shape

EXPERTS_NAME = "turnwise"
CORRECTION = "e_score_correction_bias"


class TokenRouter(LoraLinear):
    """A router that can carry an adapter, and whose choice can be recorded and replayed."""

    def __init__(self, base: Any, name: str, holder: RouteHolder, spec: ExpertSpec, layer: int) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = base.weight, getattr(base, "bias", None)
        if spec.scoring == "sigmoid":  # these families score in float32, whatever the model's dtype
            self.weight = nn.Parameter(self.weight.detach().float(), requires_grad=False)
        self.name, self.holder, self.spec, self.layer = name, holder, spec, layer
        self.out_features, self.in_features = base.weight.shape
        self.register_buffer(CORRECTION, getattr(base, CORRECTION, None))
        self._order = _output_order(base, spec)

    @property
    def correction(self) -> Tensor | None:
        """[E] what is added to scores for the choice alone, in families that balance experts that way."""
        return getattr(self, CORRECTION)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Logits [N, E], the weights [N, K] of the chosen experts, and the experts [N, K], in the family's order."""
        logits = super().forward(x.reshape(-1, self.in_features).to(self.weight.dtype))
        choice = choose_experts(logits.detach(), self.spec, self.correction)
        routing = self.holder.route.routing
        if routing is not None:
            choice = routing.choose(self.layer, choice, None)
        outputs = logits, score_experts(logits, choice, self.spec), choice
        first, second, third = (outputs[place] for place in self._order)
        return first, second, third


@torch.no_grad()
def _output_order(base: Any, spec: ExpertSpec) -> tuple[int, int, int]:
    """Try in which order a router returns logits, weights and experts, because versions of transformers differ."""
    outputs = base(torch.ones(2, base.weight.shape[1], dtype=base.weight.dtype, device=base.weight.device))
    order = [2 if not out.is_floating_point() else 0 if out.shape[-1] != spec.num_chosen else 1 for out in outputs]
    return (order[0], order[1], order[2]) if sorted(order) == [0, 1, 2] else (0, 1, 2)


class ExpertLayer:
    """The experts of one layer, and the route that their rows take."""

    def __init__(self, module: Any, name: str, holder: RouteHolder, num_chosen: int) -> None:
        self._module, self._holder = module, holder
        self._names = {"gate_up_name": f"{name}.gate_up_proj", "down_name": f"{name}.down_proj"}
        activation = getattr(module.config, "hidden_act", None) or getattr(module.config, "hidden_activation", "silu")
        is_plain = module.is_concatenated and activation == "silu"
        is_plain = is_plain and type(module)._apply_gate.__name__ == "_default_apply_gate"
        self._gate = SwigluGate() if is_plain else OwnGate(module._apply_gate)
        self._num_chosen = num_chosen
        self._anchor = torch.zeros(1, requires_grad=True)

    def weights(self) -> ExpertWeights:
        """The weights that the module holds now: the base's, or those that a pass put in their place."""
        module = self._module
        gate_up, down = module.gate_up_proj, module.down_proj
        if module.is_transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        return ExpertWeights(
            **self._names,
            gate_up=gate_up,
            down=down,
            gate_up_bias=module.gate_up_proj_bias if module.has_bias else None,
            down_bias=module.down_proj_bias if module.has_bias else None,
            gate=self._gate,
        )

    def own_tensors(self) -> tuple[Tensor, Tensor]:
        """The module's own parameters of all experts."""
        return self._module.gate_up_proj, self._module.down_proj

    def matrices(self) -> dict[str, Tensor]:
        """[E, O, I] of the base, by the names that adapters use."""
        weights = self.weights()
        return {weights.gate_up_name: weights.gate_up.detach(), weights.down_name: weights.down.detach()}

    def shapes(self) -> dict[str, Shape]:
        matrices = self.matrices().items()
        return {name: Shape(m.shape[1], m.shape[2], m.shape[0], self._num_chosen) for name, m in matrices}

    def run(self, x_NH: Tensor, choice_NK: Tensor, scores_NK: Tensor) -> Tensor:
        route, weights = self._holder.route, self.weights()
        spans = read_spans(route, x_NH.dtype)
        if not torch.is_grad_enabled():
            return run_experts(x_NH, choice_NK, scores_NK, weights, (route, spans))[0]
        tensors = (weights.gate_up, weights.down, weights.gate_up_bias, weights.down_bias)
        work = (choice_NK, weights, (route, spans))
        return _RoutedExperts.apply(work, self._anchor.to(x_NH.device), x_NH, scores_NK, *tensors)


class _RoutedExperts(torch.autograd.Function):
    """Experts under autograd; gradients of adapters are added in place."""

    @staticmethod
    def forward(ctx, work, anchor, x, scores, *tensors):  # noqa: ARG004 - `work` holds the tensors too
        choice, ctx.weights, lora = work
        y, ctx.kept = run_experts(x, choice, scores, ctx.weights, lora)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, dy):
        (x,), kept, ctx.kept = ctx.saved_tensors, ctx.kept, None
        grads = _zeros_like(ctx.weights) if ctx.needs_input_grad[4] else None
        dx, dscores = experts_backward(dy.contiguous(), x, ctx.weights, kept, grads)
        own = (None,) * 4
        if grads is not None:
            own = (grads.gate_up, grads.down, grads.gate_up_bias, grads.down_bias)
        return None, torch.zeros(1, device=dy.device), dx, dscores.to(kept.scores.dtype), *own


def _zeros_like(weights: ExpertWeights) -> ExpertWeights:
    def zeros(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.zeros_like(tensor)

    return ExpertWeights(
        gate_up_name=weights.gate_up_name,
        down_name=weights.down_name,
        gate_up=torch.zeros_like(weights.gate_up),
        down=torch.zeros_like(weights.down),
        gate_up_bias=zeros(weights.gate_up_bias),
        down_bias=zeros(weights.down_bias),
    )


def _run_module(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return module.expert_layer.run(hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _run_module)


def wrap_experts(model: PreTrainedModel, holder: RouteHolder, spec: ExpertSpec) -> Sequence[ExpertLayer]:
    """Give every layer's experts their `ExpertLayer`, in place."""
    layers: list[ExpertLayer] = []
    for name, module in model.named_modules():
        if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            layer = ExpertLayer(module, name, holder, spec.num_chosen)
            module.expert_layer = layer  # type: ignore[assignment]
            layers.append(layer)
    return layers


def wrap_routers(model: PreTrainedModel, holder: RouteHolder, spec: ExpertSpec) -> dict[str, TokenRouter]:
    """Replace the router of every layer by ours, in place; none where only transformers' code can score."""
    routers: dict[str, TokenRouter] = {}
    if not spec.is_routable:
        return routers
    for name, module in list(model.named_modules()):
        if not hasattr(module, "expert_layer"):
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        child = next(child for child in ROUTERS if hasattr(parent, child))
        full = f"{name.rpartition('.')[0]}.{child}"
        routers[full] = TokenRouter(getattr(parent, child), full, holder, spec, len(routers))
        setattr(parent, child, routers[full])
    return routers
