"""A decoder stack, fused: our hot path for sampling and training.

It runs every model whose block (`models/blocks.py`) has only parts that the fused kernels support: Llama, Qwen2, Qwen3
and others like them. transformers loads the weights and remains the reference. Here projections that share an input
are joined into one product, the steps between products are fused (`engine/ops`), and one hand-written backward pass
keeps only what it needs (`kept.py`). Other models run transformers' own modelling code.

    h, x = add_norm(h, added by the block before)      x = norm of the residual stream h
    q, k, v = rotate(x Wqkv')                          head norms, rotary position, into the KV cache when sampling
    h, x = add_norm(h, attention(q, k, v) Wo')
    added = swiglu(x Wgate_up') Wdown'

Every product includes its adapters' low-rank parts (`lora_products.py`). After its attention, the last block runs only
on the rows that the caller wants: in a dialogue, those that a trained token follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from turnwise.engine.attention.plans import AttentionPlan, GroupedPlan, PagedPlan, TreePlan
from turnwise.engine.model.body_weights import BlockWeights, BodyWeights, embed_tokens, join_linears, weight_of
from turnwise.engine.model.expert_layers import TokenRouter
from turnwise.engine.model.few_rows import SamplerPass, run_in_few_calls
from turnwise.engine.model.fused_parts import is_fused
from turnwise.engine.model.gated_mlp import GatedMlp, Mlp, MlpPass, Scratch
from turnwise.engine.model.kept import FLOAT32_BYTES, KeptRoom, PassSizes
from turnwise.engine.model.kept_block import BlockInput, KeptBlock
from turnwise.engine.model.lora import LinearGroup, Route
from turnwise.engine.model.lora_products import (
    NormedInput,
    SpanWeights,
    add_a_gradients,
    input_gradient,
    project,
    read_spans,
    spans_of_rows,
)
from turnwise.engine.model.parts import Part, PastKeys, cut_sequence
from turnwise.engine.model.rotation import num_table_rows
from turnwise.engine.model.routed_mlp import RoutedMlp
from turnwise.engine.model.trace import EMBEDDING, Trace, layer_part
from turnwise.engine.model.weight_gradients import (
    add_head_norm_gradients,
    add_norm_gradient,
    add_product_gradient,
)
from turnwise.engine.ops.interface import AttentionRule, Heads, Ops, Rotation, Saved
from turnwise.models.blocks import BlockSpec
from turnwise.models.facts import ModelSizes

MOST_ROWS = 0.75
"""If the caller wants more than this share of the rows, the last block runs on all rows."""


@dataclass(frozen=True, slots=True)
class _WantedRows:
    """The rows that the caller wants, and each adapter's rows among them."""

    rows: Tensor
    spans: list[SpanWeights]


@dataclass(frozen=True, slots=True)
class _StackPass:
    """One pass through all blocks: the positions of its tokens, their attention plan, and their adapters."""

    rotation: Rotation
    plan: AttentionPlan
    route: Route
    spans: Sequence[SpanWeights]
    wanted: _WantedRows | None
    weights: BodyWeights
    grads: BodyWeights | None = None
    """The tensors for the gradients of all weights; None if only adapters are trained."""
    scratch: Scratch | None = None
    past: PastKeys | None = None
    """Keys and values of the sequence so far, where the pass runs in parts (`parts.py`)."""


@dataclass(slots=True)
class KeptPass:
    """What the backward pass of the whole stack reads."""

    work: _StackPass
    first: int
    """The lowest block that holds something trained; those below it need no backward pass."""
    keeps_all: bool
    """Whether all that the blocks keep is kept; otherwise backward runs each block again."""
    input_ids: Tensor
    blocks: list[KeptBlock | BlockInput] = field(default_factory=list)
    """What each block kept, from block `first` on."""
    last: tuple[Tensor, Tensor] | None = None
    """The residual stream before the last norm, and its 1 / rms."""


