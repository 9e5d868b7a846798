"""Matrix products on a CPU, in C where that is faster than BLAS. Samplers and training steps spend most time here.

A decode step multiplies few rows with every weight of the model. The usual x @ W' then runs far below both the
memory's and the cores' speed; `cpu_linear.c` streams each weight row once past all x rows. Without a C compiler, W @ x'
is the faster order of the two that BLAS offers for few rows. Products of many rows, forward and backward, and adapters'
low-rank parts have a kernel of their own (`cpu_products.c`).

Where the processor has dot products of bfloat16, an engine may hold its weights in bfloat16 (`processor.py`). A product
of float32 rows with such a weight rounds the rows to bfloat16 and sums in float32, the same forward and backward, in
samplers and in training; an adapter's part of it stays float32. Other types go to plain torch.

Shape legend: M rows and N columns of the result, K summed over.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import threading

import torch
from torch import Tensor

from turnwise.engine.ops import build, cpu, cpu_low_rank, torch_products, waiting
from turnwise.errors import DataError

MAX_FEW_ROWS = 384
"""Above this many rows, the kernel for few rows is not faster than the one for many."""
MIN_ROWS_ALONG = 160
"""The rows from which the kernel for many rows is faster if its product has an adapter's part inside: a second product
would read and write the outputs once more."""
CACHE_LINE, SET_BYTES = 64, 4096
"""Bytes of a CPU's L1 cache: rows that lie a multiple of `SET_BYTES` apart share one set of lines."""
_SCRATCH = 640 * (384 + 32)
"""MAX_DEPTH * (MAX_COLS + NR) of cpu_products.c: floats of a thread's packed block."""
_MORE_ROWS, _MORE_PAIRS = 12, 16
"""MR and LANES there: what its copy of the rounded rows has beside them."""
_IS_X86 = platform.machine() in ("x86_64", "AMD64")


def is_built() -> bool:
    """Whether to prefer these products to BLAS: on x86, where the tiles are shaped for its registers."""
    return _IS_X86 and build.library() is not None


LowRank = tuple[Tensor, Tensor, float]
"""A product's low-rank part: a [M, r], b [r, N] and its scale."""


class ProductKernel:
    """The function of one compiled library, and the buffer that its threads pack into."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._product = library.tw_product
        self._product.argtypes = [
            ctypes.c_void_p * 5, ctypes.c_int64 * 10, ctypes.c_int64 * 4, ctypes.c_float, ctypes.c_float, ctypes.c_int,
            ctypes.c_int, ctypes.c_void_p, ctypes.c_int,
        ]  # fmt: skip
        self._product.restype = None
        self._scratch = threading.local()

    def multiply(
        self, a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, alpha: float, is_added: bool, low_rank: LowRank | None
    ) -> None:
        """out = alpha (a b + its low-rank part), or added to it; float32 on the CPU, any strides.

        b may be bfloat16, as a weight [O, I] lies in memory or transposed; then `a` is dense in its rows.
        """
        low_a, low_b, scale = (out_MN[:, :0], out_MN[:0], 0.0) if low_rank is None else low_rank
        (rows, depth), cols, rank = a_MK.shape, b_KN.shape[1], low_a.shape[1]
        sides = (a_MK, b_KN, out_MN, low_a, low_b)
        shapes = ((rows, depth), (depth, cols), (rows, cols), (rows, rank), (rank, cols))
        is_paired = b_KN.dtype is torch.bfloat16
        for tensor, shape in zip(sides, shapes, strict=True):
            wanted = torch.bfloat16 if is_paired and tensor is b_KN else torch.float32
            if tensor.shape != shape or tensor.dtype is not wanted or not tensor.is_cpu:
                raise DataError(
                    f"got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device} in the product of {rows} x {depth} "
                    f"and {depth} x {cols}; expected {str(wanted).removeprefix('torch.')} {shape} on the CPU"
                )
        if is_paired and not _is_paired_as_it_lies(a_MK, b_KN):
            raise DataError(
                f"a product of {rows} x {depth} with strides {a_MK.stride()} and bfloat16 {depth} x {cols} with "
                f"strides {b_KN.stride()}: expected dense rows on the left, and dense rows or columns of an even "
                "number on the right"
            )
        if 0 in (rows, depth + rank, cols):
            if not is_added:
                out_MN.zero_()
            return
        pointers = (ctypes.c_void_p * 5)(*(side.data_ptr() for side in sides))
        strides = (ctypes.c_int64 * 10)(*(stride for side in sides for stride in side.stride()))
        sizes = (ctypes.c_int64 * 4)(rows, cols, depth, rank)
        threads = waiting.num_threads()
        room = self.room(threads, rows if is_paired else 0, depth)
        self._product(pointers, strides, sizes, alpha, scale, is_added, is_paired, room, threads)

    def room(self, threads: int, paired_rows: int, depth: int) -> int:
        """Address of this thread's buffer for the packed blocks of all its workers, and for rows that are rounded.

        It is kept: memory that comes new from the system for each product costs as much as is saved.
        """
        count = threads * _SCRATCH + (paired_rows + _MORE_ROWS) * (depth // 2 + 1 + _MORE_PAIRS) * bool(paired_rows)
        buffer: Tensor | None = getattr(self._scratch, "buffer", None)
        if buffer is None or buffer.numel() < count:
            buffer = self._scratch.buffer = torch.empty(count, dtype=torch.float32, device="cpu")
        return buffer.data_ptr()


def _is_paired_as_it_lies(a_MK: Tensor, b_KN: Tensor) -> bool:
    """Whether the kernel can read a bfloat16 b, and `a`, without a copy."""
    depth, step = b_KN.shape[0], b_KN.stride(1)
    has_dense_columns = (b_KN.stride(0) == 1 or depth == 1) and depth % 2 == 0 and step % 2 == 0
    return a_MK.stride(1) == 1 and (step == 1 or has_dense_columns)


_bind = functools.cache(ProductKernel)


def kernel() -> ProductKernel:
    return _bind(build.built_library())


def product(
    a_MK: Tensor,
    b_KN: Tensor,
    out_MN: Tensor,
    *,
    alpha: float = 1.0,
    is_added: bool = False,
    low_rank: LowRank | None = None,
) -> Tensor:
    """The C kernel: out = alpha (a b + scale low_a low_b), or added to it; float32, any strides, b may be bfloat16."""
    if b_KN.dtype is torch.bfloat16:
        dense = a_MK if a_MK.stride(1) == 1 else a_MK.contiguous()
        kernel().multiply(dense, b_KN, out_MN, alpha, is_added, low_rank)
    elif low_rank is None and a_MK.stride(0) == 1 and b_KN.shape[1] < a_MK.shape[0]:
        # It is faster to pack the large operand in its own order than to transpose it.
        kernel().multiply(b_KN.t(), a_MK.t(), out_MN.t(), alpha, is_added, None)
    else:
        kernel().multiply(a_MK, b_KN, out_MN, alpha, is_added, low_rank)
    return out_MN


def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W' + b."""
    if x_NI.dtype is not torch.float32:
        return torch_products.linear(x_NI, weight_OI, bias_O)
    if x_NI.shape[0] > MAX_FEW_ROWS:
        y = multiply(x_NI, weight_OI.t())
        return y if bias_O is None else y.add_(bias_O)
    kernels = cpu.load()
    if kernels is not None:
        return kernels.linear_small(weight_OI, x_NI.contiguous(), bias=bias_O if bias_O is None else bias_O.float())
    y = (weight_OI @ x_NI.t()).t().contiguous()
    return y if bias_O is None else y.add_(bias_O)


