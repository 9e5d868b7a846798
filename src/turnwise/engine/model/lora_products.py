"""Products of a group of linears and of the adapters on them, forward and backward.

Linears that read the same input are one product; every adapter adds scale (x A') B' on its span of the packed tokens.
The base is frozen: backward computes only gradients of activations and, in place, of adapters.

Shape legend: N packed tokens, I inputs, O outputs of a group, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from turnwise.engine.model.lora import LinearGroup, Route
from turnwise.engine.model.ordered_low_rank import add_in_order
from turnwise.engine.ops import for_device
from turnwise.engine.ops.interface import Ops, ProductOps


@dataclass(frozen=True, slots=True)
class SpanWeights:
    """One adapter's part in one pass: its weights in the activations' dtype, and where its gradients go."""

    start: int
    stop: int
    scale: float
    pairs: dict[str, tuple[Tensor, Tensor]]
    grads: dict[str, tuple[Tensor, Tensor]] | None
    expert_scale: float = 1.0
    """The scale of the parts on routed experts."""
    stacks: dict[str, Tensor] = field(default_factory=dict)
    """The results of `stacked` by group, for the backward pass."""

    def stacked(self, group: LinearGroup) -> Tensor:
        """The A of every member of a group, one below the other [members * r, I]."""
        if group.name not in self.stacks:
            own = [a for _, (a, _) in group.members(self.pairs)]
            self.stacks[group.name] = own[0] if len(own) == 1 else torch.cat(own)
        return self.stacks[group.name]


@dataclass(frozen=True, slots=True)
class NormedInput:
    """A product's input x = rstd * h * weight that was not kept in memory."""

    h: Tensor
    rstd: Tensor
    weight: Tensor

    def formed(self) -> Tensor:
        """x [N, H] in the dtype of h."""
        return (self.h.float() * self.rstd[:, None]).mul_(self.weight.float()).to(self.h.dtype)

    def times(self, u_Nr: Tensor, rows: slice) -> Tensor:
        """u' x [r, I] of some rows, without forming x: (rstd * u)' h, its columns times `weight`."""
        scaled = u_Nr * self.rstd[rows, None].to(u_Nr.dtype)
        return for_device(u_Nr.device).products.multiply(scaled.t(), self.h[rows]).mul_(self.weight)


def read_spans(route: Route, dtype: torch.dtype) -> list[SpanWeights]:
    if route.merged is not None or route.bank is not None or route.full is not None:
        return []
    spans = []
    for span in route.spans:
        if span.weights.pairs:
            weights = span.weights
            spans.append(
                SpanWeights(
                    span.start,
                    span.stop,
                    weights.scale,
                    weights.cast(dtype),
                    weights.grad_pairs,
                    weights.expert_scale,
                )
            )
    return spans


def spans_of_rows(spans: Sequence[SpanWeights], rows: Tensor, num_tokens: int) -> list[SpanWeights]:
    """The same adapters, with spans over `rows` instead of all tokens."""
    if len(spans) == 1 and spans[0].start == 0 and spans[0].stop == num_tokens:
        return [replace(spans[0], stop=len(rows))]  # all rows; the host can tell without waiting for the device
    edges = torch.tensor([[span.start, span.stop] for span in spans], device=rows.device).view(-1, 2)
    places = torch.searchsorted(rows, edges).tolist()
    return [replace(span, start=start, stop=stop) for span, (start, stop) in zip(spans, places, strict=True)]


def project(
    group: LinearGroup, x_NI: Tensor, route: Route, spans: Sequence[SpanWeights]
) -> tuple[Tensor, list[Tensor]]:
    """x W' + b of a whole group with its adapters' parts, and each span's x A' [n, members * r]."""
    ops = route.ops_for(x_NI.device)
    whole = _whole_span(group, x_NI, spans, ops)
    if whole is not None:
        project_one = _project_joined if ops.facts.prefers_few_launches else _project_whole
        return project_one(group, x_NI, whole, ops.products)
    # `group` belongs to the weights of the route: those of the base, or all of a policy's own.
    weight = group.weight if route.merged is None else route.merged.get(group.name, group.weight)
    y_NO = ops.products.linear(x_NI, weight, group.bias)
    if route.bank is not None:
        route.bank.add(group.name, x_NI, y_NO)
        return y_NO, []
    lows: list[Tensor] = []
    for span in spans:
        if not group.members(span.pairs):
            continue
        if ops.is_bitwise:
            members = [(bounds, span.pairs.get(name)) for name, bounds in group.bounds.items()]
            lows.append(add_in_order(x_NI, y_NO, slice(span.start, span.stop), members, span.scale, ops))
            continue
        low = ops.products.multiply(x_NI[span.start : span.stop], span.stacked(group).t())
        _write_parts(group, low, span, y_NO[span.start : span.stop], ops.products, is_added=True)
        lows.append(low)
    return y_NO, lows


def _write_parts(
    group: LinearGroup, low: Tensor, span: SpanWeights, y_nO: Tensor, products: ProductOps, *, is_added: bool
) -> None:
    """Write scale low B' of every member to its outputs, or add it to them."""
    first = 0
    for bounds, (_, b) in group.members(span.pairs):
        stop = first + b.shape[1]
        products.multiply(low[:, first:stop], b.t(), out=y_nO[:, bounds], alpha=span.scale, is_added=is_added)
        first = stop


