"""A decoder stack, fused: our hot path for sampling and training.

It runs every model whose block (`models/blocks.py`) has only parts that the fused kernels support: Llama, Qwen2, Qwen3
and others like them. transformers loads the weights and remains the reference. Here projections that share an input
are joined into one product, the steps between products are fused (`engine/ops`), and one hand-written backward pass
keeps only what it needs (`kept.py`). Other models run transformers' own modelling code.

    h, x = add_norm(h, from the layer before)          x = norm of the residual stream h
    q, k, v = rotate(x Wqkv')                          head norms, rotary position, into the KV cache when sampling
    h, x = add_norm(h, attention(q, k, v) Wo')
    from the layer = swiglu(x Wgate_up') Wdown'

Every product takes its adapters' low-rank parts along (`lora_products.py`). After its attention, the last layer runs
on the rows that are asked for alone: in a dialogue, those that a trained token follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, nn

from turnwise.engine.attention.plans import AttentionPlan, PagedPlan, TreePlan
from turnwise.engine.model.kept import kept_bytes
from turnwise.engine.model.lora import LinearGroup, LoraLinear, Route
from turnwise.engine.model.lora_products import (
    NormedInput,
    SpanWeights,
    add_a_gradients,
    input_gradient,
    project,
    read_spans,
    spans_of_rows,
)
from turnwise.engine.ops import for_device
from turnwise.engine.ops.interface import Heads, Rotation, Saved
from turnwise.models.blocks import BlockSpec
from turnwise.models.facts import ModelSizes

SUPPORTED: Mapping[str, tuple[str, ...]] = {
    "norm": ("rms",),
    "norm_place": ("before",),
    "head_norm": ("none", "rms"),
    "rotation": ("halves",),
    "angles": ("default", "linear", "llama3", "yarn"),
    "attention": ("full",),
    "mlp": ("gated",),
    "activation": ("silu",),
}
"""By field of `BlockSpec`: the kinds that the fused kernels compute. These angles do not depend on a pass's length."""
MOST_ROWS = 0.75
"""When more than this share of the rows is asked for, the last layer runs on all."""


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    qkv: LinearGroup
    heads: Heads
    out: LinearGroup
    inner_norm: Tensor
    gate_up: LinearGroup
    down: LinearGroup

    @property
    def groups(self) -> tuple[LinearGroup, ...]:
        return self.qkv, self.out, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The rows that leave the stack, and the adapters' places among them."""

    rows: Tensor
    spans: list[SpanWeights]


@dataclass(slots=True)
class _LayerSaved:
    """What one layer's backward pass needs of its forward pass; a CPU does without `x` and `inner_x`."""

    h: Tensor
    rstd: Tensor
    x: Tensor | None
    low_qkv: list[Tensor]
    qkv: Tensor | None
    attention: Saved
    low_out: list[Tensor]
    inner_h: Tensor
    inner_rstd: Tensor
    inner_x: Tensor | None
    low_gate_up: list[Tensor]
    gate_up: Tensor
    low_down: list[Tensor]

    def tensors(self) -> list[Tensor]:
        """Everything that is kept; some tensors share their memory."""
        found: list[Tensor] = []
        for field in fields(self):
            value = getattr(self, field.name)
            found += [] if value is None else [value] if isinstance(value, Tensor) else value
        return found


@dataclass(frozen=True, slots=True)
class _LayerInput:
    """All that is kept of a layer whose activations are computed again in backward."""

    h: Tensor
    delta: Tensor | None


@dataclass(slots=True)
class _Room:
    """Where a layer leaves what nobody keeps, for the next layer to write over.

    Freed one by one, such tensors leave gaps between those that are kept, and a pass takes a third more memory.
    """

    normed: Tensor | None = None
    act: Tensor | None = None


