"""Attention on CUDA: variable-length flash kernels for trees and prompts, our Triton kernel for decode.

The flash kernels are PyTorch's, and for much work at once FlashAttention 4's where it is there (`kernels/flash4.py`).
Flash attention takes bfloat16 and float16; float32 runs as plain torch (`attention_dense`), exact and slower. Every
function takes heads-first tensors [1, heads, tokens, D] and returns tokens-first [1, tokens, heads, D].
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from turnwise.engine.attention import dense as attention_dense
from turnwise.engine.attention.cpu import gather_decode, merge
from turnwise.engine.ops import flash4

if TYPE_CHECKING:
    from turnwise.engine.attention.plans import PagedPlan, Saved, TreePlan, Varlen

log = logging.getLogger(__name__)

_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward
MAX_FLASH_HEAD = 256
OLDEST_CARD = (8, 0)
"""Compute capability from which the flash kernels run, and bfloat16 in Triton."""
FLASH4_OPERATIONS = 3e10
"""Of one forward call, from which FlashAttention 4 saves more time on the card than it costs the host."""


def tree_forward(query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, scale: float) -> tuple[Tensor, Tensor]:
    """Output [1, N, H, D] and log-sum-exp [1, H, N] of a packed forest."""
    if not _has_flash(query):
        return _dense_tree_forward(query, key, value, plan, scale)
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
    if not _has_flash(saved.query):
        return _dense_tree_backward(grad_out, saved, plan, scale)
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
    first = plan.num_decode
    q, k, v = (side[0, :, first:].transpose(0, 1) for side in (query, key, value))
    if _has_flash(query):
        varlen = plan.prefill_varlen()
        if varlen.k_index is not None:
            k, v = (side.flatten(0, 1)[varlen.k_index] for side in plan.cache.layer(layer))
        # The causal edge is at the bottom right: the last query sees every key of its sequence.
        return _varlen_forward(q, k, v, varlen, True, scale)[0][None]
    out = torch.empty_like(q)
    for chunk in plan.chunks:
        part = slice(chunk.start, chunk.stop)
        new = query[:, :, part], key[:, :, part], value[:, :, part]
        own, lse = attention_dense.forward(*new, True, scale)
        if chunk.num_cached:
            cached = plan.cache.read(layer, chunk.blocks, chunk.num_cached)
            own, _ = merge(own, lse, *attention_dense.forward(new[0], *cached, False, scale))
        out[chunk.start - first : chunk.stop - first] = own[0].transpose(0, 1)
    return out[None]


def paged_decode(query: Tensor, layer: tuple[Tensor, Tensor], plan: PagedPlan, scale: float) -> Tensor:
    """One query row [H, D] per sequence over its blocks."""
    kernel = triton_decode()
    if kernel is None:
        return gather_decode(query, layer, plan, scale)
    return kernel.paged_decode(query, *layer, plan.block_table, plan.context_lens, plan.max_context, scale)


def triton_tree() -> Any:
    from turnwise.engine.ops import triton_tree as module

    return module


def triton_decode() -> Any:
    """The module with our decode kernel, or None where Triton does not run."""
    if not has_triton():
        return None
    from turnwise.engine.ops import triton_decode as module

    return module


@functools.cache
def has_triton() -> bool:
    """Whether our kernels run here; where they do not, plain torch does the same, and one line says so."""
    if not _is_new_enough():
        _warn_slower("our kernels")
        return False
    try:
        import triton  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as cause:
        log.warning("Triton is not available (%s): plain torch runs in place of our kernels, slower", cause)
        return False
    return True


def _has_flash(query: Tensor) -> bool:
    return fits_flash(query.dtype, query.shape[-1])


def fits_flash(dtype: torch.dtype, head_size: int) -> bool:
    """Whether the flash kernels run here."""
    return dtype is not torch.float32 and _fits_flash(head_size)


@functools.cache
def _fits_flash(head_size: int) -> bool:
    """Whether the flash kernels take such heads here; where they do not, dense attention runs, and one line says so."""
    if not _is_new_enough():
        _warn_slower("flash attention")
        return False
    if head_size % 8 or head_size > MAX_FLASH_HEAD:
        log.warning("heads of %d: flash attention does not take them, dense attention runs, slower", head_size)
        return False
    return True


def _is_new_enough() -> bool:
    return torch.cuda.get_device_capability() >= OLDEST_CARD


def _warn_slower(what: str) -> None:
    log.warning(
        "this card has compute capability %d.%d, and %s would need %d.%d: plain torch runs in place, slower",
        *torch.cuda.get_device_capability(),
        what,
        *OLDEST_CARD,
    )


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
    """The random state that a backward pass asks for, and without dropout does not read."""
    return torch.zeros(2, dtype=torch.uint64, device=device)


def _dense_tree_forward(
    query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, scale: float
) -> tuple[Tensor, Tensor]:
    out, logsumexp = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
    for q, k, is_causal in plan.slices():
        part = attention_dense.forward(query[:, :, q], key[:, :, k], value[:, :, k], is_causal, scale)
        if not is_causal:
            part = merge(out[:, :, q], logsumexp[:, :, q], *part)
        out[:, :, q], logsumexp[:, :, q] = part
    return out.transpose(1, 2), logsumexp


def _dense_tree_backward(grad_out: Tensor, saved: Saved, plan: TreePlan, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, out, logsumexp = saved
    grad_out, out = grad_out.transpose(1, 2), out.transpose(1, 2)
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for q, k, is_causal in plan.slices():
        parts = attention_dense.backward(
            grad_out[:, :, q],
            query[:, :, q],
            key[:, :, k],
            value[:, :, k],
            out[:, :, q],
            logsumexp[:, :, q],
            is_causal,
            scale,
        )
        for grad, where, piece in zip(grads, (q, k, k), parts, strict=True):
            grad[:, :, where] += piece
    return grads