def _whole_span(group: LinearGroup, x_NI: Tensor, spans: Sequence[SpanWeights], ops: Ops) -> SpanWeights | None:
    """The span that covers all rows, if the product can include its low-rank part; else None."""
    if len(spans) != 1 or (spans[0].start, spans[0].stop) != (0, len(x_NI)):
        return None
    if not ops.products.takes_low_rank_along(x_NI):
        return None
    num_adapted = sum(name in spans[0].pairs for name in group.names)
    # One product for the whole group needs a low-rank part below each of its outputs.
    is_joined = num_adapted == len(group.names) and group.bias is None
    is_taken = is_joined if ops.facts.prefers_few_launches else num_adapted > 0
    return spans[0] if is_taken else None


def _project_joined(
    group: LinearGroup, x_NI: Tensor, span: SpanWeights, products: ProductOps
) -> tuple[Tensor, list[Tensor]]:
    """`project` with one adapter on every linear of the group: one product adds to what the low-rank parts began."""
    y_NO = x_NI.new_empty(len(x_NI), len(group.weight))
    low = products.multiply(x_NI, span.stacked(group).t())
    _write_parts(group, low, span, y_NO, products, is_added=False)
    return products.multiply(x_NI, group.weight.t(), out=y_NO, is_added=True), [low]


def _project_whole(
    group: LinearGroup, x_NI: Tensor, span: SpanWeights, products: ProductOps
) -> tuple[Tensor, list[Tensor]]:
    """`project` with one adapter: each linear's outputs are written once, its low-rank part included."""
    y_NO = products.empty_rows(x_NI, len(x_NI), len(group.weight))
    low = products.multiply(x_NI, span.stacked(group).t())
    first = 0
    for name in group.names:
        bounds = group.bounds[name]
        weight, own = group.weight[bounds].t(), y_NO[:, bounds]
        if name not in span.pairs:
            products.multiply(x_NI, weight, out=own)
            continue
        b = span.pairs[name][1]
        stop = first + b.shape[1]
        products.multiply_with_low_rank(x_NI, weight, low[:, first:stop], b.t(), out=own, scale=span.scale)
        first = stop
    if group.bias is not None:
        y_NO.add_(group.bias)
    return y_NO, [low]


def input_gradient(
    group: LinearGroup,
    dy_NO: Tensor,
    lows: Sequence[Tensor],
    spans: Sequence[SpanWeights],
    *,
    need_input: bool = True,
) -> tuple[Any, list[Tensor]]:
    """d loss / d x [N, I] (None when nobody needs it) and, per span, d loss / d (x A'); dB += scale dy' low."""
    ops = for_device(dy_NO.device)
    dlows: list[Tensor] = []
    present = [span for span in spans if group.members(span.pairs)]
    for span, low in zip(present, lows, strict=True):
        dlows.append(_low_gradient(group, dy_NO[span.start : span.stop], low, span, ops.products))
    if not need_input:
        return None, dlows
    whole = _whole_span(group, dy_NO, spans, ops)
    if whole is not None:
        return ops.products.multiply_with_low_rank(dy_NO, group.weight, dlows[0], whole.stacked(group)), dlows
    dx_NI = ops.products.multiply(dy_NO, group.weight)
    for span, dlow in zip(present, dlows, strict=True):
        ops.products.multiply(dlow, span.stacked(group), out=dx_NI[span.start : span.stop], is_added=True)
    return dx_NI, dlows


def _low_gradient(group: LinearGroup, dy_NO: Tensor, low: Tensor, span: SpanWeights, products: ProductOps) -> Tensor:
    """d loss / d (x A') [n, members * r] of one span; adds to its dB what the same rows say."""
    rank = low.shape[1] // len(group.members(span.pairs))
    dlow = torch.empty_like(low)
    for i, name in enumerate(name for name in group.names if name in span.pairs):
        own = slice(i * rank, (i + 1) * rank)
        dy, b = dy_NO[:, group.bounds[name]], span.pairs[name][1]
        if span.grads is not None and name in span.grads:
            products.low_rank_gradients(dy, low[:, own], b, span.grads[name][1], out=dlow[:, own], scale=span.scale)
        else:
            products.multiply(dy, b, out=dlow[:, own], alpha=span.scale)
    return dlow


def add_a_gradients(
    group: LinearGroup, x_NI: Tensor | NormedInput, dlows: Sequence[Tensor], spans: Sequence[SpanWeights]
) -> None:
    """dA += dlow' x, for every span that trains."""
    present = [span for span in spans if group.members(span.pairs)]
    for span, dlow in zip(present, dlows, strict=True):
        if span.grads is None:
            continue
        rows, names = slice(span.start, span.stop), [name for name in group.names if name in span.pairs]
        rank = dlow.shape[1] // len(names)
        owned = [(slice(i * rank, (i + 1) * rank), name) for i, name in enumerate(names) if name in span.grads]
        ops = for_device(dlow.device)
        if isinstance(x_NI, Tensor) and ops.facts.prefers_few_launches:
            for own, name in owned:
                ops.products.multiply(dlow[:, own].t(), x_NI[rows], out=span.grads[name][0], is_added=True)
            continue
        # Else x is read once for all members.
        together = ops.products.multiply(dlow.t(), x_NI[rows]) if isinstance(x_NI, Tensor) else x_NI.times(dlow, rows)
        for own, name in owned:
            span.grads[name][0].add_(together[own])
