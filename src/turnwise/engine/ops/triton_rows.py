"""A decode step of few rows in Triton: five kernels a layer, each of which reads its weights once.

With few rows a step is a chain of small kernels, and starting them takes longer than reading the weights. So the steps
between the products are part of the products here: the norm before, the residual sum or the gate after, and the
rotation of query and key before attention. Sums and roundings are those of `triton_layers.py`.

Shape legend: M rows, I inputs, O outputs, Q query heads, K key (and value) heads, D head size, S splits of a context.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Triton comes with CUDA builds of torch alone.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnwise.engine.ops.interface import AttentionRule, CacheSlots, Heads, Rotation

MOST_ROWS = 32
"""With more rows the matrix units of a library's products pay."""
OUTPUTS, INPUTS = 16, 256
"""Outputs that one program computes, and inputs that it reads at once."""
WARPS, STAGES = 4, 4
TILE = 64
"""Keys per inner step of attention."""
MAX_SPLITS = 16
TARGET_PROGRAMS = 264


@triton.jit
def _project_kernel(
    x, norm, weight, bias, rest, out, rows, eps, OUT: tl.constexpr, IN: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_REST: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_out = column < OUT
    row = tl.arange(0, ROWS)
    is_row = (row < rows)[:, None]
    within = tl.arange(0, INPUTS)
    from_x = x + row[:, None] * IN
    from_weight = weight + column.to(tl.int64)[:, None] * IN
    rstd = tl.zeros([ROWS], tl.float32)
    if HAS_NORM:
        for start in range(0, IN, INPUTS):
            place = (start + within)[None, :]
            wide = tl.load(from_x + place, mask=is_row & (place < IN), other=0.0).to(tl.float32)
            rstd += tl.sum(wide * wide, 1)
        rstd = 1.0 / tl.sqrt(rstd / IN + eps)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    second = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, IN, INPUTS):
        place = (start + within)[None, :]
        is_in = place < IN
        value = tl.load(from_x + place, mask=is_row & is_in, other=0.0)
        if HAS_NORM:
            scale = tl.load(norm + place, mask=is_in, other=0.0).to(tl.float32)
            value = (value.to(tl.float32) * rstd[:, None] * scale).to(value.dtype)
        tile = tl.load(from_weight + place, mask=is_out[:, None] & is_in, other=0.0)
        total = tl.dot(value, tl.trans(tile), total)
        if IS_GATED:
            tile = tl.load(from_weight + OUT * IN + place, mask=is_out[:, None] & is_in, other=0.0)
            second = tl.dot(value, tl.trans(tile), second)
    dtype = out.dtype.element_ty
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_out, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            second += tl.load(bias + OUT + column, mask=is_out, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        gate, up = total.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        total = gate * tl.sigmoid(gate) * up
    at = row[:, None] * OUT + column[None, :]
    mask = is_row & is_out[None, :]
    if HAS_REST:
        total = total.to(dtype).to(tl.float32) + tl.load(rest + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(dtype), mask=mask)


@triton.jit
def _turned(source, norm, cos, sin, position, dim, mask, eps, SIZE: tl.constexpr, HAS_NORM: tl.constexpr):
    """Both halves of heads that lie at `source`, normed and rotated."""
    HALF: tl.constexpr = SIZE // 2
    in_half = dim < HALF
    first = tl.load(source + dim, mask=mask & in_half, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + dim, mask=mask & in_half, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / SIZE
        rstd = (1.0 / tl.sqrt(mean + eps))[:, None]
        first = first * rstd * tl.load(norm + dim, mask=in_half, other=0.0).to(tl.float32)
        second = second * rstd * tl.load(norm + HALF + dim, mask=in_half, other=0.0).to(tl.float32)
    c = tl.load(cos + position * HALF + dim, mask=in_half, other=0.0)
    s = tl.load(sin + position * HALF + dim, mask=in_half, other=0.0)
    return first * c - second * s, second * c + first * s


@triton.jit
def _attend_kernel(
    qkv, cos, sin, positions, query_norm, key_norm, cache_k, cache_v, slots, block_table, out, maxima, sums, eps, scale,
    table_stride, BLOCK: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = SIZE // 2
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    dtype = cache_k.dtype.element_ty
    position = tl.load(positions + row).to(tl.int64)
    member = tl.arange(0, ROWS)
    in_group = (member < GROUP)[:, None]
    half = tl.arange(0, SIZE_PAD // 2)[None, :]
    dim = tl.arange(0, SIZE_PAD)[None, :]
    start_row = qkv + row * (GROUP + 2) * KV * SIZE
    q_at = start_row + (head * GROUP + member)[:, None] * SIZE
    low, high = _turned(q_at, query_norm, cos, sin, position, half, in_group, eps, SIZE, HAS_NORM)
    q_low, q_high = low.to(dtype), high.to(dtype)
    # The new token's key and value come from the projection; the first split counts them.
    one = tl.arange(0, 1)[:, None]
    k_at = start_row + (KV * GROUP + head + one) * SIZE
    low, high = _turned(k_at, key_norm, cos, sin, position, half, one == 0, eps, SIZE, HAS_NORM)
    k_low, k_high = low.to(dtype), high.to(dtype)
    value = tl.load(start_row + (KV * (GROUP + 1) + head) * SIZE + dim, mask=dim < SIZE, other=0.0)
    own = tl.sum(q_low.to(tl.float32) * k_low.to(tl.float32), 1)
    own = (own + tl.sum(q_high.to(tl.float32) * k_high.to(tl.float32), 1)) * scale
    is_first = split == 0
    if is_first:
        place = (tl.load(slots + row).to(tl.int64) * KV + head) * SIZE
        tl.store(cache_k + place + half, k_low, mask=half < HALF)
        tl.store(cache_k + place + HALF + half, k_high, mask=half < HALF)
        tl.store(cache_v + place + dim, value, mask=dim < SIZE)
    best = tl.where(is_first, own, -1e30)
    total = tl.zeros([ROWS], tl.float32) + tl.where(is_first, 1.0, 0.0)
    acc = tl.zeros([ROWS, SIZE_PAD], tl.float32) + tl.where(is_first, value.to(tl.float32), 0.0)
    per_split = tl.cdiv(tl.cdiv(position, SPLITS), TILE) * TILE
    begin = split * per_split
    end = tl.minimum(position, begin + per_split)
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        is_in = place < end
        block = tl.load(block_table + row * table_stride + place // BLOCK, mask=is_in, other=0).to(tl.int64)
        where = (((block * BLOCK + place % BLOCK) * KV + head) * SIZE)[:, None]
        in_half = is_in[:, None] & (half < HALF)
        scores = tl.dot(q_low, tl.trans(tl.load(cache_k + where + half, mask=in_half, other=0.0)))
        scores = tl.dot(q_high, tl.trans(tl.load(cache_k + where + HALF + half, mask=in_half, other=0.0)), scores)
        scores = tl.where(is_in[None, :], scores * scale, -1e30)
        new_best = tl.maximum(best, tl.max(scores, 1))
        probs = tl.where(is_in[None, :], tl.exp(scores - new_best[:, None]), 0.0)
        fade = tl.exp(best - new_best)
        values = tl.load(cache_v + where + dim, mask=is_in[:, None] & (dim < SIZE), other=0.0)
        total = total * fade + tl.sum(probs, 1)
        acc = tl.dot(probs.to(dtype), values, acc * fade[:, None])
        best = new_best
    at = (row * KV + head) * GROUP + member
    if SPLITS == 1:
        target = out + at[:, None] * SIZE + dim
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=in_group & (dim < SIZE))
    else:
        part = at * SPLITS + split
        tl.store(out + part[:, None] * SIZE + dim, acc, mask=in_group & (dim < SIZE))
        tl.store(maxima + part, best, mask=member < GROUP)
        tl.store(sums + part, total, mask=member < GROUP)


@triton.jit
def _merge_kernel(
    parts, maxima, sums, out, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, SPLITS: tl.constexpr, PAD: tl.constexpr
):
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, PAD)
    dim = tl.arange(0, SIZE_PAD)
    part = head * SPLITS + split
    best = tl.load(maxima + part, mask=split < SPLITS, other=-1e30)
    weight = tl.where(split < SPLITS, tl.exp(best - tl.max(best, 0)), 0.0)
    total = tl.sum(weight * tl.load(sums + part, mask=split < SPLITS, other=0.0), 0)
    mask = (split < SPLITS)[:, None] & (dim < SIZE)[None, :]
    values = tl.load(parts + part[:, None] * SIZE + dim[None, :], mask=mask, other=0.0)
    merged = tl.sum(values * weight[:, None], 0) / total
    tl.store(out + head * SIZE + dim, merged.to(out.dtype.element_ty), mask=dim < SIZE)


def project(
    x_MI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    rest: Tensor | None = None,
    is_gated: bool = False,
) -> Tensor:
    """x W' + b of few rows.

    Args:
        norm: the weight and the epsilon of an RMS norm that x goes through first.
        rest: added to the result: the residual stream.
        is_gated: the outputs are gate and up; the result is silu(gate) * up.
    """
    rows, inputs = x_MI.shape
    outputs = len(weight_OI) // 2 if is_gated else len(weight_OI)
    out = torch.empty(rows, outputs, dtype=x_MI.dtype, device=x_MI.device)
    scale, eps = (x_MI, 0.0) if norm is None else norm
    _project_kernel[(triton.cdiv(outputs, OUTPUTS),)](
        x_MI, scale, weight_OI, x_MI if bias_O is None else bias_O, x_MI if rest is None else rest, out, rows, eps,
        outputs, inputs, max(16, triton.next_power_of_2(rows)), OUTPUTS, INPUTS, norm is not None, bias_O is not None,
        rest is not None, is_gated, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out


def num_splits(num_rows: int, num_kv_heads: int, max_context: int) -> int:
    """Enough programs to fill the card, but each reads at least one tile."""
    wanted = TARGET_PROGRAMS // max(1, num_rows * num_kv_heads)
    return max(1, min(wanted, max_context // TILE, MAX_SPLITS))


def attend(
    qkv: Tensor, heads: Heads, rotation: Rotation, cache: CacheSlots, table: Tensor, max_context: int,
    rule: AttentionRule,
) -> Tensor:  # fmt: skip
    """Rotate the rows' queries and keys, write keys and values to the cache, attend: [M, Q D]."""
    rows, group = len(qkv), heads.num_query // heads.num_kv
    splits = num_splits(rows, heads.num_kv, max_context)
    out = torch.empty(rows, heads.num_query * heads.size, dtype=qkv.dtype, device=qkv.device)
    parts = maxima = sums = out
    if splits > 1:
        shape = (rows, heads.num_query, splits)
        parts = torch.empty(*shape, heads.size, dtype=torch.float32, device=qkv.device)
        maxima, sums = torch.empty(2, *shape, dtype=torch.float32, device=qkv.device)
    norms = (qkv, qkv) if heads.query_norm is None else (heads.query_norm, heads.key_norm)
    pad = max(32, triton.next_power_of_2(heads.size))
    _attend_kernel[(rows, heads.num_kv, splits)](
        qkv, rotation.cos, rotation.sin, rotation.positions, *norms, cache.keys, cache.values, cache.slots, table,
        parts, maxima, sums, heads.eps, rule.scale, table.stride(0), 16, heads.num_kv, group,
        max(16, triton.next_power_of_2(group)), heads.size, pad, TILE, splits, heads.query_norm is not None,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(rows * heads.num_query,)](
            parts, maxima, sums, out, heads.size, pad, splits, triton.next_power_of_2(splits), num_warps=1
        )
    return out
