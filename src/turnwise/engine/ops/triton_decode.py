"""Decode attention over a paged KV cache, in Triton.

One program reads one sequence's keys and values for one KV head, or a slice of them, once for all query heads of the
group (padded to 16 rows, the smallest size that the matrix units take). Long contexts are split over programs; their
partial softmaxes are merged by log-sum-exp. Registered as a custom op, so that a compiled model body can call it.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Only the CUDA builds of torch bring Triton.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnwise.engine.ops.interface import AttentionRule

TILE = 64
"""Keys per inner step."""
WARPS = 4
STAGES, WIDE_STAGES = 4, 3
"""Tiles that are on their way at once; fewer where a head takes more than `WIDE_HEAD` bytes and memory is short."""
WIDE_HEAD = 256
TARGET_PROGRAMS = 264
"""Split contexts until about this many programs run: two for each multiprocessor of a large card."""
MAX_SPLITS = 16


@triton.jit
def _decode_kernel(
    query, key_cache, value_cache, block_table, context_lens, sinks, out, maxima, sums, scale, softcap, window,
    table_stride, BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(context_lens + row)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(length - window, 0)
    per_split = tl.cdiv(tl.cdiv(length - begin, SPLITS), TILE) * TILE
    low = begin + split * per_split
    high = tl.minimum(length, low + per_split)
    dim = tl.arange(0, HEAD_PAD)
    group = tl.arange(0, ROWS)
    in_group = group[:, None] < GROUP
    in_head = dim[None, :] < HEAD
    offset = (row * KV_HEADS + head) * GROUP + group
    q = tl.load(query + offset[:, None] * HEAD + dim[None, :], mask=in_group & in_head, other=0.0)
    best = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head * GROUP + group, mask=group < GROUP, other=-1e30).to(tl.float32)
        best = tl.where(split == 0, sink, best)
        total = tl.where(split == 0, 1.0, total)
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    for start in range(low, high, TILE):
        position = start + tl.arange(0, TILE)
        is_in = position < high
        block = tl.load(block_table + row * table_stride + position // BLOCK, mask=is_in, other=0).to(tl.int64)
        where = ((block * BLOCK + position % BLOCK) * KV_HEADS + head) * HEAD
        mask = is_in[:, None] & in_head
        k = tl.load(key_cache + where[:, None] + dim[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_SOFTCAP:  # tanh by exp of a number below 0, which does not overflow
            e = tl.exp(-2.0 * tl.abs(scores) / softcap)
            turned = (1.0 - e) / (1.0 + e)
            scores = tl.where(scores < 0, -turned, turned) * softcap
        scores = tl.where(is_in[None, :], scores, -1e30)
        new_best = tl.maximum(best, tl.max(scores, 1))
        probs = tl.exp(scores - new_best[:, None])
        probs = tl.where(is_in[None, :], probs, 0.0)
        fade = tl.exp(best - new_best)
        v = tl.load(value_cache + where[:, None] + dim[None, :], mask=mask, other=0.0)
        total = total * fade + tl.sum(probs, 1)
        acc = acc * fade[:, None] + tl.dot(probs.to(v.dtype), v, input_precision=PRECISION)
        best = new_best
    if SPLITS == 1:
        result = acc / tl.maximum(total, 1e-30)[:, None]
        target = out + offset[:, None] * HEAD + dim[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=in_group & in_head)
    else:
        part = ((row * KV_HEADS + head) * SPLITS + split) * GROUP + group
        tl.store(out + part[:, None] * HEAD + dim[None, :], acc, mask=in_group & in_head)
        tl.store(maxima + part, best, mask=group < GROUP)
        tl.store(sums + part, total, mask=group < GROUP)


@triton.jit
def _merge_kernel(
    parts, maxima, sums, out, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_head, member = head // GROUP, head % GROUP
    split = tl.arange(0, SPLITS_PAD)
    dim = tl.arange(0, HEAD_PAD)
    is_split = split < SPLITS
    part = ((row * KV_HEADS + kv_head) * SPLITS + split) * GROUP + member
    best = tl.load(maxima + part, mask=is_split, other=-1e30)
    weight = tl.where(is_split, tl.exp(best - tl.max(best, 0)), 0.0)
    total = tl.sum(weight * tl.load(sums + part, mask=is_split, other=0.0), 0)
    mask = is_split[:, None] & (dim < HEAD)[None, :]
    values = tl.load(parts + part[:, None] * HEAD + dim[None, :], mask=mask, other=0.0)
    merged = tl.sum(values * weight[:, None], 0) / tl.maximum(total, 1e-30)
    target = out + (row * KV_HEADS * GROUP + head) * HEAD + dim
    tl.store(target, merged.to(out.dtype.element_ty), mask=dim < HEAD)


def num_splits(num_rows: int, num_kv_heads: int, max_context: int) -> int:
    """Enough programs to fill the card, but each reads at least four tiles."""
    wanted = TARGET_PROGRAMS // max(1, num_rows * num_kv_heads)
    return max(1, min(wanted, max_context // (4 * TILE), MAX_SPLITS))


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    max_context: int,
    rule: AttentionRule,
) -> Tensor:
    """Attention of query [B, H, D] over each row's blocks -> [B, H, D]."""
    seen = max_context if rule.window is None else min(max_context, rule.window)
    splits = num_splits(query.shape[0], key_cache.shape[2], seen)
    sinks = None if rule.sinks is None else rule.sinks.contiguous()
    return _paged_decode(
        query.contiguous(), key_cache, value_cache, block_table, context_lens, sinks, splits, rule.scale,
        rule.softcap or 0.0, rule.window or 0,
    )  # fmt: skip


@torch.library.custom_op("turnwise::paged_decode", mutates_args=())
def _paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    sinks: Tensor | None,
    splits: int,
    scale: float,
    softcap: float,
    window: int,
) -> Tensor:
    rows, heads, head_size = query.shape
    block_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
    group = heads // kv_heads
    if splits == 1:
        out = torch.empty_like(query)
        maxima = sums = out
    else:
        shape = (rows, kv_heads, splits, group)
        out = torch.empty(*shape, head_size, device=query.device, dtype=torch.float32)
        maxima = torch.empty(shape, device=query.device, dtype=torch.float32)
        sums = torch.empty_like(maxima)
    stages = STAGES if head_size * query.itemsize <= WIDE_HEAD else WIDE_STAGES
    _decode_kernel[(rows, kv_heads, splits)](
        query, key_cache, value_cache, block_table, context_lens, query if sinks is None else sinks, out, maxima, sums,
        scale, softcap, window, block_table.stride(0), block_size, kv_heads, group,
        max(16, triton.next_power_of_2(group)), head_size, max(16, triton.next_power_of_2(head_size)), TILE, splits,
        "ieee" if query.dtype is torch.float32 else "tf32", window > 0, softcap > 0, sinks is not None,
        num_warps=WARPS, num_stages=stages,
    )  # fmt: skip
    if splits == 1:
        return out
    merged = torch.empty_like(query)
    _merge_kernel[(rows, heads)](
        out, maxima, sums, merged, kv_heads, group, head_size, max(16, triton.next_power_of_2(head_size)), splits,
        triton.next_power_of_2(splits),
    )  # fmt: skip
    return merged


@_paged_decode.register_fake
def _(query, key_cache, value_cache, block_table, context_lens, sinks, splits, scale, softcap, window):  # noqa: ARG001
    return torch.empty_like(query)
