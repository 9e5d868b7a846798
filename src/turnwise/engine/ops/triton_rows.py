"""A decode step of few rows in Triton: five kernels a layer, each of which reads its weights once.

With few rows a step is a chain of small kernels, and starting them takes longer than reading the weights. So the steps
between the products are part of the products here: the norm before, the residual sum or the gate after, and the
rotation of query and key before attention. Sums and roundings are those of `triton_layers.py`. On a Hopper card a
kernel starts to read its weights while the one before it still runs.

Shape legend: M rows, I inputs, O outputs, Q query heads, K key (and value) heads, D head size, S splits of a context.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Only the CUDA builds of torch bring Triton.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turnwise.engine.ops.interface import Heads, Rotation

if TYPE_CHECKING:
    from turnwise.engine.attention.plans import PagedPlan

MOST_ROWS = 4
"""With more rows, a library's products on the matrix units are as fast."""
TILE_VALUES = 8192
"""Weights that one program holds in registers."""
WARPS = 8
KEYS = 64
"""Keys per inner step of attention."""
MAX_SPLITS = 16
TARGET_PROGRAMS = 264
HOPPER = 9
"""First digit of the compute capability from which a kernel can start before the one ahead of it has ended."""


@triton.jit
def _project_kernel(
    x, norm, weight, bias, rest, out, eps, OUT: tl.constexpr, IN: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_REST: tl.constexpr,
    IS_GATED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    place = tl.arange(0, PAD)
    is_out, is_in = column < OUT, place < IN
    dtype = out.dtype.element_ty
    at = weight + column.to(tl.int64)[:, None] * IN + place[None, :]
    inside = is_out[:, None] & is_in[None, :]
    tile = tl.load(at, mask=inside, other=0.0)
    if IS_GATED:
        up_tile = tl.load(at + OUT * IN, mask=inside, other=0.0)
    if HAS_NORM:
        scale = tl.load(norm + place, mask=is_in, other=0.0).to(tl.float32)
    if OVERLAPS:  # weights never change within a step; all else waits for the kernels before
        gdc_launch_dependents()
        gdc_wait()
    for row in tl.static_range(ROWS):
        value = tl.load(x + row * IN + place, mask=is_in, other=0.0).to(tl.float32)
        if HAS_NORM:
            rstd = 1.0 / tl.sqrt(tl.sum(value * value, 0) / IN + eps)
            value = (value * rstd * scale).to(dtype).to(tl.float32)
        total = tl.sum(tile.to(tl.float32) * value[None, :], 1)
        if HAS_BIAS:
            total += tl.load(bias + column, mask=is_out, other=0.0).to(tl.float32)
        if IS_GATED:
            up = tl.sum(up_tile.to(tl.float32) * value[None, :], 1)
            if HAS_BIAS:
                up += tl.load(bias + OUT + column, mask=is_out, other=0.0).to(tl.float32)
            gate, up = total.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
            total = gate * tl.sigmoid(gate) * up
        to = row * OUT + column
        if HAS_REST:
            total = total.to(dtype).to(tl.float32) + tl.load(rest + to, mask=is_out, other=0.0).to(tl.float32)
        tl.store(out + to, total.to(dtype), mask=is_out)


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
def _store_attended(
    out, maxima, sums, acc, best, total, at, split, in_group, dim, SIZE: tl.constexpr, SPLITS: tl.constexpr
):
    """The result of a program; with several splits, what `_merge_kernel` reads of it."""
    inside = in_group & (dim < SIZE)
    if SPLITS == 1:
        tl.store(out + at[:, None] * SIZE + dim, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        part = (at * SPLITS + split)[:, None]
        tl.store(out + part * SIZE + dim, acc, mask=inside)
        tl.store(maxima + part, best[:, None], mask=in_group)
        tl.store(sums + part, total[:, None], mask=in_group)


@triton.jit
def _attend_kernel(
    qkv, cos, sin, positions, query_norm, key_norm, cache_k, cache_v, slots, block_table, out, maxima, sums, eps, scale,
    table_stride, BLOCK: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, HAS_NORM: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = SIZE // 2
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    dtype = cache_k.dtype.element_ty
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
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
    _store_attended(out, maxima, sums, acc, best, total, at, split, in_group, dim, SIZE, SPLITS)


@triton.jit
def _merge_kernel(
    parts, maxima, sums, out, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, SPLITS: tl.constexpr, PAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
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


def takes(num_rows: int, dtype: torch.dtype) -> bool:
    """Whether these kernels are the fastest way; attention here takes 16-bit numbers."""
    return num_rows <= MOST_ROWS and dtype in (torch.bfloat16, torch.float16)


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
    pad = triton.next_power_of_2(inputs)
    each = max(1, TILE_VALUES // pad // (2 if is_gated else 1))
    _project_kernel[(triton.cdiv(outputs, each),)](
        x_MI, scale, weight_OI, x_MI if bias_O is None else bias_O, x_MI if rest is None else rest, out, eps, outputs,
        inputs, pad, rows, each, norm is not None, bias_O is not None, rest is not None, is_gated,
        num_warps=WARPS, **_overlap(x_MI),
    )  # fmt: skip
    return out


def _overlap(like: Tensor) -> dict[str, bool]:
    """The settings of a kernel that may start early, where the card can."""
    can = torch.cuda.get_device_capability(like.device)[0] >= HOPPER
    return {"OVERLAPS": True, "launch_pdl": True} if can else {"OVERLAPS": False}


def num_splits(num_rows: int, num_kv_heads: int, max_context: int) -> int:
    """Enough programs to fill the card, but each reads at least one tile."""
    wanted = TARGET_PROGRAMS // max(1, num_rows * num_kv_heads)
    return max(1, min(wanted, max_context // KEYS, MAX_SPLITS))


def attend(qkv: Tensor, heads: Heads, rotation: Rotation, plan: PagedPlan, layer: int, scale: float) -> Tensor:
    """Rotate the rows' queries and keys, write keys and values to the cache, attend: [M, Q D]."""
    rows, group = len(qkv), heads.num_query // heads.num_kv
    splits = num_splits(rows, heads.num_kv, plan.max_context)
    out = torch.empty(rows, heads.num_query * heads.size, dtype=qkv.dtype, device=qkv.device)
    parts = maxima = sums = out
    if splits > 1:
        shape = (rows, heads.num_query, splits)
        parts = torch.empty(*shape, heads.size, dtype=torch.float32, device=qkv.device)
        maxima, sums = torch.empty(2, *shape, dtype=torch.float32, device=qkv.device)
    norms = (qkv, qkv) if heads.query_norm is None else (heads.query_norm, heads.key_norm)
    cache, table, pad = plan.cache_slots(layer), plan.block_table, max(32, triton.next_power_of_2(heads.size))
    _attend_kernel[(rows, heads.num_kv, splits)](
        qkv, rotation.cos, rotation.sin, rotation.positions, *norms, cache.keys, cache.values, cache.slots, table,
        parts, maxima, sums, heads.eps, scale, table.stride(0), plan.cache.block_size, heads.num_kv, group,
        max(16, triton.next_power_of_2(group)), heads.size, pad, KEYS, splits, heads.query_norm is not None,
        num_warps=4, num_stages=3, **_overlap(qkv),
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(rows * heads.num_query,)](
            parts, maxima, sums, out, heads.size, pad, splits, triton.next_power_of_2(splits), num_warps=1,
            **_overlap(qkv),
        )  # fmt: skip
    return out
