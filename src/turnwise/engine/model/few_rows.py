"""A decode step of few rows through the whole stack, in five launches a block (`ops/triton_rows.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from turnwise.engine.attention.plans import AttentionPlan, PagedPlan
from turnwise.engine.model.body_weights import BodyWeights
from turnwise.engine.model.gated_mlp import GatedMlp
from turnwise.engine.model.lora import LinearGroup, Route
from turnwise.engine.ops.interface import AttentionRule, FewRowOps, Rotation


def is_plain_step(plan: AttentionPlan, route: Route, num_rows: int) -> bool:
    """Whether all rows decode one token each, apart from each other, with one set of weights and nothing beside it."""
    return (
        isinstance(plan, PagedPlan)
        and plan.num_decode == num_rows
        and not plan.chunks
        and not plan.has_drafts
        and route.bank is None
        and route.routing is None
        and not any(span.weights.pairs for span in route.spans)
    )


def has_plain_blocks(weights: BodyWeights, rules: Sequence[AttentionRule]) -> bool:
    """Whether the kernels compute every part of these blocks."""
    return all(isinstance(block.mlp, GatedMlp) for block in weights.blocks) and all(
        rule.window is None and rule.softcap is None and rule.sinks is None for rule in rules
    )


def run_few_rows(
    ops: FewRowOps, h: Tensor, weights: BodyWeights, route: Route, step: tuple[Rotation, AttentionPlan], eps: float
) -> Tensor:
    """The residual stream [M, H] after all blocks."""
    rotation, plan = step
    assert isinstance(plan, PagedPlan), "`is_plain_step` says so"

    def run(x: Tensor, group: LinearGroup, norm: Tensor | None = None, rest: Tensor | None = None) -> Tensor:
        weight = group.weight if route.merged is None else route.merged.get(group.name, group.weight)
        return ops.project(x, weight, group.bias, norm=None if norm is None else (norm, eps), rest=rest)

    for index, block in enumerate(weights.blocks):
        mlp = block.mlp
        assert isinstance(mlp, GatedMlp), "`has_plain_blocks` says so"
        qkv = run(h, block.qkv, block.input_norm)
        mixed = ops.attend(qkv, block.heads, rotation, plan, index, block.heads.size**-0.5)
        h = run(mixed, block.out, rest=h)
        gate_up = mlp.gate_up
        weight = gate_up.weight if route.merged is None else route.merged.get(gate_up.name, gate_up.weight)
        act = ops.project(h, weight, gate_up.bias, norm=(block.inner_norm, eps), is_gated=True)
        h = run(act, mlp.down, rest=h)
    return h
