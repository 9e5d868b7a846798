"""Attention on CUDA: variable-length flash kernels for trees and prompts, our Triton kernel for decode.

The flash kernels are PyTorch's, or FlashAttention 4's for much work at once where it is installed (`flash4.py`).
Flash attention takes bfloat16 and float16; float32 runs in plain torch (`torch_attention.py`), exact and slower. Every
function takes heads-first tensors [1, heads, tokens, D] and returns tokens-first [1, tokens, heads, D]. The flash
kernels give a result the strides of its input, which may lie heads first in memory; our own kernels read dense rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from turnwise.engine.ops import flash4, torch_attention
from turnwise.engine.ops.cuda_support import fits_flash, has_triton, triton_decode, triton_tree
from turnwise.engine.ops.interface import AttentionRule, Saved
from turnwise.engine.ops.torch_attention import merge, with_sinks

if TYPE_CHECKING:
    from turnwise.engine.attention.plans import PagedPlan, TreePlan, Varlen

_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward
FLASH4_OPERATIONS = 3e10
"""Operations of one forward call from which FlashAttention 4 saves more time on the card than it costs the host."""


def tree_forward(
    query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """Output [1, N, H, D] and log-sum-exp [1, H, N] of a packed forest."""
    if not _takes_flash(query, rule):
        return torch_attention.tree_forward(query, key, value, plan, rule)
    q, k, v = (side[0].transpose(0, 1) for side in (query, key, value))
    if (windowed := plan.window_varlen(rule.window, query.device)) is not None:
        return _with_sinks(*_window_forward(q, k, v, windowed, rule), rule)
    parts, rule = plan.varlen(query.device), rule.without_window()
    out, logsumexp = _varlen_forward(q, k, v, parts[0], True, rule)
    for part in parts[1:]:
        below, lse_below = _varlen_forward(q[part.q_index], k[part.k_index], v[part.k_index], part, False, rule)
        if has_triton():
            triton_tree().merge_rows(out, logsumexp, below, lse_below, part.q_index)
            continue
        # merge() wants heads first; the log-sum-exp already is.
        merged, lse = merge(
            out[part.q_index].transpose(0, 1), logsumexp[:, part.q_index], below.transpose(0, 1), lse_below
        )
        out[part.q_index] = merged.transpose(0, 1)
        logsumexp[:, part.q_index] = lse
    return _with_sinks(out, logsumexp, rule)


def tree_backward(grad_out: Tensor, saved: Saved, plan: TreePlan, rule: AttentionRule) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; every part is exact with the whole row's output and log-sum-exp."""
    if not _takes_flash(saved.query, rule):
        return torch_attention.tree_backward(grad_out, saved, plan, rule)
    q, k, v = (side[0].transpose(0, 1) for side in saved[:3])
    g, o, lse = grad_out[0], saved.out[0], saved.logsumexp[0]
    if (windowed := plan.window_varlen(rule.window, q.device)) is not None:
        dq, dk, dv = (
            grad.transpose(0, 1)[None] for grad in _window_backward(g, Saved(q, k, v, o, lse), windowed, rule)
        )
        return dq, dk, dv
    parts, rule = plan.varlen(q.device), rule.without_window()
    grads = _varlen_backward(g, q, k, v, o, lse, parts[0], True, rule)
    for part in parts[1:]:
        qi, ki = part.q_index, part.k_index
        assert qi is not None, "a level picks its queries by index"
        assert ki is not None, "a level picks its keys by index"
        below = _varlen_backward(g[qi], q[qi], k[ki], v[ki], o[qi], lse[:, qi].contiguous(), part, False, rule)
        for grad, index, piece in zip(grads, (qi, ki, ki), below, strict=True):
            if has_triton():
                triton_tree().add_rows(grad, piece, index)
            else:
                grad.index_add_(0, index, piece)
    dq, dk, dv = (grad.transpose(0, 1)[None] for grad in grads)
    return dq, dk, dv


def _window_forward(
    q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Varlen], rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    """Every node over the end of its path; the parts have different queries."""
    if len(parts) == 1:
        return _varlen_forward(q, k[parts[0].k_index], v[parts[0].k_index], parts[0], True, rule)
    out, logsumexp = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    for part in parts:
        qi = part.q_index
        out[qi], logsumexp[:, qi] = _varlen_forward(q[qi], k[part.k_index], v[part.k_index], part, True, rule)
    return out, logsumexp


