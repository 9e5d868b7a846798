"""Attention in plain torch, one score matrix per slice: any device, dtype and head size; slower, and the reference.

Tensors are heads-first [1, heads, tokens, D]; grouped query heads read their shared key head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output like `query`, and log-sum-exp [1, H, tokens] in float32."""
    scores = _scores(query, key, is_causal, scale)
    logsumexp = torch.logsumexp(scores, dim=-1)
    probs = (scores - logsumexp.unsqueeze(-1)).exp().to(value.dtype)
    return probs @ _repeat(value, query), logsumexp


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one part of a softmax whose whole has `out` and `logsumexp`."""
    probs = (_scores(query, key, is_causal, scale) - logsumexp.unsqueeze(-1)).exp()
    grad_f32 = grad_out.float()
    delta = (grad_f32 * out.float()).sum(dim=-1, keepdim=True)
    grad_scores = probs * (grad_f32 @ _repeat(value, query).float().transpose(-1, -2) - delta) * scale
    grad_query = grad_scores @ _repeat(key, query).float()
    grad_key = _sum_groups(grad_scores.transpose(-1, -2) @ query.float(), key)
    grad_value = _sum_groups(probs.transpose(-1, -2) @ grad_f32, value)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _scores(query: Tensor, key: Tensor, is_causal: bool, scale: float) -> Tensor:
    scores = (query @ _repeat(key, query).transpose(-1, -2)).float() * scale
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(future, float("-inf"))
    return scores


def _repeat(side: Tensor, query: Tensor) -> Tensor:
    return side.repeat_interleave(query.shape[1] // side.shape[1], dim=1)


def _sum_groups(grad: Tensor, side: Tensor) -> Tensor:
    return grad.view(1, side.shape[1], -1, *grad.shape[2:]).sum(dim=2)
