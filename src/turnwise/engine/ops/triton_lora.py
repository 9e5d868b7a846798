"""Low-rank products of many adapters in one launch, in Triton.

Rows are sorted by adapter and cut into tiles of at most 16 rows of one adapter. Adapters live in banks: A of one group
of linears [slots, members, R, I], B times its scale [slots, O, R], ranks padded to R. A tile of no rows is skipped, so
a captured graph can hold as many tiles as a batch may need.

Shape legend: N rows, T tiles, I inputs, O outputs, R padded rank.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Only the CUDA builds of torch bring Triton.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 16
"""Rows of a tile: the smallest size that the matrix units take."""
INPUTS = 128
OUTPUTS = 64


@triton.jit
def _shrink_kernel(
    x, bank, tiles, low, num_in, num_tiles, MEMBERS: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr,
    INPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, member = tl.program_id(0), tl.program_id(1)
    count = tl.load(tiles + num_tiles + tile)
    if count > 0:
        start = tl.load(tiles + tile).to(tl.int64)
        slot = tl.load(tiles + 2 * num_tiles + tile).to(tl.int64)
        row = tl.arange(0, TILE)
        rank = tl.arange(0, RANK)
        is_row = row[:, None] < count
        a = bank + (slot * MEMBERS + member) * RANK * num_in
        total = tl.zeros([TILE, RANK], tl.float32)
        for first in range(0, num_in, INPUTS):
            column = first + tl.arange(0, INPUTS)
            is_column = column[None, :] < num_in
            left = tl.load(x + (start + row[:, None]) * num_in + column[None, :], mask=is_row & is_column, other=0.0)
            right = tl.load(a + rank[:, None] * num_in + column[None, :], mask=is_column, other=0.0)
            total += tl.dot(left, tl.trans(right), input_precision=PRECISION)
        at = low + ((start + row[:, None]) * MEMBERS + member) * RANK + rank[None, :]
        tl.store(at, total.to(low.dtype.element_ty), mask=is_row)


@triton.jit
def _expand_kernel(
    low, bank, tiles, members, y, num_out, num_tiles, MEMBERS: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr,
    OUTPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, block = tl.program_id(0), tl.program_id(1)
    count = tl.load(tiles + num_tiles + tile)
    if count > 0:
        start = tl.load(tiles + tile).to(tl.int64)
        slot = tl.load(tiles + 2 * num_tiles + tile).to(tl.int64)
        member = tl.load(members + block)
        row = tl.arange(0, TILE)
        rank = tl.arange(0, RANK)
        column = block * OUTPUTS + tl.arange(0, OUTPUTS)
        is_row = row[:, None] < count
        is_column = column < num_out
        left = tl.load(low + ((start + row[:, None]) * MEMBERS + member) * RANK + rank[None, :], mask=is_row, other=0.0)
        b = bank + (slot * num_out + column[:, None]) * RANK + rank[None, :]
        right = tl.load(b, mask=is_column[:, None], other=0.0)
        at = y + (start + row[:, None]) * num_out + column[None, :]
        mask = is_row & is_column[None, :]
        total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        total += tl.dot(left, tl.trans(right), input_precision=PRECISION)
        tl.store(at, total.to(y.dtype.element_ty), mask=mask)


def add_low_rank(x_NI: Tensor, bank_a: Tensor, bank_b: Tensor, members: Tensor, tiles: Tensor, y_NO: Tensor) -> Tensor:
    """y += (x A') B' of every row's adapter, in place; returns x A' [N, members, R], unset at rows without a tile.

    Args:
        bank_a: [slots, members, R, I].
        bank_b: [slots, O, R], scale included.
        members: [O / OUTPUTS] int32: which member of the group a block of outputs belongs to.
        tiles: [3, T] int32: first row, number of rows, slot.
    """
    _, num_members, rank, num_in = bank_a.shape
    num_out, num_tiles = bank_b.shape[1], tiles.shape[1]
    low = torch.empty(len(x_NI), num_members, rank, dtype=x_NI.dtype, device=x_NI.device)
    precision = "ieee" if x_NI.dtype is torch.float32 else "tf32"
    _shrink_kernel[(num_tiles, num_members)](
        x_NI, bank_a, tiles, low, num_in, num_tiles, num_members, rank, TILE, INPUTS, precision
    )
    _expand_kernel[(num_tiles, triton.cdiv(num_out, OUTPUTS))](
        low, bank_b, tiles, members, y_NO, num_out, num_tiles, num_members, rank, TILE, OUTPUTS, precision
    )
    return low
