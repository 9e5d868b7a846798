"""The products of routed experts and of their adapters, forward and backward.

Every token uses K experts, so there are M = N K rows, sorted by expert (`ops.experts`). An adapter has A and B of its
own for every expert; the rows of its tokens, sorted by expert too, are one `AdapterRows`.

    gate_up = x Wgu' + scale (x Agu') Bgu'        of each row's expert
    y = sum over a token's rows of score * (act(gate_up) Wd' + ...)

Shape legend: N tokens, K experts of one token, M rows, E experts, H hidden size, I width of an expert, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from turnwise.engine.model.lora import BankRoute, Route
from turnwise.engine.model.lora_products import SpanWeights
from turnwise.engine.ops import for_device
from turnwise.engine.ops.interface import Groups

Pairs = Mapping[str, tuple[Tensor, Tensor]]


class ExpertGate(Protocol):
    """The activation of an expert: [M, 2 I] -> [M, I]."""

    def forward(self, gate_up: Tensor) -> Tensor: ...

    def backward(self, dact: Tensor, gate_up: Tensor) -> Tensor:
        """Gradient of `gate_up`; both inputs may be overwritten."""
        ...


class SwigluGate:
    """silu(gate) * up, with gate before up."""

    def forward(self, gate_up: Tensor) -> Tensor:
        return for_device(gate_up.device).layers.swiglu(gate_up)

    def backward(self, dact: Tensor, gate_up: Tensor) -> Tensor:
        return for_device(gate_up.device).layers.swiglu_backward(dact, gate_up)[0]


SWIGLU = SwigluGate()


@dataclass(frozen=True, slots=True)
class OwnGate:
    """An activation that a family computes in its own way; autograd gives its gradient."""

    call: Callable[[Tensor], Tensor]

    def forward(self, gate_up: Tensor) -> Tensor:
        with torch.no_grad():
            return self.call(gate_up)

    def backward(self, dact: Tensor, gate_up: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = gate_up.detach().requires_grad_(True)
            return torch.autograd.grad(self.call(leaf), leaf, dact)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """All experts of one layer."""

    gate_up_name: str
    down_name: str
    gate_up: Tensor
    """[E, 2 I, H]"""
    down: Tensor
    """[E, H, I]"""
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate: ExpertGate = SWIGLU

    @property
    def names(self) -> tuple[str, str]:
        return self.gate_up_name, self.down_name

    def of_route(self, route: Route) -> ExpertWeights:
        """The same experts with an adapter added in, where the route has merged weights."""
        if route.merged is None or self.gate_up_name not in route.merged:
            return self
        return replace(self, gate_up=route.merged[self.gate_up_name], down=route.merged[self.down_name])


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows whose tokens use one adapter (or one of a bank's adapters), sorted by expert."""

    groups: Groups
    places: Tensor | None
    """The positions of these rows among all rows; None: they are all rows, in the same order."""
    pairs: Pairs
    scale: float
    grads: Pairs | None = None

    def rows_of(self, x_M: Tensor) -> Tensor:
        return x_M if self.places is None else x_M[self.places]

    def add_to(self, y_MO: Tensor, part_mO: Tensor) -> None:
        if self.places is None:
            y_MO.add_(part_mO)
        else:
            y_MO.index_add_(0, self.places, part_mO)


@dataclass(frozen=True, slots=True)
class KeptExperts:
    """What the backward pass reads."""

    groups: Groups
    adapters: Sequence[AdapterRows]
    choice: Tensor
    scores: Tensor
    gate_up: Tensor
    low_gate_up: list[Tensor]
    low_down: list[Tensor]

    def tensors(self) -> list[Tensor]:
        return [
            self.choice, self.scores, self.gate_up, *self.low_gate_up, *self.low_down,
            self.groups.order, self.groups.places,
        ]  # fmt: skip


def find_adapter_rows(
    weights: ExpertWeights, choice_NK: Tensor, groups: Groups, route: Route, spans: Sequence[SpanWeights]
) -> list[AdapterRows]:
    """The rows of every adapter that these experts have."""
    if route.bank is not None:
        found = bank_rows(weights, choice_NK, groups, route.bank)
        return [] if found is None else [found]
    adapters: list[AdapterRows] = []
    experts = for_device(choice_NK.device).experts
    num_tokens, num_chosen = choice_NK.shape
    for span in spans:
        if weights.gate_up_name not in span.pairs or span.start == span.stop:
            continue
        own, places = groups, None
        if (span.start, span.stop) != (0, num_tokens):
            own = experts.group(choice_NK[span.start : span.stop].flatten(), len(weights.gate_up))
            places = groups.places[own.order + span.start * num_chosen]
        adapters.append(AdapterRows(own, places, span.pairs, span.expert_scale, span.grads))
    return adapters


