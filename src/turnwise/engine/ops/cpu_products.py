"""Matrix products of training in C (`cpu_products.c`): large ones with frozen weights, and adapters' low-rank parts.

Shape legend: M rows and N columns of the result, K summed over.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import threading

import torch
from torch import Tensor

from turnwise.engine.ops import build, waiting
from turnwise.errors import DataError

_SCRATCH = 640 * (384 + 32)
"""MAX_DEPTH * (MAX_COLS + NR) of cpu_products.c: floats of a thread's packed block."""


_IS_X86 = platform.machine() in ("x86_64", "AMD64")


def is_built() -> bool:
    """Whether to prefer these products to BLAS: on x86, where the tiles are shaped for its registers."""
    return _IS_X86 and build.library() is not None


LowRank = tuple[Tensor, Tensor, float]
"""A product's low-rank part: a [M, r], b [r, N] and its scale."""


class ProductKernel:
    """The function of one compiled library, and the room that its threads pack into."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._product = library.tw_product
        self._product.argtypes = [
            ctypes.c_void_p * 5, ctypes.c_int64 * 10, ctypes.c_int64 * 4, ctypes.c_float, ctypes.c_float, ctypes.c_int,
            ctypes.c_void_p, ctypes.c_int,
        ]  # fmt: skip
        self._product.restype = None
        self._scratch = threading.local()

    def multiply(
        self, a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, alpha: float, is_added: bool, low_rank: LowRank | None
    ) -> None:
        """out = alpha (a b + its low-rank part), or added to it; float32 on the CPU, any strides."""
        low_a, low_b, scale = (a_MK[:, :0], b_KN[:0], 0.0) if low_rank is None else low_rank
        (rows, depth), cols, rank = a_MK.shape, b_KN.shape[1], low_a.shape[1]
        sides = (a_MK, b_KN, out_MN, low_a, low_b)
        shapes = ((rows, depth), (depth, cols), (rows, cols), (rows, rank), (rank, cols))
        for tensor, shape in zip(sides, shapes, strict=True):
            if tensor.shape != shape or tensor.dtype is not torch.float32 or not tensor.is_cpu:
                raise DataError(
                    f"got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device} in the product of {rows} x {depth} "
                    f"and {depth} x {cols}; expected float32 {shape} on the CPU"
                )
        if 0 in (rows, depth + rank, cols):
            if not is_added:
                out_MN.zero_()
            return
        pointers = (ctypes.c_void_p * 5)(*(side.data_ptr() for side in sides))
        strides = (ctypes.c_int64 * 10)(*(stride for side in sides for stride in side.stride()))
        sizes = (ctypes.c_int64 * 4)(rows, cols, depth, rank)
        threads = waiting.num_threads()
        self._product(pointers, strides, sizes, alpha, scale, is_added, self._room(threads), threads)

    def _room(self, threads: int) -> int:
        """Address of this thread's room for the packed blocks of all its workers."""
        buffer: Tensor | None = getattr(self._scratch, "buffer", None)
        if buffer is None or buffer.numel() < threads * _SCRATCH:
            buffer = self._scratch.buffer = torch.empty(threads * _SCRATCH, dtype=torch.float32, device="cpu")
        return buffer.data_ptr()


@functools.cache
def _kernel() -> ProductKernel:
    library = build.library()
    assert library is not None, "chosen only where the library is built"
    return ProductKernel(library)


def multiply(
    a_MK: Tensor,
    b_KN: Tensor,
    out_MN: Tensor,
    *,
    alpha: float = 1.0,
    is_added: bool = False,
    low_rank: LowRank | None = None,
) -> Tensor:
    """out = alpha (a b + scale low_a low_b), or added to it."""
    if low_rank is None and a_MK.stride(0) == 1 and b_KN.shape[1] < a_MK.shape[0]:
        # Packing the large operand in its own order beats turning it: the other one is copied a few rows at a time.
        _kernel().multiply(b_KN.t(), a_MK.t(), out_MN.t(), alpha, is_added, None)
    else:
        _kernel().multiply(a_MK, b_KN, out_MN, alpha, is_added, low_rank)
    return out_MN
