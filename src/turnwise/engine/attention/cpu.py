"""Attention on a CPU: our kernels (PyTorch's flash kernels where they do not run) over slices, and paged decode.

Every function here takes heads-first tensors [1, heads, tokens, D] and returns tokens-first [1, tokens, heads, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from turnwise.engine.model.linear import cpu_kernels
from turnwise.engine.ops import cpu_attention

if TYPE_CHECKING:
    from turnwise.engine.attention.plans import PagedPlan, Run, Saved, TreePlan

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def tree_forward(query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, scale: float) -> tuple[Tensor, Tensor]:
    """Output [1, N, H, D] and log-sum-exp [1, H, N] of a packed forest."""
    _, num_heads, num_tokens, head_size = query.shape
    out = query.new_empty(1, num_tokens, num_heads, head_size).transpose(1, 2)
    logsumexp = query.new_empty(1, num_heads, num_tokens, dtype=torch.float32)
    if cpu_attention.fits(query, key, value):
        _attend_forest((query, key, value, out, logsumexp), plan, scale)
        return out.transpose(1, 2), logsumexp
    for run in plan.equal_runs():
        part = _flash(*(_rows(side, run) for side in (query, key, value)), 0.0, True, scale=scale)
        _rows(out, run).copy_(part[0])
        _rows(logsumexp, run).copy_(part[1])
    for q, k in plan.ancestors():
        part = _flash(query[:, :, q], key[:, :, k], value[:, :, k], 0.0, False, scale=scale)
        out[:, :, q], logsumexp[:, :, q] = merge(out[:, :, q], logsumexp[:, :, q], *part)
    return out.transpose(1, 2), logsumexp


def tree_backward(grad_out: Tensor, saved: Saved, plan: TreePlan, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; every part is exact with the whole row's output and log-sum-exp."""
    query, key, value, out, logsumexp = saved
    grad_out, out = grad_out.contiguous().transpose(1, 2), out.transpose(1, 2)
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    if cpu_attention.fits(query, key, value):
        _attend_forest_backward((grad_out, query, key, value, out, logsumexp), grads, plan, scale)
        return grads
    for run in plan.equal_runs():
        sides = (_rows(side, run) for side in (grad_out, query, key, value, out, logsumexp))
        for grad, piece in zip(grads, _flash_backward(*sides, 0.0, True, scale=scale), strict=True):
            _rows(grad, run).copy_(piece)
    for q, k in plan.ancestors():
        sides = (grad_out[:, :, q], query[:, :, q], key[:, :, k], value[:, :, k], out[:, :, q], logsumexp[:, :, q])
        parts = _flash_backward(*sides, 0.0, False, scale=scale)
        for grad, where, piece in zip(grads, (q, k, k), parts, strict=True):
            grad[:, :, where] += piece
    return grads


def _attend_forest(sides: Sequence[Tensor], plan: TreePlan, scale: float) -> None:
    """Our kernel writes output and log-sum-exp in place, own node first, then adds each ancestor to the softmax."""
    query, key, value, out, logsumexp = sides
    for run in plan.equal_runs():
        q, k, v, o, lse = (_rows(side, run) for side in sides)
        cpu_attention.attend(q, k, v, o, lse, scale, is_causal=True)
    for rows, keys in plan.ancestors():
        q, o, lse = (side[:, :, rows] for side in (query, out, logsumexp))
        cpu_attention.attend(q, key[:, :, keys], value[:, :, keys], o, lse, scale, is_causal=False, is_added=True)


def _attend_forest_backward(
    sides: Sequence[Tensor], grads: tuple[Tensor, Tensor, Tensor], plan: TreePlan, scale: float
) -> None:
    grad_out, query, key, value, out, logsumexp = sides
    for run in plan.equal_runs():
        do, q, k, v, o, lse = (_rows(side, run) for side in sides)
        dq, dk, dv = (_rows(grad, run) for grad in grads)
        cpu_attention.attend_backward(do, q, k, v, o, lse, (dq, dk, dv), scale, is_causal=True)
    for rows, keys in plan.ancestors():
        do, q, o, lse, dq = (side[:, :, rows] for side in (grad_out, query, out, logsumexp, grads[0]))
        k, v, dk, dv = (side[:, :, keys] for side in (key, value, grads[1], grads[2]))
        cpu_attention.attend_backward(do, q, k, v, o, lse, (dq, dk, dv), scale, is_causal=False, is_added=True)


def _rows(side: Tensor, run: Run) -> Tensor:
    """Neighbouring nodes of one length as a batch: [1, heads, tokens, ...] -> [count, heads, length, ...], a view."""
    span = side[0, :, run.start : run.start + run.count * run.length]
    return span.unflatten(1, (run.count, run.length)).transpose(0, 1)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """One softmax over two disjoint sets of keys, from each set's output [.., H, N, D] and log-sum-exp [.., H, N]."""
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = (lse_a - lse).exp().unsqueeze(-1), (lse_b - lse).exp().unsqueeze(-1)
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse


def prefill(query: Tensor, key: Tensor, value: Tensor, plan: PagedPlan, layer: int, scale: float) -> Tensor:
    """New prompt tokens attend to themselves causally and to their sequence's cached tokens fully."""
    _, num_heads, num_tokens, head_size = query.shape
    out = query.new_empty(1, num_tokens - plan.num_decode, num_heads, head_size)
    for chunk in plan.chunks:
        part = slice(chunk.start, chunk.stop)
        own, logsumexp = _flash(query[:, :, part], key[:, :, part], value[:, :, part], 0.0, True, scale=scale)
        if chunk.num_cached:
            cached = plan.cache.read(layer, chunk.blocks, chunk.num_cached)
            own, _ = merge(own, logsumexp, *_flash(query[:, :, part], *cached, 0.0, False, scale=scale))
        out[:, chunk.start - plan.num_decode : chunk.stop - plan.num_decode] = own.transpose(1, 2)
    return out


def paged_decode(query: Tensor, layer: tuple[Tensor, Tensor], plan: PagedPlan, scale: float) -> Tensor:
    """One query row [H, D] per sequence over its blocks."""
    kernels = cpu_kernels() if query.dtype is torch.float32 else None
    if kernels is not None and query.shape[-1] % 8 == 0:
        return kernels.paged_decode(query.contiguous(), *layer, plan.block_table, plan.context_lens, scale)
    return gather_decode(query, layer, plan, scale)


def gather_decode(query: Tensor, layer: tuple[Tensor, Tensor], plan: PagedPlan, scale: float) -> Tensor:
    """The plain form: gather every row's blocks side by side, mask what is beyond its context."""
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
