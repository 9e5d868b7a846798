"""Attention on CUDA: variable-length flash kernels for trees and prompts, our Triton kernel for decode.

The flash kernels are PyTorch's, or FlashAttention 4's for much work at once where it is installed (`flash4.py`).
Flash attention takes bfloat16 and float16; float32 runs in plain torch (`torch_attention.py`), exact and slower. Every
function takes heads-first tensors [1, heads, tokens, D] and returns tokens-first [1, tokens, heads, D].
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from turnwise.engine.ops import flash4, torch_attention
from turnwise.engine.ops.cuda_support import fits_flash, has_triton, triton_decode, triton_tree
from turnwise.engine.ops.interface import Saved
from turnwise.engine.ops.torch_attention import merge

if TYPE_CHECKING:
    from turnwise.engine.attention.plans import PagedPlan, TreePlan, Varlen

_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward
FLASH4_OPERATIONS = 3e10
"""Operations of one forward call from which FlashAttention 4 saves more time on the card than it costs the host."""


def tree_forward(query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, scale: float) -> tuple[Tensor, Tensor]:
    """Output [1, N, H, D] and log-sum-exp [1, H, N] of a packed forest."""
    if not fits_flash(query.dtype, query.shape[-1]):
        return torch_attention.tree_forward(query, key, value, plan, scale)
    q, k, v = (side[0].transpose(0, 1) for side in (query, key, value))
    parts = plan.varlen(query.device)
    out, logsumexp = _varlen_forward(q, k, v, parts[0], True, scale)
    for part in parts[1:]:
        below, lse_below = _varlen_forward(q[part.q_index], k[part.k_index], v[part.k_index], part, False, scale)
        if has_triton():
            triton_tree().merge_rows(out, logsumexp, below, lse_below, part.q_index)
            continue
        # merge() wants heads first; the log-sum-exp already is.
        merged, lse = merge(
            out[part.q_index].transpose(0, 1), logsumexp[:, part.q_index], below.transpose(0, 1), lse_below
        )
        out[part.q_index] = merged.transpose(0, 1)
        logsumexp[:, part.q_index] = lse
    return out[None], logsumexp[None]


def tree_backward(grad_out: Tensor, saved: Saved, plan: TreePlan, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; every part is exact with the whole row's output and log-sum-exp."""
    if not fits_flash(saved.query.dtype, saved.query.shape[-1]):
        return torch_attention.tree_backward(grad_out, saved, plan, scale)
    q, k, v = (side[0].transpose(0, 1) for side in saved[:3])
    g, o, lse = grad_out[0], saved.out[0], saved.logsumexp[0]
    parts = plan.varlen(q.device)
    grads = _varlen_backward(g, q, k, v, o, lse, parts[0], True, scale)
    for part in parts[1:]:
        qi, ki = part.q_index, part.k_index
        assert qi is not None, "a level picks its queries by index"
        assert ki is not None, "a level picks its keys by index"
        below = _varlen_backward(g[qi], q[qi], k[ki], v[ki], o[qi], lse[:, qi].contiguous(), part, False, scale)
        for grad, index, piece in zip(grads, (qi, ki, ki), below, strict=True):
            if has_triton():
                triton_tree().add_rows(grad, piece, index)
            else:
                grad.index_add_(0, index, piece)
    dq, dk, dv = (grad.transpose(0, 1)[None] for grad in grads)
    return dq, dk, dv


def prefill(query: Tensor, key: Tensor, value: Tensor, plan: PagedPlan, layer: int, scale: float) -> Tensor:
    """New prompt tokens attend to themselves causally and to their sequence's cached tokens fully."""
    if not fits_flash(query.dtype, query.shape[-1]):
        return torch_attention.prefill(query, key, value, plan, layer, scale)
    first = plan.num_decode
    q, k, v = (side[0, :, first:].transpose(0, 1) for side in (query, key, value))
    varlen = plan.prefill_varlen()
    if varlen.k_index is not None:
        k, v = (side.flatten(0, 1)[varlen.k_index] for side in plan.cache.layer(layer))
    # The causal edge is at the bottom right: the last query sees every key of its sequence.
    return _varlen_forward(q, k, v, varlen, True, scale)[0][None]


def paged_decode(query: Tensor, layer: tuple[Tensor, Tensor], plan: PagedPlan, scale: float) -> Tensor:
    """One query row [H, D] per sequence over its blocks."""
    kernel = triton_decode()
    if kernel is None:
        return torch_attention.paged_decode(query, layer, plan, scale)
    return kernel.paged_decode(query, *layer, plan.block_table, plan.context_lens, plan.max_context, scale)


def can_capture_prefill(dtype: torch.dtype, head_size: int) -> bool:
    """True for the flash kernels and ours. Plain torch slices by numbers that the host must know."""
    return has_triton() and fits_flash(dtype, head_size)


def _varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, part: Varlen, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if _takes_flash4(q, part):
        return flash4.forward(q, k, v, part, is_causal, scale)
    runs = part.q_bounds, part.k_bounds, part.max_q, part.max_k
    out, logsumexp, *_ = _flash(q, k, v, *runs, 0.0, is_causal, False, scale=scale)
    return out, logsumexp


def _varlen_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    part: Varlen,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, out = grad.contiguous(), out.contiguous()
    if _takes_flash4(q, part):
        return flash4.backward(grad, q, k, v, out, logsumexp, part, is_causal, scale)
    runs = part.q_bounds, part.k_bounds, part.max_q, part.max_k
    state = _no_dropout(q.device)
    return _flash_backward(grad, q, k, v, out, logsumexp, *runs, 0.0, is_causal, state, state, scale=scale)


def _takes_flash4(q: Tensor, part: Varlen) -> bool:
    return 4 * part.num_pairs * q.shape[1] * q.shape[2] >= FLASH4_OPERATIONS and flash4.fits(q)


@functools.cache
def _no_dropout(device: torch.device) -> Tensor:
    """The random state that a backward pass takes as an argument; without dropout it does not read it."""
    return torch.zeros(2, dtype=torch.uint64, device=device)
