"""An adapter's part of a product as `engine.bitwise` adds it: the same bits in sampling and in training.

On a GPU the sampler serves rows of many adapters with one kernel (`ops/triton_lora.py`), which reads them from banks.
A pass of the trainer uses the same kernel, with a bank for its adapter alone. Zeros that pad a rank change no sum.

Shape legend: N rows, I inputs, O outputs, r rank, R padded rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from turnwise.engine.model.fused_parts import OUTPUT_BLOCK
from turnwise.engine.ops.interface import Ops

TILE_ROWS = 16
"""Rows of a tile of a bank."""
MIN_RANK = 16

Member = tuple[slice, tuple[Tensor, Tensor] | None]
"""The outputs of one linear of a group, and its A [r, I] and B [O, r]; None without an adapter."""


def owners_of_outputs(num_outputs: int, bounds: Sequence[slice]) -> np.ndarray:
    """[O / 64] int32: the linear to which each block of outputs belongs."""
    owners = np.zeros(-(-num_outputs // OUTPUT_BLOCK), dtype=np.int32)
    for index, own in enumerate(bounds):
        owners[own.start // OUTPUT_BLOCK :] = index
    return owners


def padded_rank(rank: int) -> int:
    """The rank of a bank that holds an adapter of this rank."""
    return max(MIN_RANK, 1 << (rank - 1).bit_length())


def add_in_order(x_NI: Tensor, y_NO: Tensor, rows: slice, members: Sequence[Member], scale: float, ops: Ops) -> Tensor:
    """y += scale (x A') B' at some rows, in place; returns x A' of the linears with an adapter [n, adapted * r]."""
    pairs = [pair for _, pair in members if pair is not None]
    if ops.add_low_rank is None:
        low = ops.products.multiply(x_NI[rows], torch.cat([a for a, _ in pairs]).t())
        first = 0
        for bounds, pair in members:
            if pair is not None:
                stop = first + pair[1].shape[1]
                out = y_NO[rows, bounds]
                ops.products.multiply(low[:, first:stop], pair[1].t(), out=out, alpha=scale, is_added=True)
                first = stop
        return low
    rank, (num_outputs, num_inputs) = len(pairs[0][0]), (y_NO.shape[1], x_NI.shape[1])
    bank_a = x_NI.new_zeros(1, len(members), padded_rank(rank), num_inputs)
    bank_b = x_NI.new_zeros(1, num_outputs, padded_rank(rank))
    for index, (bounds, pair) in enumerate(members):
        if pair is not None:
            bank_a[0, index, :rank] = pair[0]
            torch.mul(pair[1], scale, out=bank_b[0, bounds, :rank])
    owners = ops.transfer.upload(owners_of_outputs(num_outputs, [bounds for bounds, _ in members]))
    tiles = _tiles_of(rows, x_NI.device)
    low = ops.add_low_rank(x_NI.contiguous(), bank_a, bank_b, owners, tiles, y_NO)
    adapted = [index for index, (_, pair) in enumerate(members) if pair is not None]
    return torch.cat([low[rows, index, :rank] for index in adapted], dim=1)


def _tiles_of(rows: slice, device: torch.device) -> Tensor:
    """[3, T] int32: first row, number of rows and slot of each tile."""
    first = torch.arange(rows.start, rows.stop, TILE_ROWS, dtype=torch.int32, device=device)
    return torch.stack([first, (rows.stop - first).clamp_max(TILE_ROWS), torch.zeros_like(first)])