def _window_backward(
    grad: Tensor, saved: Saved, parts: Sequence[Varlen], rule: AttentionRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys near the end of a node are read by all its children: their gradients are summed in float32."""
    q, k, v, out, lse = saved
    dq, dk, dv = torch.empty_like(q), *(torch.zeros_like(side, dtype=torch.float32) for side in (k, v))
    for part in parts:
        qi, ki = part.q_index, part.k_index
        assert ki is not None, "a window picks its keys by index"
        rows = slice(None) if qi is None else qi
        sides = grad[rows], q[rows], k[ki], v[ki], out[rows], lse[:, rows].contiguous()
        dq[rows], *below = _varlen_backward(*sides, part, True, rule)
        for total, piece in zip((dk, dv), below, strict=True):
            total.index_add_(0, ki, piece.float())
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def prefill(query: Tensor, key: Tensor, value: Tensor, plan: PagedPlan, layer: int, rule: AttentionRule) -> Tensor:
    """New prompt tokens attend to themselves causally and to their sequence's cached tokens."""
    if not _takes_flash(query, rule):
        return torch_attention.prefill(query, key, value, plan, layer, rule)
    first = plan.num_decode
    q, k, v = (side[0, :, first:].transpose(0, 1) for side in (query, key, value))
    varlen = plan.prefill_varlen()
    if varlen.k_index is not None:
        k, v = (side.flatten(0, 1)[varlen.k_index] for side in plan.cache.layer(layer))
    # The causal edge is at the bottom right: the last query sees every key of its sequence.
    return _with_sinks(*_varlen_forward(q, k, v, varlen, True, rule), rule)[0]


def paged_decode(query: Tensor, layer: tuple[Tensor, Tensor], plan: PagedPlan, rule: AttentionRule) -> Tensor:
    """One query row [H, D] per sequence over its blocks."""
    kernel = triton_decode(query.shape[-1])
    if kernel is None:
        return torch_attention.paged_decode(query, layer, plan, rule)
    return kernel.paged_decode(query, *layer, plan.block_table, plan.context_lens, plan.max_context, rule)


def can_capture_prefill(dtype: torch.dtype, head_size: int) -> bool:
    """True for the flash kernels and ours. Plain torch slices by numbers that the host must know."""
    return has_triton() and fits_flash(dtype, head_size)


def _takes_flash(query: Tensor, rule: AttentionRule) -> bool:
    """The flash kernels know windows, and no soft caps."""
    return rule.softcap is None and fits_flash(query.dtype, query.shape[-1])


def _with_sinks(out_NHD: Tensor, logsumexp_HN: Tensor, rule: AttentionRule) -> tuple[Tensor, Tensor]:
    """Output [1, N, H, D] and log-sum-exp [1, H, N] with the rule's sinks."""
    out, logsumexp = with_sinks(out_NHD.transpose(0, 1), logsumexp_HN, rule)
    return out[None], logsumexp[None]


def _window_of(rule: AttentionRule) -> dict[str, int]:
    """A window in the words of the flash kernels, which count the tokens before a token's own."""
    return {} if rule.window is None else {"window_size_left": rule.window - 1, "window_size_right": 0}


def _varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, part: Varlen, is_causal: bool, rule: AttentionRule
) -> tuple[Tensor, Tensor]:
    if _takes_flash4(q, part, rule):
        return flash4.forward(q, k, v, part, is_causal, rule.scale)
    runs = part.q_bounds, part.k_bounds, part.max_q, part.max_k
    out, logsumexp, *_ = _flash(q, k, v, *runs, 0.0, is_causal, False, scale=rule.scale, **_window_of(rule))
    return out.contiguous(), logsumexp


def _varlen_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    part: Varlen,
    is_causal: bool,
    rule: AttentionRule,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, out = grad.contiguous(), out.contiguous()
    if _takes_flash4(q, part, rule):
        return flash4.backward(grad, q, k, v, out, logsumexp, part, is_causal, rule.scale)
    runs = part.q_bounds, part.k_bounds, part.max_q, part.max_k
    state = _no_dropout(q.device)
    words = {"scale": rule.scale, **_window_of(rule)}
    dq, dk, dv = _flash_backward(grad, q, k, v, out, logsumexp, *runs, 0.0, is_causal, state, state, **words)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _takes_flash4(q: Tensor, part: Varlen, rule: AttentionRule) -> bool:
    if rule.window is not None:  # a window leaves too little work to win back what its host code costs
        return False
    return 4 * part.num_pairs * q.shape[1] * q.shape[2] >= FLASH4_OPERATIONS and flash4.fits(q)


@functools.cache
def _no_dropout(device: torch.device) -> Tensor:
    """The random state that a backward pass takes as an argument; without dropout it does not read it."""
    return torch.zeros(2, dtype=torch.uint64, device=device)
