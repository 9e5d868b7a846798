"""LoRA adapters of different ranks and targets on one frozen base, side by side in one batch.

A forward pass over packed tokens carries a `Route`: which span of tokens belongs to which adapter. Every linear
computes y = x W' (+ b) once for all tokens and adds scale * (x A') B' on each span (A' = transpose). An
adapter's weights are views into one flat float32 tensor, so that optimizer, snapshot and norm are single calls. The
routed experts of a layer have their A and B side by side: A [E, r, I], B [E, O, r] (`expert_products.py`).

Shape legend: N packed tokens, I inputs, O outputs, r rank, E experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from turnwise.engine.model.ordered_low_rank import TILE_ROWS, add_in_order
from turnwise.engine.ops import for_device
from turnwise.engine.ops.interface import Ops
from turnwise.models.linears import Shape, adapted_linears, check_kinds
from turnwise.types import LoraConfig

if TYPE_CHECKING:
    from turnwise.engine.model.full import FullRoute

LORA_ALPHA = 32.0
"""The scale is alpha / rank, so that a good learning rate does not depend on the rank."""

_versions = itertools.count(1)


class LoraWeights:
    """The A [r, I] and B [O, r] of every targeted linear, as views into one flat float32 tensor."""

    full: FullRoute | None = None
    """Set if all weights of the model are a policy's own (`full.py`); then there are no A and B."""

    grad_pairs: dict[str, tuple[Tensor, Tensor]] | None = None
    """The tensors to which a backward pass adds the gradients of A and B; None for weights that are not trained."""

    def __init__(self, lora: LoraConfig, shapes: Mapping[str, Shape], flat: Tensor) -> None:
        self.lora = lora
        self.shapes = dict(shapes)
        self.scale = LORA_ALPHA / lora.rank
        self.expert_scale = next((LORA_ALPHA / s.rank(lora) for s in shapes.values() if s.experts), 1.0)
        """The scale of adapters on routed experts, whose rank is another one."""
        self.flat = flat
        self.pairs = split_pairs(flat, shapes, lora)

    def span(self, start: int, stop: int) -> Span:
        """The route of packed tokens [start, stop) through these weights."""
        return Span(start, stop, self)

    def cast(self, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
        """The pairs in the activations' dtype, outside autograd. Pairs that have this dtype are not copied."""
        with torch.no_grad():
            if all(a.dtype is dtype for a, _ in self.pairs.values()):
                return {name: (a.detach(), b.detach()) for name, (a, b) in self.pairs.items()}
            return split_pairs(self.flat.to(dtype), self.shapes, self.lora)


def num_parameters(shapes: Mapping[str, Shape], lora: LoraConfig) -> int:
    return sum(shape.num_adapter_values(lora) for shape in shapes.values())


def split_pairs(flat: Tensor, shapes: Mapping[str, Shape], lora: LoraConfig) -> dict[str, tuple[Tensor, Tensor]]:
    """Views of `flat` as {linear: (A, B)}, in the order of `shapes`; with a first axis for experts."""
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    offset = 0
    for name, shape in shapes.items():
        rank, experts = shape.rank(lora), (shape.experts,) if shape.experts else ()
        middle = offset + rank * shape.inputs * max(1, shape.experts)
        stop = offset + shape.num_adapter_values(lora)
        a = flat[offset:middle].view(*experts, rank, shape.inputs)
        b = flat[middle:stop].view(*experts, shape.outputs, rank)
        pairs[name] = (a, b)
        offset = stop
    return pairs


class Policy(LoraWeights):
    """Published weights. They never change, and their `version` marks every KV block computed with them."""

    def __init__(self, lora: LoraConfig, shapes: Mapping[str, Shape], flat: Tensor, dtype: torch.dtype):
        super().__init__(lora, shapes, flat)
        self.version = next(_versions)
        self.pairs = split_pairs(flat.to(dtype), shapes, lora)

    @property
    def has_adapter(self) -> bool:
        """False for the frozen base model, which is a policy that changes no linear."""
        return bool(self.pairs)


def base_policy() -> Policy:
    """The frozen base model as a policy."""
    return Policy(LoraConfig(), {}, torch.zeros(0), torch.float32)


@dataclass(frozen=True, slots=True)
class Span:
    """Packed tokens [start, stop) run with `weights`. Spans do not overlap; tokens in no span use the base alone."""

    start: int
    stop: int
    weights: LoraWeights


@dataclass(frozen=True, slots=True)
class BankRoute:
    """Rows of many adapters, by tiles of rows that share one (`lora_bank.py`)."""

    banks: Mapping[str, Any]
    """The banks (A and B of all slots), by group of linears."""
    generation: int
    """How many times the layout of the banks was rebuilt."""
    runs: Sequence[tuple[int, int, int]]
    """(first row, rows, slot) of each adapter's neighbouring rows."""
    tiles: Tensor
    """[3, T] int32: the runs, cut into tiles."""
    experts: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """A [slots * E, R, I] and B [slots * E, O, R] of routed experts, scale included."""

    def slots_of_rows(self, num_rows: int) -> Tensor:
        """[num_rows] int64: the slot of each row's adapter, -1 for rows of the base model."""
        first, count, slot = self.tiles.long()
        within = torch.arange(TILE_ROWS, device=first.device)
        rows = torch.where(within < count[:, None], first[:, None] + within, num_rows)
        slots = torch.full((num_rows + 1,), -1, device=first.device)
        return slots.index_copy_(0, rows.flatten(), slot.repeat_interleave(TILE_ROWS))[:num_rows]

    def add(self, group: str, x_NI: Tensor, y_NO: Tensor) -> None:
        """Compute y += scale (x A') B' for every row with its own adapter."""
        bank = self.banks.get(group)
        if bank is not None:  # otherwise no adapter targets these linears
            add_low_rank = for_device(x_NI.device).add_low_rank
            assert add_low_rank is not None, "there are banks only where a kernel reads them"
            add_low_rank(x_NI, bank.a, bank.b, bank.members, self.tiles, y_NO)


@dataclass(slots=True)
class Route:
    """Which weights each packed token of a forward pass runs with."""

    spans: Sequence[Span] = ()
    merged: Mapping[str, Tensor] | None = None
    """Weights used in place of the base's, with an adapter already added; then there are no spans."""
    bank: BankRoute | None = None
    """Many adapters in one launch, for sampling on a GPU; then there are no spans."""
    full: FullRoute | None = None
    """All weights of the model in place of the base's, for every token; then there are no spans."""
    routing: Routing | None = None
    """Whether the choice of experts is recorded or replayed; None: neither."""
    ops: Ops | None = None
    """What computes the pass; None: what the device usually does."""

    def ops_for(self, device: torch.device) -> Ops:
        return for_device(device) if self.ops is None else self.ops

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Route:
        """The route of a pass over these spans. Weights that replace the whole model have a pass to themselves."""
        full = [span.weights.full for span in spans if span.weights.full is not None]
        if not full:
            return cls(spans=spans)
        assert len(spans) == 1, "tokens of other weights run in a pass of their own"
        return cls(full=full[0])


class Routing(Protocol):
    """Sees, and may replace, the experts that a router chose (`routing.py`)."""

    def choose(self, layer: int, own_NK: Tensor, rows: Tensor | None) -> Tensor:
        """The experts [N, K] that tokens use in the layer, given the router's own choice for them.

        Args:
            layer: the number of the layer among those with experts.
            rows: the tokens of the pass that `own_NK` is about; None: all.
        """
        ...


@dataclass(slots=True)
class RouteHolder:
    """Shared by all linears of one model; the engine sets the route for each forward pass."""

    route: Route = field(default_factory=Route)


class LoraLinear(nn.Module):
    """A frozen linear with the adapters of the current route."""

    def __init__(self, base: nn.Linear, name: str, holder: RouteHolder) -> None:
        super().__init__()
        self.weight = base.weight
        self.bias = base.bias
        self.name = name
        self.holder = holder
        self.in_features, self.out_features = base.in_features, base.out_features

    def forward(self, x: Tensor) -> Tensor:
        route = self.holder.route
        if route.full is not None:  # `CausalModel.hidden` has put the route's weights in place of this module's
            return nn.functional.linear(x, self.weight, self.bias)
        flat = x.reshape(-1, self.in_features)
        y = self.apply_route(flat, route)
        return y.view(*x.shape[:-1], self.out_features)

    def apply_route(self, x_NI: Tensor, route: Route) -> Tensor:
        ops = route.ops_for(x_NI.device)
        linear = ops.products.linear
        if route.full is not None:
            views = route.full.weights.views_of(self.name)
            return linear(x_NI, *views)
        if route.merged is not None:
            return linear(x_NI, route.merged.get(self.name, self.weight), self.bias)
        if route.bank is not None:
            y = linear(x_NI, self.weight, self.bias)
            route.bank.add(self.name, x_NI, y)
            return y
        spans = [span for span in route.spans if self.name in span.weights.pairs]
        if torch.is_grad_enabled() and (spans or self.weight.dtype is not x_NI.dtype):
            bounds = tuple((span.start, span.stop, span.weights.scale) for span in spans)
            pairs = [tensor for span in spans for tensor in span.weights.pairs[self.name]]
            return _LoraMatmul.apply(x_NI, self.weight, self.bias, bounds, *pairs)
        if torch.is_grad_enabled():
            return nn.functional.linear(x_NI, self.weight, self.bias)
        y = linear(x_NI, self.weight, self.bias)
        for span in spans:
            a, b = span.weights.pairs[self.name]
            if ops.is_bitwise:
                own = slice(0, self.out_features), (a.to(x_NI.dtype), b.to(x_NI.dtype))
                add_in_order(x_NI, y, slice(span.start, span.stop), [own], span.weights.scale, ops)
                continue
            low = x_NI[span.start : span.stop] @ a.to(x_NI.dtype).t()
            y[span.start : span.stop].addmm_(low, b.to(x_NI.dtype).t(), alpha=span.weights.scale)
        return y


@dataclass(frozen=True, slots=True)
class LinearGroup:
    """Linears that read the same input. Their weights are in one tensor, so one product serves all."""

    name: str
    names: tuple[str, ...]
    bounds: Mapping[str, slice]
    """The range of outputs of each linear."""
    weight: Tensor
    """[O, I] the weights of all linears."""
    bias: Tensor | None

    @staticmethod
    def join(linears: Sequence[LoraLinear]) -> LinearGroup:
        """Join the linears. Their own weights become views of the joined tensor, so there is still one copy."""
        names = tuple(linear.name for linear in linears)
        stops = list(itertools.accumulate(linear.out_features for linear in linears))
        bounds = {
            linear.name: slice(stop - linear.out_features, stop) for linear, stop in zip(linears, stops, strict=True)
        }
        if len(linears) == 1:
            bias = linears[0].bias
            return LinearGroup(
                names[0], names, bounds, linears[0].weight.detach(), None if bias is None else bias.detach()
            )
        weight = torch.cat([linear.weight.detach() for linear in linears])
        for linear in linears:
            linear.weight = nn.Parameter(weight[bounds[linear.name]], requires_grad=False)
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        assert len(biases) in (0, len(linears)), "all of a group's linears have a bias, or none"
        return LinearGroup("+".join(names), names, bounds, weight, torch.cat(biases) if biases else None)

    def members(self, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> list[tuple[slice, tuple[Tensor, Tensor]]]:
        """(outputs, (A, B)) of the linears that `pairs` adapts."""
        return [(self.bounds[name], pairs[name]) for name in self.names if name in pairs]


class _LoraMatmul(torch.autograd.Function):
    """Base product plus every span's low-rank product; the base is frozen, so backward forms no gradient for it."""

    @staticmethod
    def forward(ctx, x_NI, weight, bias, bounds, *pairs):
        y = for_device(x_NI.device).products.linear(x_NI, weight, bias)
        lows = []
        for (start, stop, scale), a, b in zip(bounds, pairs[::2], pairs[1::2], strict=True):
            low = x_NI[start:stop] @ a.to(x_NI.dtype).t()
            y[start:stop].addmm_(low, b.to(x_NI.dtype).t(), alpha=scale)
            lows.append(low)
        ctx.bounds = bounds
        ctx.save_for_backward(x_NI, weight, *lows, *pairs)
        return y

    @staticmethod
    def backward(ctx, dy):
        x_NI, weight, *rest = ctx.saved_tensors
        num_spans = len(ctx.bounds)
        lows, pairs = rest[:num_spans], rest[num_spans:]
        dx = None
        if ctx.needs_input_grad[0]:
            dx = dy @ weight if weight.dtype is dy.dtype else for_device(dy.device).products.multiply(dy, weight)
        grads = []
        for (start, stop, scale), low, a, b in zip(ctx.bounds, lows, pairs[::2], pairs[1::2], strict=True):
            dy_span = dy[start:stop]
            dlow = (dy_span @ b.to(dy.dtype)).mul_(scale)
            grads.append((dlow.t() @ x_NI[start:stop]).to(a.dtype))
            grads.append((dy_span.t() @ low).to(b.dtype).mul_(scale))
            if dx is not None:
                dx[start:stop].addmm_(dlow, a.to(dy.dtype))
        return dx, None, None, None, *grads


def target_shapes(shapes: Mapping[str, Shape], lora: LoraConfig) -> dict[str, Shape]:
    """The matrices that `lora` puts an adapter on, of all that can carry one."""
    check_kinds(shapes, lora)
    return adapted_linears(shapes, lora)


def merge_into(
    target: dict[str, Tensor], matrices: Mapping[str, Tensor], groups: Sequence[LinearGroup], policy: Policy
) -> None:
    """Fill `target` with base + scale * B A for every matrix that the policy adapts; buffers are reused.

    The weights of a group are joined there too, under the group's name.
    """
    joined = {group.name: group for group in groups if any(name in policy.pairs for name in group.names)}
    wanted = set(policy.pairs) | set(joined) | {name for group in joined.values() for name in group.names}
    for stale in [name for name in target if name not in wanted]:
        del target[stale]
    for group in joined.values():
        if group.name not in target:
            target[group.name] = group.weight.clone()
            target.update({name: target[group.name][bounds] for name, bounds in group.bounds.items()})
    for name, (a, b) in policy.pairs.items():
        base = matrices[name]
        if name not in target:
            target[name] = torch.empty_like(base, requires_grad=False)
        scale = policy.expert_scale if a.dim() == 3 else policy.scale
        if base.dtype is not a.dtype:  # the sum is rounded once
            each = zip(target[name], base, b, a, strict=True) if a.dim() == 3 else [(target[name], base, b, a)]
            for merged, own, own_b, own_a in each:
                merged.copy_(torch.addmm(own.float(), own_b.float(), own_a.float(), alpha=scale))
        elif a.dim() == 3:
            torch.baddbmm(base, b, a, alpha=scale, out=target[name])
        else:
            torch.addmm(base, b, a, alpha=scale, out=target[name])
