"""Merging the parts of a tree's attention, in Triton: kernels read and write selected rows of a large tensor in place.

Shape legend: N packed tokens, M picked rows, H heads, D head size.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false
# Only the CUDA builds of torch bring Triton.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _merge_rows_kernel(
    out, logsumexp, part, part_logsumexp, index, num_tokens, num_picked,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr,
):  # fmt: skip
    picked = tl.program_id(0).to(tl.int64)
    row = tl.load(index + picked)
    head = tl.arange(0, HEADS_PAD)
    dim = tl.arange(0, HEAD_PAD)
    is_head = head < HEADS
    mask = is_head[:, None] & (dim < HEAD)[None, :]
    lse_a = tl.load(logsumexp + head * num_tokens + row, mask=is_head, other=0.0)
    lse_b = tl.load(part_logsumexp + head * num_picked + picked, mask=is_head, other=0.0)
    best = tl.maximum(lse_a, lse_b)
    weight_a, weight_b = tl.exp(lse_a - best), tl.exp(lse_b - best)
    total = weight_a + weight_b
    at_out = out + (row * HEADS + head[:, None]) * HEAD + dim[None, :]
    at_part = part + (picked * HEADS + head[:, None]) * HEAD + dim[None, :]
    first = tl.load(at_out, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at_part, mask=mask, other=0.0).to(tl.float32)
    merged = (first * weight_a[:, None] + second * weight_b[:, None]) / total[:, None]
    tl.store(at_out, merged.to(out.dtype.element_ty), mask=mask)
    tl.store(logsumexp + head * num_tokens + row, best + tl.log(total), mask=is_head)


@triton.jit
def _add_rows_kernel(target, piece, index, SIZE: tl.constexpr, PAD: tl.constexpr):
    picked = tl.program_id(0).to(tl.int64)
    row = tl.load(index + picked)
    column = tl.arange(0, PAD)
    inside = column < SIZE
    at = target + row * SIZE + column
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(piece + picked * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(target.dtype.element_ty), mask=inside)


def merge_rows(out_NHD: Tensor, logsumexp_HN: Tensor, part_MHD: Tensor, part_logsumexp_HM: Tensor, index_M: Tensor):
    """Fold a part's attention into the rows it belongs to, in place; `index` names each row once."""
    _check_dense(out_NHD, logsumexp_HN, part_MHD, part_logsumexp_HM)
    count, heads, size = part_MHD.shape
    _merge_rows_kernel[(count,)](
        out_NHD, logsumexp_HN, part_MHD, part_logsumexp_HM, index_M, len(out_NHD), count,
        heads, triton.next_power_of_2(heads), size, triton.next_power_of_2(size),
    )  # fmt: skip


def add_rows(target_NHD: Tensor, piece_MHD: Tensor, index_M: Tensor) -> None:
    """target[index] += piece, in place; `index` names each row once."""
    _check_dense(target_NHD, piece_MHD)
    size = target_NHD[0].numel()
    _add_rows_kernel[(len(piece_MHD),)](target_NHD, piece_MHD, index_M, size, triton.next_power_of_2(size))


def _check_dense(*tensors: Tensor) -> None:
    """The kernels compute addresses from shapes: other strides would be wrong without a word."""
    assert all(tensor.is_contiguous() for tensor in tensors), "the rows of a tree's parts lie dense in memory"
