"""Products of rows with their experts' matrices in Triton; the host never waits, so a step can be captured as a graph.

Rows are sorted by expert and cut into tiles of one expert each. How many tiles an expert needs is known on the device
alone, so there are as many programs as there may be tiles, and those without rows return at once. Large products in
bfloat16 go to torch's grouped product, where the card has it.

Shape legend: M rows, G groups (experts), T tiles, I inputs, O outputs, A and B columns of a gradient's two sides.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Only the CUDA builds of torch bring Triton.

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from turnwise.engine.ops.interface import Groups

FEW_ROWS, MANY_ROWS = 16, 64
"""Rows of a tile where experts have few rows each, as in decoding, and where they have many."""
LEAST_GROUPED_ROWS = 2048
LEAST_GROUPED_SIZE = 128
"""Below these sizes, torch's grouped product is not faster; low-rank parts are below them too."""


@triton.jit
def _multiply_kernel(
    x, weights, y, tiles, num_tiles, num_in, num_out, stride_x, stride_g, stride_i, stride_o, stride_y, alpha,
    TILE: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, IS_ADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, block = tl.program_id(0), tl.program_id(1)
    count = tl.load(tiles + num_tiles + tile)
    if count > 0:
        start = tl.load(tiles + tile).to(tl.int64)
        group = tl.load(tiles + 2 * num_tiles + tile).to(tl.int64)
        row = tl.arange(0, TILE)
        out = block * OUTPUTS + tl.arange(0, OUTPUTS)
        is_row = row[:, None] < count
        is_out = out[None, :] < num_out
        own = weights + group * stride_g
        total = tl.zeros([TILE, OUTPUTS], tl.float32)
        for first in range(0, num_in, INPUTS):
            column = first + tl.arange(0, INPUTS)
            is_in = column < num_in
            left = tl.load(
                x + (start + row[:, None]) * stride_x + column[None, :], mask=is_row & is_in[None, :], other=0.0
            )
            right = tl.load(
                own + column[:, None] * stride_i + out[None, :] * stride_o, mask=is_in[:, None] & is_out, other=0.0
            )
            total += tl.dot(left, right, input_precision=PRECISION)
        total *= alpha
        to = y + (start + row[:, None]) * stride_y + out[None, :]
        if IS_ADDED:
            total += tl.load(to, mask=is_row & is_out, other=0.0).to(tl.float32)
        tl.store(to, total.to(y.dtype.element_ty), mask=is_row & is_out)


@triton.jit
def _outer_kernel(
    left, right, ends, out, num_left, num_right, stride_l, stride_r, alpha,
    ROWS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64)
    stop = tl.load(ends + group)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    if stop > start:
        a = tl.program_id(1) * LEFT + tl.arange(0, LEFT)
        b = tl.program_id(2) * RIGHT + tl.arange(0, RIGHT)
        is_a, is_b = a[None, :] < num_left, b[None, :] < num_right
        total = tl.zeros([LEFT, RIGHT], tl.float32)
        for first in range(start, stop, ROWS):
            row = first + tl.arange(0, ROWS)
            is_row = row[:, None] < stop
            lefts = tl.load(left + row[:, None] * stride_l + a[None, :], mask=is_row & is_a, other=0.0)
            rights = tl.load(right + row[:, None] * stride_r + b[None, :], mask=is_row & is_b, other=0.0)
            total += tl.dot(tl.trans(lefts), rights, input_precision=PRECISION)
        at = out + (group * num_left + a[:, None]) * num_right + b[None, :]
        mask = (a[:, None] < num_left) & is_b
        summed = tl.load(at, mask=mask, other=0.0).to(tl.float32) + alpha * total
        tl.store(at, summed.to(out.dtype.element_ty), mask=mask)


class TritonExperts:
    """`ExpertOps` of a GPU."""

    can_capture = True

    def group(self, keys_M: Tensor, num_groups: int) -> Groups:
        sorted_keys, order = torch.sort(keys_M, stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        ends = torch.searchsorted(sorted_keys, torch.arange(num_groups, device=order.device), right=True)
        return Groups(order, places, ends, tiles=_make_tiles(ends, len(order)))

    def multiply(
        self,
        x_MI: Tensor,
        weights_GIO: Tensor,
        groups: Groups,
        *,
        out: Tensor | None = None,
        alpha: float = 1.0,
        is_added: bool = False,
    ) -> Tensor:
        if out is None and alpha == 1.0 and _takes_grouped(x_MI, weights_GIO):
            return torch.ops.aten._grouped_mm(x_MI, weights_GIO, offs=groups.ends.int())
        _, num_in, num_out = weights_GIO.shape
        if out is None:
            out, is_added = x_MI.new_zeros(len(x_MI), num_out), False
        assert groups.tiles is not None, "made by `group` of the same ops"
        assert x_MI.stride(1) == out.stride(1) == 1, "rows are dense"
        tile = _tile_rows(len(x_MI), len(groups.ends))
        inputs = 16 if num_in <= 16 else 64
        outputs = 16 if num_out <= 16 else 64 if tile == FEW_ROWS else 128
        num_tiles = groups.tiles.shape[1]
        _multiply_kernel[(num_tiles, triton.cdiv(num_out, outputs))](
            x_MI, weights_GIO, out, groups.tiles, num_tiles, num_in, num_out, x_MI.stride(0), *weights_GIO.stride(),
            out.stride(0), alpha, tile, inputs, outputs, is_added, _precision(x_MI),
        )  # fmt: skip
        return out

    def add_outer(self, left_MA: Tensor, right_MB: Tensor, groups: Groups, out_GAB: Tensor, alpha: float) -> None:
        assert left_MA.stride(1) == right_MB.stride(1) == 1, "rows are dense"
        assert out_GAB.is_contiguous(), "gradients are dense"
        num_groups, num_left, num_right = out_GAB.shape
        lefts, rights = (16 if size <= 16 else 64 if size <= 64 else 128 for size in (num_left, num_right))
        grid = (num_groups, triton.cdiv(num_left, lefts), triton.cdiv(num_right, rights))
        _outer_kernel[grid](
            left_MA, right_MB, groups.ends, out_GAB, num_left, num_right, left_MA.stride(0), right_MB.stride(0), alpha,
            32, lefts, rights, _precision(left_MA),
        )  # fmt: skip


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype is torch.float32 else "tf32"


def _tile_rows(num_rows: int, num_groups: int) -> int:
    return MANY_ROWS if num_rows >= 2 * FEW_ROWS * num_groups else FEW_ROWS


def _make_tiles(ends_G: Tensor, num_rows: int) -> Tensor:
    """[3, T] int32: first row, rows and group of every tile; there are at most rows / tile + groups with rows."""
    num_groups = len(ends_G)
    size = _tile_rows(num_rows, num_groups)
    starts = torch.nn.functional.pad(ends_G[:-1], (1, 0))
    stops = torch.cumsum((ends_G - starts + size - 1) // size, dim=0)
    index = torch.arange(num_rows // size + min(num_groups, num_rows), device=ends_G.device)
    group = torch.searchsorted(stops, index, right=True)
    is_used = group < num_groups
    group = group.clamp_max(num_groups - 1)
    before = torch.nn.functional.pad(stops[:-1], (1, 0))[group]
    first = starts[group] + (index - before) * size
    count = torch.where(is_used, (ends_G[group] - first).clamp_max(size), 0)
    return torch.stack([first, count, group]).int()


def _takes_grouped(x_MI: Tensor, weights_GIO: Tensor) -> bool:
    """Whether torch's grouped product runs here and is worth its overhead."""
    _, num_in, num_out = weights_GIO.shape
    is_large = len(x_MI) >= LEAST_GROUPED_ROWS and min(num_in, num_out) >= LEAST_GROUPED_SIZE
    is_fit = x_MI.dtype is torch.bfloat16 and num_in % 8 == 0 and num_out % 8 == 0
    return is_large and is_fit and _has_grouped(x_MI.device)


@functools.cache
def _has_grouped(device: torch.device) -> bool:
    return (
        hasattr(torch, "_grouped_mm") and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    )