@dataclass(frozen=True, slots=True)
class _KeptParts:
    """A pass over one sequence in parts."""

    work: _StackPass
    """The pass over the whole sequence."""
    first: int
    """The first block, as in `KeptPass`."""
    input_ids: Tensor
    parts: Sequence[Part]


class FusedBody:
    """Embedding, layers and last norm of one model; `supports` says whether a model can run here."""

    def __init__(self, model: nn.Module, ops: Ops, sizes: ModelSizes) -> None:
        assert sizes.block is not None, "ask `supports` first"
        self._model: Any = model
        self.sizes = sizes
        self.spec: BlockSpec = sizes.block
        names = self.spec.names
        self.eps = self.spec.norm_eps
        scale = sizes.head_size**-0.5
        self.rules = [AttentionRule(scale, window) for window in sizes.windows]
        """[blocks] how each block attends."""
        layers = enumerate(model.get_submodule(names.layers).children())
        blocks = [self._read_block(index, layer) for index, layer in layers]
        self.base = BodyWeights(weight_of(model, names.embedding), blocks, weight_of(model, names.last_norm))
        """The frozen weights that were loaded."""
        self.groups = self.base.groups
        self._block_names = [block.names for block in blocks]
        device, self.ops = ops.device, ops
        self._keeps_normed = self.ops.facts.keeps_normed_inputs
        self._angles = self._read_angles(device)
        self._anchor = torch.zeros(1, device=device, requires_grad=True)
        self.trace: Trace | None = None
        """What the self-test fills with the outputs of the parts."""
        self._is_whole = True
        """Whether this process holds all weights; if they are gathered, a pass is not split."""
        self.room = KeptRoom()
        """What a pass may keep for its backward pass."""

    def read_instead(self, base: BodyWeights, groups: Sequence[LinearGroup]) -> None:
        """Read the frozen weights from `base` from now on; `groups` say which linears are joined, without tensors."""
        self.base, self.groups, self._is_whole = base, list(groups), False

    @staticmethod
    def supports(sizes: ModelSizes) -> bool:
        """Whether the fused kernels compute every part of the model's blocks."""
        return is_fused(sizes)

    def _read_angles(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin [P, D / 2] of every position, computed by the model's own code."""
        like = torch.empty(0, dtype=torch.float32, device=device)
        rotation = self._model.get_submodule(self.spec.names.rotation)
        num_positions = num_table_rows(rotation) or int(self._model.config.max_position_embeddings)
        cos, sin = rotation(like, torch.arange(num_positions, device=device)[None])
        half = cos.shape[-1] // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()

    def _read_block(self, index: int, layer: nn.Module) -> BlockWeights:
        names, sizes = self.spec.names, self.sizes
        is_normed = self.spec.head_norm == "rms"
        heads = Heads(
            num_query=sizes.num_heads,
            num_kv=sizes.num_kv_heads,
            size=sizes.head_size,
            query_norm=weight_of(layer, names.query_norm) if is_normed else None,
            key_norm=weight_of(layer, names.key_norm) if is_normed else None,
            eps=self.eps,
        )
        return BlockWeights(
            input_norm=weight_of(layer, names.input_norm),
            qkv=join_linears(layer, names.query, names.key, names.value),
            heads=heads,
            out=join_linears(layer, names.out),
            inner_norm=weight_of(layer, names.inner_norm),
            mlp=self._read_mlp(index, layer),
        )

    def _read_mlp(self, index: int, layer: nn.Module) -> Mlp:
        names, spec = self.spec.names, self.sizes.experts
        if spec is None or index in spec.dense_layers:
            return GatedMlp(join_linears(layer, names.gate, names.up), join_linears(layer, names.down))
        shared = names.shared
        router = cast(TokenRouter, layer.get_submodule(names.router))
        return RoutedMlp(
            layer=router.layer,
            spec=spec,
            router=LinearGroup.join([router]),
            correction=router.correction,
            experts=cast(Any, layer.get_submodule(names.experts)).expert_layer.weights(),
            shared=GatedMlp(
                join_linears(layer, f"{shared}.gate_proj", f"{shared}.up_proj"),
                join_linears(layer, f"{shared}.down_proj"),
            )
            if spec.shared_size
            else None,
            shared_gate=join_linears(layer, names.shared_gate) if spec.has_shared_gate else None,
        )

    def hidden(
        self, input_ids: Tensor, position_ids: Tensor, plan: AttentionPlan, route: Route, rows: Tensor | None = None
    ) -> Tensor:
        """Last hidden states [N, H], or those of `rows` (sorted) alone.

        With gradients enabled and adapters in the route, autograd can run backward from them.
        """
        if rows is not None and not 0 < len(rows) <= MOST_ROWS * len(input_ids):
            return self.hidden(input_ids, position_ids, plan, route)[rows]
        weights, grads = self._weights_of(route)
        embedded = embed_tokens(input_ids, weights.embedding)
        spans = read_spans(route, embedded.dtype)
        wanted = None if rows is None else _WantedRows(rows, spans_of_rows(spans, rows, len(input_ids)))
        rotation = Rotation(*self._angles, position_ids)
        first = None
        if torch.is_grad_enabled():
            first = self._first_trained(spans) if grads is None else 0
        if first is None:
            with torch.no_grad():
                return self.run(embedded, _StackPass(rotation, plan, route, spans, wanted, weights))
        assert isinstance(plan, TreePlan), "training runs over a prefix tree"
        scratch = None if self._keeps_normed else Scratch()
        work = _StackPass(rotation, plan, route, spans, wanted, weights, grads, scratch)
        is_path = len(plan.bounds) == 2 and route.routing is None and self._is_whole
        how = self.room.choose(self._pass_sizes(embedded, spans), len(input_ids), can_split=is_path)
        if how.part_tokens:
            asked = torch.arange(len(input_ids), device=input_ids.device) if rows is None else rows
            parts = cut_sequence(asked, len(input_ids), how.part_tokens)
            past = PastKeys(len(weights.blocks), len(input_ids))
            whole = _KeptParts(replace(work, wanted=None, past=past), first, input_ids, parts)
            return _PartedStack.apply(self._anchor, self, whole)
        kept = KeptPass(work, first, how.keeps_all, input_ids)
        return _Stack.apply(self._anchor, self, embedded, kept)

    def keeps_all(self, num_tokens: int, route: Route) -> bool:
        """Whether a pass of this route has something to train in the blocks, and keeps all that its backward reads."""
        trained = {name for span in route.spans for name in span.weights.grad_pairs or ()}
        rank = max((span.weights.lora.rank for span in route.spans), default=0)
        itemsize = FLOAT32_BYTES if self.ops.facts.has_wide_activations else self.base.embedding.itemsize
        one = PassSizes(self.sizes, itemsize, rank, self.ops.facts)
        is_trained = any(name in trained for names in self._block_names for name in names)
        return is_trained and self.room.choose(one, num_tokens, can_split=True).is_whole

    def start(self, input_ids: Tensor, position_ids: Tensor, plan: TreePlan, route: Route) -> tuple[Tensor, KeptPass]:
        """Last hidden states [N, H], and what `run_backward` reads; autograd sees nothing of it (`keeps_all`)."""
        weights, grads = self._weights_of(route)
        embedded = embed_tokens(input_ids, weights.embedding)
        spans = read_spans(route, embedded.dtype)
        work = _StackPass(Rotation(*self._angles, position_ids), plan, route, spans, None, weights, grads)
        kept = KeptPass(work, self._first_trained(spans) or 0, keeps_all=True, input_ids=input_ids)
        return self.run(embedded, work, kept), kept

    def _weights_of(self, route: Route) -> tuple[BodyWeights, BodyWeights | None]:
        """The weights that a pass reads, and where the gradients of all of them go."""
        full = route.full
        if full is None:
            return self.base, None
        body = full.weights.body
        assert body is not None, "a layout of this model has what its body reads"
        return body, None if full.grads is None else full.grads.body

    def _pass_sizes(self, embedded: Tensor, spans: Sequence[SpanWeights]) -> PassSizes:
        rank = max((a.shape[0] for span in spans for a, _ in span.pairs.values()), default=0)
        return PassSizes(self.sizes, embedded.itemsize, rank, self.ops.facts)

    def _first_trained(self, spans: Sequence[SpanWeights]) -> int | None:
        """The lowest block that holds an adapter's gradient."""
        for index, names in enumerate(self._block_names):
            if any(span.grads is not None and name in span.grads for span in spans for name in names):
                return index
        return None

    def run(self, h: Tensor, work: _StackPass, kept: KeptPass | None = None) -> Tensor:
        """Normed hidden states of the wanted rows, from embedded tokens; fills `kept` for a backward pass."""
        delta = None
        weights = work.weights
        if kept is None and self.trace is None and self._is_whole and isinstance(work.plan, PagedPlan):
            rows = None if work.wanted is None else work.wanted.rows
            step = SamplerPass(weights, work.route, work.rotation, work.plan, self.rules, self.eps, rows)
            if (done := run_in_few_calls(self.ops, h, step)) is not None:
                return done
        if self.trace is not None:
            self.trace.add(EMBEDDING, h)
        for index in range(len(weights.blocks)):
            before = BlockInput(h, delta)
            h, delta, own = self.run_block(index, before, work)
            if kept is not None and index >= kept.first:
                kept.blocks.append(own if kept.keeps_all else before)
            del before, own  # free what is not kept before the next block runs
        h, x, rstd = self.ops.layers.add_norm(h, delta, weights.last_norm, self.eps)
        if kept is not None:
            kept.last = h, rstd
        return x

    def run_block(self, index: int, before: BlockInput, work: _StackPass) -> tuple[Tensor, Tensor, KeptBlock]:
        """The residual stream, what the MLP adds to it, and what backward reads."""
        block, plan, route, spans = work.weights.blocks[index], work.plan, work.route, work.spans
        h, x, rstd = self._add_norm(before.h, before.delta, block.input_norm, work.scratch)
        qkv, low_qkv = project(block.qkv, x, route, spans)
        cache = plan.cache_slots(index) if isinstance(plan, PagedPlan | GroupedPlan) else None
        q, k, v = self.ops.layers.rotate(qkv, block.heads, work.rotation, cache)
        attention = self._attend(index, (q, k, v), plan, work.past)
        mixed, rest_h = attention.out[0].flatten(1), h
        rows = None
        if work.wanted is not None and index == len(self._block_names) - 1:
            rows = work.wanted.rows
            mixed, rest_h, spans = mixed[work.wanted.rows], h[work.wanted.rows], work.wanted.spans
        attended, low_out = project(block.out, mixed, route, spans)
        inner_h, inner_x, inner_rstd = self._add_norm(rest_h, attended, block.inner_norm, work.scratch)
        delta, mlp = block.mlp.forward(inner_x, MlpPass(route, spans, work.scratch, rows))
        if self.trace is not None:
            for part, added in ((self.spec.names.out, attended), (self.spec.names.down, delta)):
                self.trace.add(layer_part(index, part.partition(".")[0]), added)
        kept = KeptBlock(
            h=h,
            rstd=rstd,
            x=x if self._keeps_normed else None,
            low_qkv=low_qkv,
            qkv=None if block.heads.query_norm is None else qkv,
            attention=attention,
            low_out=low_out,
            inner_h=inner_h,
            inner_rstd=inner_rstd,
            inner_x=inner_x if self._keeps_normed else None,
            mlp=mlp,
        )
        return inner_h, delta, kept

    def _add_norm(
        self, h: Tensor, delta: Tensor | None, weight: Tensor, scratch: Scratch | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if scratch is None:
            return self.ops.layers.add_norm(h, delta, weight, self.eps)
        h, x, rstd = self.ops.layers.add_norm(h, delta, weight, self.eps, room=scratch.normed)
        scratch.normed = x
        return h, x, rstd

    def _attend(
        self, index: int, sides: tuple[Tensor, Tensor, Tensor], plan: AttentionPlan, past: PastKeys | None
    ) -> Saved:
        query, key, value = (side.transpose(0, 1)[None] for side in sides)
        if past is not None:
            key, value = past.extend(index, key, value)
        rule = self.rules[index]
        if isinstance(plan, TreePlan):
            return Saved(query, key, value, *self.ops.attention.tree_forward(query, key, value, plan, rule))
        assert isinstance(plan, PagedPlan | GroupedPlan), "sampling runs over a paged cache"
        sides = query, key, value
        return Saved(*sides, plan.attend_written(index, sides, rule, self.ops.attention), query)

    def run_backward(self, dx: Tensor, kept: KeptPass) -> None:
        """Add the gradients of what is trained, from the gradient of the normed hidden states down to block
        `kept.first`, and to the embedding if all weights are trained."""
        assert kept.last is not None, "the forward pass fills it"
        h, rstd = kept.last
        work = replace(kept.work, scratch=None)
        grads = work.grads
        if grads is not None:
            add_norm_gradient(grads.last_norm, dx, h, rstd)
        dh = self.ops.layers.norm_backward(dx, h, rstd, work.weights.last_norm, None)
        for index in range(len(work.weights.blocks) - 1, kept.first - 1, -1):
            own = kept.blocks.pop()
            if isinstance(own, BlockInput):
                _, _, own = self.run_block(index, own, work)
            dh = self._mlp_backward(index, own, dh, work)
            dh = self._attention_backward(index, own, dh, work, need_input=grads is not None or index > kept.first)
        if grads is not None:
            grads.embedding.index_add_(0, kept.input_ids, dh.to(grads.embedding.dtype))

    def run_parts(self, whole: _KeptParts) -> Tensor:
        """Normed hidden states of the wanted rows; keeps the keys and values of all parts."""
        found: list[Tensor] = []
        for part in whole.parts:
            work, input_ids = self._work_of(part, whole)
            embedded = embed_tokens(input_ids, work.weights.embedding)
            found.append(self.run(embedded, replace(work, scratch=None))[part.rows])
        return torch.cat(found)

    def run_parts_backward(self, dx: Tensor, whole: _KeptParts) -> None:
        """Run every part again, the last one first, and add its gradients."""
        for part in reversed(whole.parts):
            work, input_ids = self._work_of(part, whole)
            embedded = embed_tokens(input_ids, work.weights.embedding)
            kept = KeptPass(work, whole.first, keeps_all=True, input_ids=input_ids)
            self.run(embedded, work, kept)
            self.run_backward(_spread(dx[part.places], part.rows, len(input_ids)), kept)

    def _work_of(self, part: Part, whole: _KeptParts) -> tuple[_StackPass, Tensor]:
        """The pass over one part, and its tokens."""
        work, tokens = whole.work, slice(part.start, part.stop)
        assert work.past is not None, "made for a pass in parts"
        work.past.first = part.start
        rows = torch.arange(part.start, part.stop, device=whole.input_ids.device)
        return (
            replace(
                work,
                rotation=Rotation(*self._angles, work.rotation.positions[tokens]),
                plan=part.plan,
                spans=spans_of_rows(work.spans, rows, len(whole.input_ids)),
            ),
            whole.input_ids[tokens],
        )

    def _mlp_backward(self, index: int, kept: KeptBlock, dh: Tensor, work: _StackPass) -> Tensor:
        """The gradient of the residual stream between attention and MLP, at the rows that the MLP ran on."""
        block, spans = work.weights.blocks[index], self._wanted_in(index, work)[1]
        grads = None if work.grads is None else work.grads.blocks[index]
        normed = NormedInput(kept.inner_h, kept.inner_rstd, block.inner_norm)
        inner_x = normed if kept.inner_x is None else kept.inner_x
        dx = block.mlp.backward(dh, inner_x, kept.mlp, spans, None if grads is None else grads.mlp)
        if grads is not None:
            add_norm_gradient(grads.inner_norm, dx, kept.inner_h, kept.inner_rstd)
        return self.ops.layers.norm_backward(dx, kept.inner_h, kept.inner_rstd, block.inner_norm, dh)

    def _attention_backward(
        self, index: int, kept: KeptBlock, dh: Tensor, work: _StackPass, *, need_input: bool
    ) -> Tensor:
        """The gradient of the residual stream before the block; not computed if nobody needs it."""
        ops, block, plan = self.ops.layers, work.weights.blocks[index], work.plan
        assert isinstance(plan, TreePlan), "training runs over a prefix tree"
        grads = None if work.grads is None else work.grads.blocks[index]
        rows, spans = self._wanted_in(index, work)
        dmixed, dlow = input_gradient(block.out, dh, kept.low_out, spans)
        out = kept.attention.out
        mixed = out[0].flatten(1)
        wanted = mixed if rows is None else mixed[rows]
        add_a_gradients(block.out, wanted, dlow, spans)
        if grads is not None:
            add_product_gradient(grads.out, dh, wanted)
        if rows is not None:
            dmixed, dh = (_spread(grad, rows, len(mixed)) for grad in (dmixed, dh))
        rule = self.rules[index]
        attention_grads = self.ops.attention.tree_backward(dmixed.view(out.shape), kept.attention, plan, rule)
        if work.past is not None:
            attention_grads = (attention_grads[0], *work.past.own_gradients(index, *attention_grads[1:]))
        dq, dk, dv = (grad[0].transpose(0, 1) for grad in attention_grads)
        if grads is not None and kept.qkv is not None:
            add_head_norm_gradients(grads.heads, dq, dk, kept.qkv, work.rotation)
        dqkv = ops.rotate_backward((dq, dk, dv), kept.qkv, block.heads, work.rotation)
        normed = NormedInput(kept.h, kept.rstd, block.input_norm)
        x = normed if kept.x is None else kept.x
        if grads is not None:
            add_product_gradient(grads.qkv, dqkv, x)
        dx, dlow = input_gradient(block.qkv, dqkv, kept.low_qkv, work.spans, need_input=need_input)
        add_a_gradients(block.qkv, x, dlow, work.spans)
        if dx is None:
            return dh
        if grads is not None:
            add_norm_gradient(grads.input_norm, dx, kept.h, kept.rstd)
        return ops.norm_backward(dx, kept.h, kept.rstd, block.input_norm, dh)

    def _wanted_in(self, index: int, work: _StackPass) -> tuple[Tensor | None, Sequence[SpanWeights]]:
        """The rows that a block runs on after its attention (None: all), and the adapters' spans over them."""
        if work.wanted is None or index < len(work.weights.blocks) - 1:
            return None, work.spans
        return work.wanted.rows, work.wanted.spans


class _Stack(torch.autograd.Function):
    """All blocks as one autograd function; it adds gradients in place and does not return them."""

    @staticmethod
    def forward(ctx, anchor, body, embedded, kept):  # noqa: ARG004 - the anchor asks for a gradient
        ctx.body, ctx.kept = body, kept
        return body.run(embedded, kept.work, kept)

    @staticmethod
    def backward(ctx, dx):
        kept, ctx.kept = ctx.kept, None
        ctx.body.run_backward(dx.contiguous(), kept)
        return torch.zeros(1, device=dx.device), None, None, None


class _PartedStack(torch.autograd.Function):
    """The same for a sequence in parts."""

    @staticmethod
    def forward(ctx, anchor, body, whole):  # noqa: ARG004 - the anchor asks for a gradient
        ctx.body, ctx.whole = body, whole
        return body.run_parts(whole)

    @staticmethod
    def backward(ctx, dx):
        whole, ctx.whole = ctx.whole, None
        ctx.body.run_parts_backward(dx.contiguous(), whole)
        return torch.zeros(1, device=dx.device), None, None


def _spread(grad: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """The gradient of all rows, when only `rows` were read."""
    return grad.new_zeros(num_rows, grad.shape[1]).index_add_(0, rows, grad)
