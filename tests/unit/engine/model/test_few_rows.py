"""The stack's way for few rows that decode, with each of its steps in plain torch: the same tokens and logprobs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from naive import assert_close, displaced_adapter, draft_always, random_ids, sample_many
from turnwise.engine.attention.plans import PagedPlan
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.ops import torch_attention, torch_layers
from turnwise.engine.ops.interface import AttentionRule, Heads, Rotation

pytestmark = pytest.mark.model


class PlainFewRows:
    """What `ops/triton_rows.py` computes."""

    def __init__(self) -> None:
        self.num_steps = 0

    def takes(self, num_rows: int, dtype: torch.dtype) -> bool:  # noqa: ARG002
        return num_rows <= 3

    def project(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        rest: Tensor | None = None,
        is_gated: bool = False,
    ) -> Tensor:
        if norm is not None:
            x = torch_layers.add_norm(x, None, *norm)[1]
        y = torch.nn.functional.linear(x, weight, bias)
        y = torch_layers.swiglu(y) if is_gated else y
        return y if rest is None else rest + y

    def attend(
        self, qkv: Tensor, heads: Heads, rotation: Rotation, plan: PagedPlan, layer: int, scale: float
    ) -> Tensor:
        assert not plan.has_drafts, "a row of a draft reads keys that another program of this kernel writes"
        self.num_steps += layer == 0
        query, _, _ = torch_layers.rotate(qkv, heads, rotation, plan.cache_slots(layer))
        return torch_attention.paged_decode(query, plan.cache.layer(layer), plan, AttentionRule(scale)).flatten(1)


@pytest.mark.parametrize("merge", ["always", "never"])
def test_few_rows_decode_as_many_do(tiny_dir: Path, merge: Literal["always", "never"]) -> None:
    found = []
    few = PlainFewRows()
    for ops in (None, few):
        config = EngineConfig(device="cpu", kv_cache_gib=0.01, seed=1, merge_adapter=merge)
        engine = Engine(tiny_dir, config, name="tiny")
        if ops is not None:
            assert engine.model.fused is not None
            engine.model.fused.ops = replace(engine.model.fused.ops, few_rows=ops)
        policy = engine.publish(displaced_adapter(engine))
        # Five rows of different lengths: the last three of them are few.
        prompts = [(random_ids(9 + i, i), policy if i else engine.base_policy) for i in range(5)]
        asked = [prompts[:1], prompts[1:3], prompts]
        found.append([reply for rows in asked for reply in sample_many(engine, rows, max_tokens=9, seed=3)])
    for want, got in zip(*found, strict=True):
        assert got.sequences[0].tokens == want.sequences[0].tokens
        assert_close(got.sequences[0].logprobs, want.sequences[0].logprobs, 1e-5)
    # An adapter beside the weights keeps a step from this way; the base model's own steps take it.
    assert few.num_steps == (16 if merge == "always" else 8)


def test_drafts_do_not_go_through_the_kernels_for_few_rows(tiny_dir: Path) -> None:
    config = EngineConfig(device="cpu", kv_cache_gib=0.01, seed=1, speculation="suffix")
    engine, few = draft_always(Engine(tiny_dir, config, name="tiny")), PlainFewRows()
    assert engine.model.fused is not None
    engine.model.fused.ops = replace(engine.model.fused.ops, few_rows=few)
    asked = [(random_ids(9, 1), engine.base_policy)]
    first, second = (sample_many(engine, asked, max_tokens=9, seed=3)[0] for _ in range(2))
    assert second.sequences[0].tokens == first.sequences[0].tokens
    assert second.num_accepted_draft_tokens > 0
    assert few.num_steps > 0