class FusedBody:
    """Embedding, layers and last norm of one model; `supports` says whether a model can run here."""

    def __init__(self, model: nn.Module, device: torch.device, sizes: ModelSizes) -> None:
        assert sizes.block is not None, "ask `supports` first"
        self._model: Any = model
        self.sizes = sizes
        self.block: BlockSpec = sizes.block
        names = self.block.names
        self.eps = self.block.norm_eps
        self.scale = sizes.head_size**-0.5
        self.layers = [self._read_layer(layer) for layer in model.get_submodule(names.layers).children()]
        self.groups = [group for layer in self.layers for group in layer.groups]
        self.embedding = model.get_submodule(names.embedding)
        self.last_norm = _weight(model, names.last_norm)
        self.ops = for_device(device)
        self._keeps_normed = self.ops.facts.keeps_normed_inputs
        self._angles = self._read_angles(int(self._model.config.max_position_embeddings), device)
        self._anchor = torch.zeros(1, device=device, requires_grad=True)
        self.most_kept_bytes: int | None = None
        """A pass that would keep more than this for its backward pass computes each layer again instead."""

    @staticmethod
    def supports(sizes: ModelSizes) -> bool:
        """Whether the fused kernels compute every part of the model's blocks."""
        block = sizes.block
        if block is None or sizes.head_size % 2:
            return False
        return all(getattr(block, part) in kinds for part, kinds in SUPPORTED.items())

    def _read_angles(self, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin [P, D / 2] of every position, by the model's own rule."""
        like = torch.empty(0, dtype=torch.float32, device=device)
        rotation = self._model.get_submodule(self.block.names.rotation)
        cos, sin = rotation(like, torch.arange(num_positions, device=device)[None])
        half = cos.shape[-1] // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

    def _read_layer(self, layer: nn.Module) -> _Layer:
        names, sizes = self.block.names, self.sizes
        is_normed = self.block.head_norm == "rms"
        heads = Heads(
            num_query=sizes.num_heads,
            num_kv=sizes.num_kv_heads,
            size=sizes.head_size,
            query_norm=_weight(layer, names.query_norm) if is_normed else None,
            key_norm=_weight(layer, names.key_norm) if is_normed else None,
            eps=self.eps,
        )
        return _Layer(
            input_norm=_weight(layer, names.input_norm),
            qkv=_join(layer, names.query, names.key, names.value),
            heads=heads,
            out=_join(layer, names.out),
            inner_norm=_weight(layer, names.inner_norm),
            gate_up=_join(layer, names.gate, names.up),
            down=_join(layer, names.down),
        )

    def hidden(
        self, input_ids: Tensor, position_ids: Tensor, plan: AttentionPlan, route: Route, rows: Tensor | None = None
    ) -> Tensor:
        """Last hidden states [N, H], or those of `rows` (sorted) alone.

        With gradients on and adapters in the route, backward can start from them.
        """
        if rows is not None and not 0 < len(rows) <= MOST_ROWS * len(input_ids):
            return self.hidden(input_ids, position_ids, plan, route)[rows]
        embedded = self.embedding(input_ids)
        rotation = Rotation(*self._angles, position_ids)
        spans = read_spans(route, embedded.dtype)
        wanted = None if rows is None else _Wanted(rows, spans_of_rows(spans, rows, len(input_ids)))
        first = self._first_trained(spans)
        if torch.is_grad_enabled() and first is not None:
            assert isinstance(plan, TreePlan), "training runs over a prefix tree"
            return _Stack.apply(self._anchor, self, embedded, rotation, plan, spans, first, wanted)
        with torch.no_grad():
            return self._forward(embedded, rotation, plan, route, spans, wanted)[0]

    def keeps_all(self, embedded: Tensor, spans: Sequence[SpanWeights]) -> bool:
        """Whether there is room for what every layer's backward pass reads; else only the layers' inputs are kept."""
        if self.most_kept_bytes is None:
            return True
        rank = max((a.shape[0] for span in spans for a, _ in span.pairs.values()), default=0)
        in_layer = kept_bytes(self.sizes, embedded.itemsize, rank, self.ops.facts)
        return len(embedded) * len(self.layers) * in_layer <= self.most_kept_bytes

    def _first_trained(self, spans: Sequence[SpanWeights]) -> int | None:
        """The lowest layer that holds an adapter's gradient; what lies below it needs no backward pass."""
        for index, layer in enumerate(self.layers):
            names = [name for group in layer.groups for name in group.names]
            if any(span.grads is not None and name in span.grads for span in spans for name in names):
                return index
        return None

    def _forward(
        self,
        h: Tensor,
        rotation: Rotation,
        plan: AttentionPlan,
        route: Route,
        spans: Sequence[SpanWeights],
        wanted: _Wanted | None,
        saved: list[_LayerSaved | _LayerInput] | None = None,
        first_saved: int = 0,
        keeps_all: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normed hidden states of the wanted rows, the residual stream before the last norm, and its 1 / rms."""
        delta = None
        room = None if saved is None or self._keeps_normed else _Room()
        for index in range(len(self.layers)):
            before = _LayerInput(h, delta)
            h, delta, kept = self._forward_layer(index, before, rotation, plan, route, spans, wanted, room)
            if saved is not None and index >= first_saved:
                saved.append(kept if keeps_all else before)
            del before, kept  # what nobody keeps is freed before the next layer runs
        h, x, rstd = self.ops.layers.add_norm(h, delta, self.last_norm, self.eps)
        return x, h, rstd

    def _forward_layer(
        self,
        index: int,
        before: _LayerInput,
        rotation: Rotation,
        plan: AttentionPlan,
        route: Route,
        spans: Sequence[SpanWeights],
        wanted: _Wanted | None,
        room: _Room | None = None,
    ) -> tuple[Tensor, Tensor, _LayerSaved]:
        """The residual stream, what the MLP adds to it, and what backward needs."""
        ops, layer = self.ops.layers, self.layers[index]
        h, x, rstd = self._add_norm(before.h, before.delta, layer.input_norm, room)
        qkv, low_qkv = project(layer.qkv, x, route, spans)
        cache = plan.cache_slots(index) if isinstance(plan, PagedPlan) else None
        q, k, v = ops.rotate(qkv, layer.heads, rotation, cache)
        attention = self._attend(index, q, k, v, plan)
        mixed, kept_h = attention.out[0].flatten(1), h
        if wanted is not None and layer is self.layers[-1]:
            mixed, kept_h, spans = mixed[wanted.rows], h[wanted.rows], wanted.spans
        attended, low_out = project(layer.out, mixed, route, spans)
        inner_h, inner_x, inner_rstd = self._add_norm(kept_h, attended, layer.inner_norm, room)
        gate_up, low_gate_up = project(layer.gate_up, inner_x, route, spans)
        delta, low_down = project(layer.down, self._swiglu(gate_up, room), route, spans)
        raw = None if layer.heads.query_norm is None else qkv
        if not self._keeps_normed:
            x = inner_x = None
        early = (h, rstd, x, low_qkv, raw, attention, low_out)
        return inner_h, delta, _LayerSaved(*early, inner_h, inner_rstd, inner_x, low_gate_up, gate_up, low_down)

    def _add_norm(
        self, h: Tensor, delta: Tensor | None, weight: Tensor, room: _Room | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if room is None:
            return self.ops.layers.add_norm(h, delta, weight, self.eps)
        h, x, rstd = self.ops.layers.add_norm(h, delta, weight, self.eps, room=room.normed)
        room.normed = x
        return h, x, rstd

    def _swiglu(self, gate_up: Tensor, room: _Room | None) -> Tensor:
        if room is None:
            return self.ops.layers.swiglu(gate_up)
        act = self.ops.layers.swiglu(gate_up, room=room.act)
        room.act = act
        return act

    def _attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Saved:
        query, key, value = (side.transpose(0, 1)[None] for side in (q, k, v))
        if isinstance(plan, TreePlan):
            return Saved(query, key, value, *self.ops.attention.tree_forward(query, key, value, plan, self.scale))
        assert isinstance(plan, PagedPlan), "sampling runs over a paged cache"
        return Saved(query, key, value, plan.attend_written(index, query, key, value, self.scale), query)

    def _backward(
        self,
        dh: Tensor,
        rotation: Rotation,
        plan: TreePlan,
        spans: Sequence[SpanWeights],
        saved: list[_LayerSaved | _LayerInput],
        first: int,
        wanted: _Wanted | None,
    ) -> None:
        """From the gradient of the residual stream after the last layer, at the wanted rows, down to layer `first`."""
        ops = self.ops.layers
        for index in range(len(self.layers) - 1, first - 1, -1):
            layer, kept = self.layers[index], saved.pop()
            if isinstance(kept, _LayerInput):
                _, _, kept = self._forward_layer(index, kept, rotation, plan, Route(), spans, wanted)
            only = wanted if layer is self.layers[-1] else None
            own = spans if only is None else only.spans
            dact, dlow = input_gradient(layer.down, dh, kept.low_down, own)
            dgate_up, act = ops.swiglu_backward(dact, kept.gate_up)
            add_a_gradients(layer.down, act, dlow, own)
            dx, dlow = input_gradient(layer.gate_up, dgate_up, kept.low_gate_up, own)
            normed = NormedInput(kept.inner_h, kept.inner_rstd, layer.inner_norm)
            add_a_gradients(layer.gate_up, normed if kept.inner_x is None else kept.inner_x, dlow, own)
            dh = ops.norm_backward(dx, kept.inner_h, kept.inner_rstd, layer.inner_norm, dh)
            dmixed, dlow = input_gradient(layer.out, dh, kept.low_out, own)
            out = kept.attention.out
            mixed = out[0].flatten(1)
            add_a_gradients(layer.out, mixed if only is None else mixed[only.rows], dlow, own)
            if only is not None:
                dmixed, dh = (_spread(grad, only.rows, len(mixed)) for grad in (dmixed, dh))
            grads = self.ops.attention.tree_backward(dmixed.view(out.shape), kept.attention, plan, self.scale)
            dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
            dqkv = ops.rotate_backward((dq, dk, dv), kept.qkv, layer.heads, rotation)
            dx, dlow = input_gradient(layer.qkv, dqkv, kept.low_qkv, spans, need_input=index > first)
            normed = NormedInput(kept.h, kept.rstd, layer.input_norm)
            add_a_gradients(layer.qkv, normed if kept.x is None else kept.x, dlow, spans)
            if dx is not None:
                dh = ops.norm_backward(dx, kept.h, kept.rstd, layer.input_norm, dh)


class _Stack(torch.autograd.Function):
    """All layers as one step of autograd; the adapters' gradients are added where they belong, not returned."""

    @staticmethod
    def forward(ctx, anchor, body, embedded, rotation, plan, spans, first, wanted):  # noqa: ARG004 - the anchor asks for a gradient
        saved: list[_LayerSaved | _LayerInput] = []
        keeps_all = body.keeps_all(embedded, spans)
        x, h, rstd = body._forward(embedded, rotation, plan, Route(), spans, wanted, saved, first, keeps_all)
        ctx.kept = (body, rotation, plan, spans, first, wanted, saved, h, rstd)
        ctx.kept_blocks = saved
        return x

    @staticmethod
    def backward(ctx, dx):
        body, rotation, plan, spans, first, wanted, saved, h, rstd = ctx.kept
        ctx.kept = ctx.kept_blocks = None
        dh = body.ops.layers.norm_backward(dx.contiguous(), h, rstd, body.last_norm, None)
        body._backward(dh, rotation, plan, spans, saved, first, wanted)
        return (torch.zeros(1, device=dx.device),) + (None,) * 7


def _spread(grad: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """The gradient of all rows, when only `rows` were read."""
    return grad.new_zeros(num_rows, grad.shape[1]).index_add_(0, rows, grad)


def _weight(module: nn.Module, name: str) -> Tensor:
    return module.get_parameter(f"{name}.weight").detach()


def _join(layer: nn.Module, *names: str) -> LinearGroup:
    return LinearGroup.join([cast(LoraLinear, layer.get_submodule(name)) for name in names])
