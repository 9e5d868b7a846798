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

from turnwise.engine.kernels import build
from turnwise.errors import DataError

_SCRATCH = 512 * (384 + 32)
"""MAX_DEPTH * (MAX_COLS + NR) of cpu_products.c: floats of a thread's packed block."""


def is_built() -> bool:
    """Whether to prefer these products to BLAS: on x86, where the tiles are shaped for its registers."""
    return platform.machine() in ("x86_64", "AMD64") and build.library() is not None


class ProductKernel:
    """The function of one compiled library, and the room that its threads pack into."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, int64, int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._product = library.tw_product
        self._product.argtypes = [*[pointer, int64, int64] * 3, *[int64] * 3, ctypes.c_float, int32, pointer, int32]
        self._product.restype = None
        self._scratch = threading.local()

    def multiply(self, a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, alpha: float, is_added: bool) -> None:
        """out = alpha a b, or added to it; float32 on the CPU, any strides."""
        (rows, depth), cols = a_MK.shape, b_KN.shape[1]
        for tensor, shape in ((a_MK, (rows, depth)), (b_KN, (depth, cols)), (out_MN, (rows, cols))):
            if tensor.shape != shape or tensor.dtype is not torch.float32 or not tensor.is_cpu:
                raise DataError(
                    f"got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device} in the product of {rows} x {depth} "
                    f"and {depth} x {cols}; expected float32 {shape} on the CPU"
                )
        if 0 in (rows, depth, cols):
            if not is_added:
                out_MN.zero_()
            return
        threads = torch.get_num_threads()
        self._product(
            a_MK.data_ptr(), *a_MK.stride(), b_KN.data_ptr(), *b_KN.stride(), out_MN.data_ptr(), *out_MN.stride(),
            rows, cols, depth, alpha, is_added, self._room(threads), threads,
        )  # fmt: skip

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


def multiply(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, *, alpha: float = 1.0, is_added: bool = False) -> Tensor:
    """out = alpha a b, or added to it."""
    if a_MK.stride(0) == 1 and b_KN.shape[1] < a_MK.shape[0]:
        # Packing the large operand in its own order beats turning it: the other one is copied a few rows at a time.
        _kernel().multiply(b_KN.t(), a_MK.t(), out_MN.t(), alpha, is_added)
    else:
        _kernel().multiply(a_MK, b_KN, out_MN, alpha, is_added)
    return out_MN
