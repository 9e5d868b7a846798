"""Attention in plain torch, cut into blocks of queries."""

from __future__ import annotations

import pytest
import torch

from cases import for_each
from turnwise.engine.attention.plans import Pair, TreePlan
from turnwise.engine.ops import torch_attention
from turnwise.engine.ops.interface import AttentionRule, Saved


@for_each("rule", [AttentionRule(0.3), AttentionRule(0.3, window=11), AttentionRule(0.3, softcap=2.0)])
def test_few_scores_at_a_time_give_the_same_attention_and_gradients(
    rule: AttentionRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = TreePlan((0, 30, 55, 70), ((Pair(30, 70, 0, 30),),))
    query, grad = torch.randn(1, 4, 70, 8), torch.randn(1, 70, 4, 8)
    key, value = torch.randn(2, 1, 2, 70, 8).unbind()
    found = []
    for most in (1 << 27, 4 * 30 * 7):
        monkeypatch.setattr(torch_attention, "MOST_SCORES", most)
        out, logsumexp = torch_attention.tree_forward(query, key, value, plan, rule)
        saved = Saved(query, key, value, out, logsumexp)
        found.append((out, logsumexp, *torch_attention.tree_backward(grad, saved, plan, rule)))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


def test_no_block_has_more_scores_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "MOST_SCORES", 500)
    sizes: list[int] = []
    cap = torch_attention.cap
    monkeypatch.setattr(
        torch_attention, "cap", lambda scores, rule: (sizes.append(scores.numel()), cap(scores, rule))[1]
    )
    side = torch.randn(1, 2, 60, 8)
    torch_attention.slice_forward(side, side, side, True, AttentionRule(0.3))
    assert len(sizes) == 15
    assert max(sizes) <= 500
