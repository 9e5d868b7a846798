"""The steps between matrix products as fused Triton kernels: each reads its inputs once and writes its outputs once.

Shape legend: N packed tokens, H hidden size, Q query heads, K key (and value) heads, D head size, I inner size.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Only the CUDA builds of torch bring Triton.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnwise.engine.ops.interface import CacheSlots, Heads, Rotation

GATE_BLOCK = 1024
HEADS_BLOCK = 8
"""Heads that one program rotates. The number is small so that a decode step of a hundred rows fills the card."""


@triton.jit
def _add_norm_kernel(
    h, delta, weight, out_h, out_x, out_rstd, eps, SIZE: tl.constexpr, PAD: tl.constexpr, HAS_DELTA: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PAD)
    inside = column < SIZE
    value = tl.load(h + row * SIZE + column, mask=inside, other=0.0)
    if HAS_DELTA:
        more = tl.load(delta + row * SIZE + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(out_h.dtype.element_ty)
        tl.store(out_h + row * SIZE + column, value, mask=inside)
    wide = value.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_x + row * SIZE + column, (wide * rstd * scale).to(out_x.dtype.element_ty), mask=inside)
    tl.store(out_rstd + row, rstd)


@triton.jit
def _norm_backward_kernel(dx, h, rstd, weight, dh, SIZE: tl.constexpr, PAD: tl.constexpr, HAS_DH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PAD)
    inside = column < SIZE
    where = row * SIZE + column
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scaled = tl.load(dx + where, mask=inside, other=0.0).to(tl.float32) * scale
    wide = tl.load(h + where, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.load(rstd + row)
    mean = tl.sum(scaled * wide, 0) / SIZE
    grad = inverse * (scaled - wide * (inverse * inverse * mean))
    if HAS_DH:
        grad += tl.load(dh + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(dh + where, grad.to(dh.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_kernel(
    qkv, cos, sin, positions, query_norm, key_norm, out_q, out_k, cache_k, cache_v, slots, eps,
    QUERY: tl.constexpr, KV: tl.constexpr, HEADS_BLOCK: tl.constexpr, SIZE: tl.constexpr, HALF_PAD: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_CACHE: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = SIZE // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)[:, None]
    dim = tl.arange(0, HALF_PAD)[None, :]
    in_half = dim < HALF
    inside = (head < QUERY + KV) & in_half
    source = qkv + row * (QUERY + 2 * KV) * SIZE + head * SIZE + dim
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    is_query = head < QUERY
    if HAS_NORM:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / SIZE
        rstd = (1.0 / tl.sqrt(mean + eps))[:, None]
        low_q = tl.load(query_norm + dim, mask=in_half, other=0.0).to(tl.float32)
        low_k = tl.load(key_norm + dim, mask=in_half, other=0.0).to(tl.float32)
        high_q = tl.load(query_norm + HALF + dim, mask=in_half, other=0.0).to(tl.float32)
        high_k = tl.load(key_norm + HALF + dim, mask=in_half, other=0.0).to(tl.float32)
        first = first * rstd * tl.where(is_query, low_q, low_k)
        second = second * rstd * tl.where(is_query, high_q, high_k)
    position = tl.load(positions + row).to(tl.int64)
    c = tl.load(cos + position * HALF + dim, mask=in_half, other=0.0)
    s = tl.load(sin + position * HALF + dim, mask=in_half, other=0.0)
    low = (first * c - second * s).to(out_q.dtype.element_ty)
    high = (second * c + first * s).to(out_q.dtype.element_ty)
    target_q = out_q + (row * QUERY + head) * SIZE + dim
    tl.store(target_q, low, mask=inside & is_query)
    tl.store(target_q + HALF, high, mask=inside & is_query)
    is_key = inside & (head >= QUERY)
    target_k = out_k + (row * KV + head - QUERY) * SIZE + dim
    tl.store(target_k, low, mask=is_key)
    tl.store(target_k + HALF, high, mask=is_key)
    if HAS_CACHE:
        slot = tl.load(slots + row).to(tl.int64)
        place = (slot * KV + head - QUERY) * SIZE + dim
        tl.store(cache_k + place, low, mask=is_key)
        tl.store(cache_k + place + HALF, high, mask=is_key)
        values = source + KV * SIZE
        tl.store(cache_v + place, tl.load(values, mask=is_key, other=0.0), mask=is_key)
        tl.store(cache_v + place + HALF, tl.load(values + HALF, mask=is_key, other=0.0), mask=is_key)


@triton.jit
def _rotate_backward_kernel(
    dq, dk, dv, qkv, cos, sin, positions, query_norm, key_norm, out, eps,
    q_token, q_head, k_token, k_head, v_token, v_head,
    QUERY: tl.constexpr, KV: tl.constexpr, HEADS_PAD: tl.constexpr, SIZE: tl.constexpr, HALF_PAD: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = SIZE // 2
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_PAD)[:, None]
    dim = tl.arange(0, HALF_PAD)[None, :]
    in_half = dim < HALF
    is_query = (head < QUERY) & in_half
    is_key = (head >= QUERY) & (head < QUERY + KV) & in_half
    inside = is_query | is_key
    from_q = dq + row * q_token + head * q_head + dim
    from_k = dk + row * k_token + (head - QUERY) * k_head + dim
    low = tl.load(from_q, mask=is_query, other=0.0).to(tl.float32)
    low += tl.load(from_k, mask=is_key, other=0.0).to(tl.float32)
    high = tl.load(from_q + HALF, mask=is_query, other=0.0).to(tl.float32)
    high += tl.load(from_k + HALF, mask=is_key, other=0.0).to(tl.float32)
    position = tl.load(positions + row).to(tl.int64)
    c = tl.load(cos + position * HALF + dim, mask=in_half, other=0.0)
    s = tl.load(sin + position * HALF + dim, mask=in_half, other=0.0)
    first = low * c + high * s
    second = high * c - low * s
    place = row * (QUERY + 2 * KV) * SIZE + head * SIZE + dim
    if HAS_NORM:
        raw_low = tl.load(qkv + place, mask=inside, other=0.0).to(tl.float32)
        raw_high = tl.load(qkv + place + HALF, mask=inside, other=0.0).to(tl.float32)
        mean = (tl.sum(raw_low * raw_low, 1) + tl.sum(raw_high * raw_high, 1)) / SIZE
        rstd = (1.0 / tl.sqrt(mean + eps))[:, None]
        low_q = tl.load(query_norm + dim, mask=in_half, other=0.0).to(tl.float32)
        low_k = tl.load(key_norm + dim, mask=in_half, other=0.0).to(tl.float32)
        high_q = tl.load(query_norm + HALF + dim, mask=in_half, other=0.0).to(tl.float32)
        high_k = tl.load(key_norm + HALF + dim, mask=in_half, other=0.0).to(tl.float32)
        first = first * tl.where(head < QUERY, low_q, low_k)
        second = second * tl.where(head < QUERY, high_q, high_k)
        along = ((tl.sum(first * raw_low, 1) + tl.sum(second * raw_high, 1)) / SIZE)[:, None]
        first = rstd * (first - raw_low * (rstd * rstd * along))
        second = rstd * (second - raw_high * (rstd * rstd * along))
    tl.store(out + place, first.to(out.dtype.element_ty), mask=inside)
    tl.store(out + place + HALF, second.to(out.dtype.element_ty), mask=inside)
    from_v = dv + row * v_token + (head - QUERY) * v_head + dim
    tl.store(out + place + KV * SIZE, tl.load(from_v, mask=is_key, other=0.0), mask=is_key)
    tl.store(out + place + KV * SIZE + HALF, tl.load(from_v + HALF, mask=is_key, other=0.0), mask=is_key)


@triton.jit
def _swiglu_kernel(gate_up, act, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(act + row * SIZE + column, (gate * tl.sigmoid(gate) * up).to(act.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(dact, gate_up, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    at_gate = gate_up + row * 2 * SIZE + column
    at_act = dact + row * SIZE + column
    gate = tl.load(at_gate, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at_gate + SIZE, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(at_act, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dtype = gate_up.dtype.element_ty
    tl.store(at_gate, (grad * up * (sigmoid + silu * (1.0 - sigmoid))).to(dtype), mask=inside)
    tl.store(at_gate + SIZE, (grad * silu).to(dtype), mask=inside)
    tl.store(at_act, (silu * up).to(dtype), mask=inside)


def add_norm(
    h: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    room: Tensor | None = None,  # noqa: ARG001 - torch's allocator is fast enough, so `room` is not used
) -> tuple[Tensor, Tensor, Tensor]:
    """h + delta, its RMS norm times `weight`, and 1 / rms [N]."""
    rows, size = h.shape
    out_h = h if delta is None else torch.empty_like(h)
    out_x = torch.empty_like(h)
    rstd = torch.empty(rows, dtype=torch.float32, device=h.device)
    _add_norm_kernel[(rows,)](
        h, h if delta is None else delta, weight, out_h, out_x, rstd, eps, size, triton.next_power_of_2(size),
        delta is not None,
    )  # fmt: skip
    return out_h, out_x, rstd


def norm_backward(dx: Tensor, h: Tensor, rstd: Tensor, weight: Tensor, dh: Tensor | None) -> Tensor:
    """Gradient of `add_norm` for its sum, added to `dh` in place."""
    rows, size = h.shape
    out = torch.empty_like(h) if dh is None else dh
    _norm_backward_kernel[(rows,)](dx, h, rstd, weight, out, size, triton.next_power_of_2(size), dh is not None)
    return out


def rotate(qkv: Tensor, heads: Heads, rotation: Rotation, cache: CacheSlots | None) -> tuple[Tensor, Tensor, Tensor]:
    """Head norms and rotary position: query [N, Q, D], key and value [N, K, D]."""
    rows = len(qkv)
    query = torch.empty(rows, heads.num_query, heads.size, dtype=qkv.dtype, device=qkv.device)
    key = torch.empty(rows, heads.num_kv, heads.size, dtype=qkv.dtype, device=qkv.device)
    keys, values, slots = (qkv, qkv, qkv) if cache is None else (cache.keys, cache.values, cache.slots)
    grid = (rows, triton.cdiv(heads.num_query + heads.num_kv, HEADS_BLOCK))
    _rotate_kernel[grid](
        qkv, rotation.cos, rotation.sin, rotation.positions, *_norms(heads, qkv), query, key, keys, values, slots,
        heads.eps, heads.num_query, heads.num_kv, HEADS_BLOCK, heads.size, triton.next_power_of_2(heads.size // 2),
        heads.query_norm is not None, cache is not None,
    )  # fmt: skip
    return query, key, heads.split(qkv)[2]


def rotate_backward(
    grads: tuple[Tensor, Tensor, Tensor], qkv: Tensor | None, heads: Heads, rotation: Rotation
) -> Tensor:
    """Gradient of the joined projection [N, (Q + 2 K) D]; `qkv` is needed where heads are normed."""
    dquery, dkey, dvalue = grads
    rows = len(dquery)
    width = (heads.num_query + 2 * heads.num_kv) * heads.size
    out = torch.empty(rows, width, dtype=dquery.dtype, device=dquery.device)
    raw = dquery if qkv is None else qkv
    strides = [stride for grad in grads for stride in grad.stride()[:2]]
    _rotate_backward_kernel[(rows,)](
        dquery, dkey, dvalue, raw, rotation.cos, rotation.sin, rotation.positions, *_norms(heads, raw), out, heads.eps,
        *strides, *_shape(heads),
        qkv is not None,
    )  # fmt: skip
    return out


def swiglu(gate_up: Tensor, *, room: Tensor | None = None) -> Tensor:  # noqa: ARG001
    """silu(gate) * up, from [N, 2 I]."""
    rows, size = len(gate_up), gate_up.shape[1] // 2
    act = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu_kernel[(rows, triton.cdiv(size, GATE_BLOCK))](gate_up, act, size, GATE_BLOCK)
    return act


def swiglu_backward(dact: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of `gate_up`, and the activation once more; both are written over the inputs."""
    rows, size = dact.shape
    _swiglu_backward_kernel[(rows, triton.cdiv(size, GATE_BLOCK))](dact, gate_up, size, GATE_BLOCK)
    return gate_up, dact


def _norms(heads: Heads, filler: Tensor) -> tuple[Tensor, Tensor]:
    if heads.query_norm is None or heads.key_norm is None:
        return filler, filler
    return heads.query_norm, heads.key_norm


def _shape(heads: Heads) -> tuple[int, int, int, int, int]:
    num_heads = heads.num_query + heads.num_kv
    return (
        heads.num_query,
        heads.num_kv,
        triton.next_power_of_2(num_heads),
        heads.size,
        triton.next_power_of_2(heads.size // 2),
    )
