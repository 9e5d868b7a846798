"""Attention in plain torch, one score matrix per slice: any device, dtype and head size; slower, and the reference.

Every function takes heads-first tensors [1, heads, tokens, D]; grouped query heads read their shared key head. The
functions of the interface return tokens-first [1, tokens, heads, D].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from turnwise.engine.ops.interface import Saved

if TYPE_CHECKING:
    from turnwise.engine.attention.plans import PagedPlan, TreePlan


def tree_forward(query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, scale: float) -> tuple[Tensor, Tensor]:
    """Output [1, N, H, D] and log-sum-exp [1, H, N] of a packed forest."""
    out, logsumexp = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
    for q, k, is_causal in plan.slices():
        part = _slice_forward(query[:, :, q], key[:, :, k], value[:, :, k], is_causal, scale)
        if not is_causal:
            part = merge(out[:, :, q], logsumexp[:, :, q], *part)
        out[:, :, q], logsumexp[:, :, q] = part
    return out.transpose(1, 2), logsumexp


def tree_backward(grad_out: Tensor, saved: Saved, plan: TreePlan, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; every part is exact with the whole row's output and log-sum-exp."""
    query, key, value, out, logsumexp = saved
    grad_out, out = grad_out.transpose(1, 2), out.transpose(1, 2)
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for q, k, is_causal in plan.slices():
        part = Saved(query[:, :, q], key[:, :, k], value[:, :, k], out[:, :, q], logsumexp[:, :, q])
        parts = _slice_backward(grad_out[:, :, q], part, is_causal, scale)
        for grad, where, piece in zip(grads, (q, k, k), parts, strict=True):
            grad[:, :, where] += piece
    return grads


def prefill(query: Tensor, key: Tensor, value: Tensor, plan: PagedPlan, layer: int, scale: float) -> Tensor:
    """New prompt tokens attend to themselves causally and to their sequence's cached tokens fully."""
    first = plan.num_decode
    out = torch.empty_like(query[0, :, first:].transpose(0, 1))
    for chunk in plan.chunks:
        part = slice(chunk.start, chunk.stop)
        new = query[:, :, part], key[:, :, part], value[:, :, part]
        own, lse = _slice_forward(*new, True, scale)
        if chunk.num_cached:
            cached = plan.cache.read(layer, chunk.blocks, chunk.num_cached)
            own, _ = merge(own, lse, *_slice_forward(new[0], *cached, False, scale))
        out[chunk.start - first : chunk.stop - first] = own[0].transpose(0, 1)
    return out[None]


def paged_decode(query: Tensor, layer: tuple[Tensor, Tensor], plan: PagedPlan, scale: float) -> Tensor:
    """Gather every row's blocks side by side, and mask what is beyond its context."""
    rows = query.shape[0]
    keys, values = (side[plan.block_table.long()].flatten(1, 2)[:, : plan.max_context] for side in layer)
    visible = torch.arange(keys.shape[1], device=query.device)[None] < plan.context_lens[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        query.unsqueeze(2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=visible.view(rows, 1, 1, -1),
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(2)


def can_capture_prefill(dtype: torch.dtype, head_size: int) -> bool:  # noqa: ARG001 - slices depend on the prompts
    return False


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax over two disjoint sets of keys, from each set's output [.., H, N, D] and log-sum-exp [.., H, N]."""
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = (lse_a - lse).exp().unsqueeze(-1), (lse_b - lse).exp().unsqueeze(-1)
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse


def _slice_forward(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output like `query`, and log-sum-exp [1, H, tokens] in float32."""
    scores = _scores(query, key, is_causal, scale)
    logsumexp = torch.logsumexp(scores, dim=-1)
    probs = (scores - logsumexp.unsqueeze(-1)).exp().to(value.dtype)
    return probs @ _repeat(value, query), logsumexp


def _slice_backward(grad_out: Tensor, part: Saved, is_causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one part of a softmax whose whole has the part's `out` and `logsumexp`, all heads-first."""
    query, key, value, out, logsumexp = part
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