def bank_rows(weights: ExpertWeights, choice_NK: Tensor, groups: Groups, bank: BankRoute) -> AdapterRows | None:
    """The rows of all adapters of a bank, sorted by (slot, expert); rows of the base model belong to no group."""
    pairs = {name: bank.experts[name] for name in weights.names if name in bank.experts}
    if not pairs:
        return None
    num_experts, num_groups = len(weights.gate_up), len(pairs[weights.gate_up_name][0])
    slots_N = bank.slots_of_rows(len(choice_NK))
    keys = torch.where(slots_N[:, None] < 0, num_groups, slots_N[:, None] * num_experts + choice_NK)
    own = for_device(choice_NK.device).experts.group(keys.flatten(), num_groups)
    return AdapterRows(own, groups.places[own.order], pairs, 1.0)


def run_experts(
    x_NH: Tensor,
    choice_NK: Tensor,
    scores_NK: Tensor,
    weights: ExpertWeights,
    lora: tuple[Route, Sequence[SpanWeights]],
) -> tuple[Tensor, KeptExperts]:
    """The weighted sum [N, H] of each token's experts, and what backward reads."""
    groups = for_device(x_NH.device).experts.group(choice_NK.flatten(), len(weights.gate_up))
    adapters = find_adapter_rows(weights, choice_NK, groups, *lora)
    weights = weights.of_route(lora[0])
    num_chosen = choice_NK.shape[1]
    rows = x_NH[groups.order // num_chosen]
    gate_up, low_gate_up = _project(rows, weights.gate_up_name, weights.gate_up, weights.gate_up_bias, groups, adapters)
    del rows
    act = weights.gate.forward(gate_up)
    out, low_down = _project(act, weights.down_name, weights.down, weights.down_bias, groups, adapters)
    y = _sum_rows(out, groups, scores_NK)
    return y, KeptExperts(groups, adapters, choice_NK, scores_NK, gate_up, low_gate_up, low_down)


def _sum_rows(rows_MH: Tensor, groups: Groups, scores_NK: Tensor) -> Tensor:
    """The sum of each token's rows, times its scores."""
    num_tokens, num_chosen = scores_NK.shape
    by_token = rows_MH[groups.places].view(num_tokens, num_chosen, -1)
    return torch.bmm(scores_NK[:, None].to(rows_MH.dtype), by_token)[:, 0]


def _project(
    x_MI: Tensor,
    name: str,
    weight_EOI: Tensor,
    bias_EO: Tensor | None,
    groups: Groups,
    adapters: Sequence[AdapterRows],
) -> tuple[Tensor, list[Tensor]]:
    """x W' + b of each row's expert with its adapter's part, and x A' of each adapter's rows."""
    experts = for_device(x_MI.device).experts
    y_MO = experts.multiply(x_MI, weight_EOI.transpose(1, 2), groups)
    if bias_EO is not None:
        y_MO.add_(_by_row(bias_EO, groups))
    lows: list[Tensor] = []
    for adapter in adapters:
        a, b = adapter.pairs[name]
        low = experts.multiply(adapter.rows_of(x_MI), a.transpose(1, 2), adapter.groups)
        if adapter.places is None:
            experts.multiply(low, b.transpose(1, 2), groups, out=y_MO, alpha=adapter.scale, is_added=True)
        else:
            adapter.add_to(y_MO, experts.multiply(low, b.transpose(1, 2), adapter.groups, alpha=adapter.scale))
        lows.append(low)
    return y_MO, lows


def _by_row(bias_EO: Tensor, groups: Groups) -> Tensor:
    """The bias [M, O] of each row's expert."""
    owners = torch.searchsorted(groups.ends, torch.arange(len(groups.order), device=bias_EO.device), right=True)
    return bias_EO[owners]


def experts_backward(
    dy_NH: Tensor, x_NH: Tensor, weights: ExpertWeights, kept: KeptExperts, grads: ExpertWeights | None
) -> tuple[Tensor, Tensor]:
    """Gradients of x [N, H] and of the scores [N, K]; those of adapters, and of all weights, are added in place."""
    groups, (num_tokens, num_chosen) = kept.groups, kept.choice.shape
    tokens, scores_M = groups.order // num_chosen, kept.scores.flatten()[groups.order][:, None].to(dy_NH.dtype)
    act = weights.gate.forward(kept.gate_up)
    dout = dy_NH[tokens]
    dact, dlows = _input_gradient(dout, weights.down_name, weights.down, groups, kept.adapters)
    # The gradient of a score is dy . out, and out = act Wd' + b: so `out` itself need not be kept.
    dscores_M = (dact.float() * act.float()).sum(dim=-1)
    if weights.down_bias is not None:
        dscores_M += (dout.float() * _by_row(weights.down_bias, groups).float()).sum(dim=-1)
    dout.mul_(scores_M)
    _add_adapter_gradients(act, dout, weights.down_name, (dlows, kept.low_down), kept.adapters, scores_M)
    _add_weight_gradients(grads and (grads.down, grads.down_bias), dout, act, groups)
    del act, dout
    dgate_up = weights.gate.backward(dact.mul_(scores_M), kept.gate_up)
    rows = x_NH[tokens]
    dx_MH, dlows = _input_gradient(dgate_up, weights.gate_up_name, weights.gate_up, groups, kept.adapters)
    _add_adapter_gradients(rows, dgate_up, weights.gate_up_name, (dlows, kept.low_gate_up), kept.adapters, None)
    _add_weight_gradients(grads and (grads.gate_up, grads.gate_up_bias), dgate_up, rows, groups)
    dx_NH = dx_MH[groups.places].view(num_tokens, num_chosen, -1).sum(dim=1)
    return dx_NH, dscores_M[groups.places].view(num_tokens, num_chosen)


def _input_gradient(
    dy_MO: Tensor, name: str, weight_EOI: Tensor, groups: Groups, adapters: Sequence[AdapterRows]
) -> tuple[Tensor, list[Tensor]]:
    """d loss / d x [M, I], and d loss / d (x A') of each adapter's rows."""
    experts = for_device(dy_MO.device).experts
    dx_MI = experts.multiply(dy_MO, weight_EOI, groups)
    dlows: list[Tensor] = []
    for adapter in adapters:
        a, b = adapter.pairs[name]
        dlow = experts.multiply(adapter.rows_of(dy_MO), b, adapter.groups, alpha=adapter.scale)
        adapter.add_to(dx_MI, experts.multiply(dlow, a, adapter.groups))
        dlows.append(dlow)
    return dx_MI, dlows


def _add_adapter_gradients(
    x_MI: Tensor,
    dy_MO: Tensor,
    name: str,
    lows: tuple[Sequence[Tensor], Sequence[Tensor]],
    adapters: Sequence[AdapterRows],
    scores_M: Tensor | None,
) -> None:
    """dA += (scores dlow)' x and dB += scale dy' low, of every adapter that is trained; `lows` are (dlow, low)."""
    experts = for_device(x_MI.device).experts
    for adapter, dlow, low in zip(adapters, *lows, strict=True):
        if adapter.grads is None or name not in adapter.grads:
            continue
        grad_a, grad_b = adapter.grads[name]
        scaled = dlow if scores_M is None else dlow * adapter.rows_of(scores_M)
        experts.add_outer(scaled, adapter.rows_of(x_MI), adapter.groups, grad_a, 1.0)
        experts.add_outer(adapter.rows_of(dy_MO), low, adapter.groups, grad_b, adapter.scale)


def _add_weight_gradients(
    grads: tuple[Tensor, Tensor | None] | None, dy_MO: Tensor, x_MI: Tensor, groups: Groups
) -> None:
    """dW += dy' x and db += sum of dy, of each expert."""
    if grads is None:
        return
    for_device(x_MI.device).experts.add_outer(dy_MO, x_MI, groups, grads[0], 1.0)
    if grads[1] is not None:
        owners = torch.searchsorted(groups.ends, torch.arange(len(dy_MO), device=dy_MO.device), right=True)
        grads[1].index_add_(0, owners, dy_MO.to(grads[1].dtype))