def multiply(
    a_MK: Tensor, b_KN: Tensor, *, out: Tensor | None = None, alpha: float = 1.0, is_added: bool = False
) -> Tensor:
    """alpha a b, written to `out` or added to it where given."""
    is_read = a_MK.dtype is torch.float32 and b_KN.dtype in (torch.float32, torch.bfloat16)
    if not is_read or not (out is None or out.dtype is torch.float32) or not is_built():
        return torch_products.multiply(a_MK, b_KN, out=out, alpha=alpha, is_added=is_added)
    if out is None:
        out = a_MK.new_empty(a_MK.shape[0], b_KN.shape[1])
    return product(a_MK, b_KN, out, alpha=alpha, is_added=is_added)


def takes_low_rank_along(x_NI: Tensor) -> bool:
    """True for the shapes that the kernel for many rows takes."""
    return x_NI.shape[0] >= MIN_ROWS_ALONG and x_NI.dtype is torch.float32 and is_built()


def multiply_with_low_rank(
    a_MK: Tensor, b_KN: Tensor, low_a: Tensor, low_b: Tensor, *, out: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """a b + scale low_a low_b, where `takes_low_rank_along`: the large product is written once."""
    out = a_MK.new_empty(a_MK.shape[0], b_KN.shape[1]) if out is None else out
    return product(a_MK, b_KN, out, low_rank=(low_a, low_b, scale))


def low_rank_gradients(
    dy_NO: Tensor, low_Nr: Tensor, b_Or: Tensor, grad_b: Tensor, *, out: Tensor, scale: float
) -> None:
    """For y = scale low B': write d loss / d low to `out`, and add d loss / d B to `grad_b`."""
    if cpu_low_rank.fits(dy_NO, low_Nr, b_Or, grad_b, out):
        cpu_low_rank.gradients(dy_NO, low_Nr, grad_b, b_Or, out, scale)
        return
    multiply(dy_NO, b_Or, out=out, alpha=scale)
    multiply(dy_NO.t(), low_Nr, out=grad_b, alpha=scale, is_added=True)


def empty_rows(like: Tensor, rows: int, cols: int) -> Tensor:
    """[rows, cols] with room between rows that would share one set of the cache."""
    gap = CACHE_LINE if cols * like.itemsize % SET_BYTES == 0 else 0
    return like.new_empty(rows, cols + gap // like.itemsize)[:, :cols]
