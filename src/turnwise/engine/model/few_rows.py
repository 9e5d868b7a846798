"""A sampler's pass through the whole stack in fewer calls than one for each step of a block.

On a CPU all blocks are one call or a few (`ops/cpu_pass.py`). On a GPU a decode step of few rows takes five launches a
block (`ops/triton_rows.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from turnwise.engine.attention.plans import PagedPlan
from turnwise.engine.model.body_weights import BlockWeights, BodyWeights
from turnwise.engine.model.gated_mlp import GatedMlp
from turnwise.engine.model.lora import LinearGroup, Route
from turnwise.engine.ops.interface import AttentionRule, BlockTensors, FewRowOps, Ops, Rotation


@dataclass(frozen=True, slots=True)
class SamplerPass:
    """What a pass runs with."""

    weights: BodyWeights
    route: Route
    rotation: Rotation
    plan: PagedPlan
    rules: Sequence[AttentionRule]
    """[blocks] how each block attends."""
    eps: float
    rows: Tensor | None
    """The rows that the caller wants; None: all."""

    @property
    def is_plain(self) -> bool:
        """Whether all blocks are alike, with one set of weights and nothing beside it."""
        route = self.route
        return (
            route.bank is None
            and route.routing is None
            and not any(span.weights.pairs for span in route.spans)
            and all(isinstance(block.mlp, GatedMlp) for block in self.weights.blocks)
            and all((one.window, one.softcap, one.sinks) == (self.plan.window, None, None) for one in self.rules)
        )

    def is_few(self, num_rows: int) -> bool:
        """Whether all rows decode one token each, apart from each other."""
        plan = self.plan
        has_others = plan.num_decode != num_rows or bool(plan.chunks) or plan.has_drafts
        return self.rows is None and plan.window is None and not has_others

    def weight(self, group: LinearGroup) -> Tensor:
        return group.weight if self.route.merged is None else self.route.merged.get(group.name, group.weight)

    def tensors(self, index: int, block: BlockWeights) -> BlockTensors:
        mlp, keys = block.mlp, self.plan.cache.layer(index)
        assert isinstance(mlp, GatedMlp), "`is_plain` says so"
        qkv, out, gate_up, down = ((self.weight(one), one.bias) for one in (block.qkv, block.out, *mlp.groups))
        norms = block.heads.query_norm, block.heads.key_norm
        return BlockTensors(block.input_norm, *qkv, *norms, *keys, *out, block.inner_norm, *gate_up, *down)


def run_in_few_calls(ops: Ops, h: Tensor, step: SamplerPass) -> Tensor | None:
    """Normed hidden states [M, H] of the wanted rows; None where no such kernels compute this pass."""
    weights = step.weights
    few = ops.few_rows
    is_few = few is not None and step.is_few(len(h)) and few.takes(len(h), h.dtype)
    if not (is_few or ops.stack is not None) or not step.is_plain:
        return None
    if few is not None and is_few:
        return ops.layers.add_norm(_run_few_rows(few, h, step), None, weights.last_norm, step.eps)[1]
    assert ops.stack is not None, "asked above"
    blocks = [step.tensors(index, block) for index, block in enumerate(weights.blocks)]
    return ops.stack.run(h, blocks, weights.blocks[0].heads, step.rotation, step.plan, weights.last_norm, step.rows)


def _run_few_rows(ops: FewRowOps, h: Tensor, step: SamplerPass) -> Tensor:
    """The residual stream [M, H] after all blocks."""

    def run(x: Tensor, group: LinearGroup, norm: Tensor | None = None, rest: Tensor | None = None) -> Tensor:
        normed = None if norm is None else (norm, step.eps)
        return ops.project(x, step.weight(group), group.bias, norm=normed, rest=rest)

    for index, block in enumerate(step.weights.blocks):
        mlp = block.mlp
        assert isinstance(mlp, GatedMlp), "`is_plain` says so"
        qkv = run(h, block.qkv, block.input_norm)
        mixed = ops.attend(qkv, block.heads, step.rotation, step.plan, index, block.heads.size**-0.5)
        h = run(mixed, block.out, rest=h)
        gate_up = mlp.gate_up
        norm = block.inner_norm, step.eps
        act = ops.project(h, step.weight(gate_up), gate_up.bias, norm=norm, is_gated=True)
        h = run(act, mlp.down, rest=h)
    return h
