"""Products and attention in Triton in which a row's result depends on that row alone, to the last bit.

Every product uses tiles of one size, chosen by the weight's shape, and sums along its depth from the first block to the
last: no split of the depth, no choice by the number of rows. Attention has one kernel for decode, prompts and training:
a tile of queries meets the keys of its sequence from position 0 on, in blocks of one size. A block that a row does not
see leaves its sums as they are, because it multiplies by 1 and adds 0.

Shape legend: N rows, I inputs, O outputs, Q query heads, K key (and value) heads, D head size.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Only the CUDA builds of torch bring Triton.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnwise.engine.ops.key_tiles import KeyTiles

ROWS, DEPTH, GROUPED = 64, 64, 8
"""Rows and depth of a product's tile, and how many tiles of rows read a tile of the weight one after the other."""
NARROW, WIDE, MANY_OUTPUTS = 64, 128, 2048
"""Outputs of a tile: few for a weight of up to `MANY_OUTPUTS`, so that a decode step still fills the card."""
QUERY_ROWS, KEYS = 64, 64
"""Rows of an attention tile (queries times the heads that share keys), and keys of an inner step."""
WIDE_HEAD = 256
"""Bytes of a head from which fewer blocks are on their way at once."""


@triton.jit(do_not_specialize=["num_rows"])  # one compiled kernel for all numbers of rows
def _linear_kernel(
    x, weight, bias, out, num_rows, num_out, num_in, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
    GROUPED: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row_tiles, col_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_out, COLS)
    group = program // (GROUPED * col_tiles)
    size = tl.minimum(row_tiles - group * GROUPED, GROUPED)
    row = (group * GROUPED + program % (GROUPED * col_tiles) % size) * ROWS + tl.arange(0, ROWS)
    column = (program % (GROUPED * col_tiles) // size) * COLS + tl.arange(0, COLS)
    is_row, is_column = row[:, None] < num_rows, column[:, None] < num_out
    left = x + row.to(tl.int64)[:, None] * num_in
    right = weight + column.to(tl.int64)[:, None] * num_in
    total = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(0, num_in, DEPTH):
        depth = first + tl.arange(0, DEPTH)[None, :]
        is_in = depth < num_in
        a = tl.load(left + depth, mask=is_row & is_in, other=0.0)
        b = tl.load(right + depth, mask=is_column & is_in, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < num_out, other=0.0).to(tl.float32)[None, :]
    target = out + row.to(tl.int64)[:, None] * num_out + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_row & (column[None, :] < num_out))


@triton.jit(do_not_specialize=["num_tiles", "num_tokens"])
def _attend_kernel(
    query, key, value, table, tiles, out, logsumexps, scale, num_tiles, num_tokens, q_token, k_token, v_token,
    BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_SUMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(tiles + tile).to(tl.int64)
    count = tl.load(tiles + num_tiles + tile)
    begin = tl.load(tiles + 2 * num_tiles + tile)
    blocks = table + tl.load(tiles + 3 * num_tiles + tile).to(tl.int64)
    index = tl.arange(0, ROWS) // GROUP_PAD
    member = tl.arange(0, ROWS) % GROUP_PAD
    is_query = (index < count) & (member < GROUP)
    position = begin + index
    dim = tl.arange(0, HEAD_PAD)
    in_head = dim[None, :] < HEAD
    token, query_head = first + index, head * GROUP + member
    q = tl.load(
        query + token[:, None] * q_token + query_head[:, None] * HEAD + dim[None, :],
        mask=is_query[:, None] & in_head, other=0.0,
    )  # fmt: skip
    best = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    limit = begin + count
    for start in range(0, limit, KEYS):
        place = start + tl.arange(0, KEYS)
        is_key = place < limit
        block = tl.load(blocks + place // BLOCK, mask=is_key, other=0).to(tl.int64)
        slot = block * BLOCK + place % BLOCK
        mask = is_key[:, None] & in_head
        k = tl.load(key + slot[:, None] * k_token + head * HEAD + dim[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        is_seen = (place[None, :] <= position[:, None]) & is_key[None, :]
        scores = tl.where(is_seen, scores, -1e30)
        new_best = tl.maximum(best, tl.max(scores, 1))
        probs = tl.where(is_seen, tl.exp(scores - new_best[:, None]), 0.0)
        fade = tl.exp(best - new_best)
        v = tl.load(value + slot[:, None] * v_token + head * HEAD + dim[None, :], mask=mask, other=0.0)
        total = total * fade + tl.sum(probs, 1)
        acc = acc * fade[:, None] + tl.dot(probs.to(v.dtype), v, input_precision=PRECISION)
        best = new_best
    total = tl.maximum(total, 1e-30)
    target = out + (token[:, None] * KV_HEADS * GROUP + query_head[:, None]) * HEAD + dim[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_query[:, None] & in_head)
    if HAS_SUMS:
        tl.store(logsumexps + query_head.to(tl.int64) * num_tokens + token, best + tl.log(total), mask=is_query)


def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W' + b."""
    x_NI = x_NI.contiguous()
    (rows, inputs), outputs = x_NI.shape, len(weight_OI)
    out = torch.empty(rows, outputs, dtype=x_NI.dtype, device=x_NI.device)
    columns = NARROW if outputs <= MANY_OUTPUTS else WIDE
    is_wide = x_NI.dtype is torch.float32
    depth = DEPTH // 2 if is_wide else DEPTH
    if rows:
        _linear_kernel[(triton.cdiv(rows, ROWS) * triton.cdiv(outputs, columns),)](
            x_NI, weight_OI, x_NI if bias_O is None else bias_O, out, rows, outputs, inputs, ROWS, columns, depth,
            GROUPED, bias_O is not None, "ieee" if is_wide else "tf32", num_warps=4, num_stages=2 if is_wide else 4,
        )  # fmt: skip
    return out


def queries_per_tile(num_heads: int, num_kv_heads: int) -> int:
    """How many neighbouring queries fit a tile beside the heads that share their keys."""
    return QUERY_ROWS // triton.next_power_of_2(num_heads // num_kv_heads)


def attend(
    query: Tensor, key: Tensor, value: Tensor, tiles: KeyTiles, scale: float, *, with_sums: bool
) -> tuple[Tensor, Tensor]:
    """Output [N, Q, D] and log-sum-exp [Q, N] of query [N, Q, D] over key and value [slots, K, D].

    Rows that no tile holds stay unset. All sides are dense in their last two axes.
    """
    num_tokens, num_heads, size = query.shape
    num_kv = key.shape[1]
    group = num_heads // num_kv
    out = torch.empty(num_tokens, num_heads, size, dtype=query.dtype, device=query.device)
    sums = torch.empty(num_heads, num_tokens if with_sums else 0, dtype=torch.float32, device=query.device)
    is_wide = query.dtype is torch.float32
    _attend_kernel[(tiles.tiles.shape[1], num_kv)](
        query, key, value, tiles.table, tiles.tiles, out, sums, scale, tiles.tiles.shape[1], num_tokens,
        query.stride(0), key.stride(0), value.stride(0), tiles.block_size, num_kv, group, triton.next_power_of_2(group),
        size, max(16, triton.next_power_of_2(size)), QUERY_ROWS, KEYS, with_sums, "ieee" if is_wide else "tf32",
        num_warps=4, num_stages=1 if is_wide else 2 if size * query.itemsize > WIDE_HEAD else 3,
    )  # fmt: skip
    return out, sums
