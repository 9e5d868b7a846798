"""Gradients of low-rank parts in C (`cpu_low_rank.c`): float32; one read of the large matrix gives both.

Shape legend: M rows, I columns of the large matrix, R of the narrow ones.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from turnwise.engine.ops import build, waiting
from turnwise.errors import DataError


def fits(x_MI: Tensor, *sides: Tensor) -> bool:
    """Whether `gradients` can run on such tensors here."""
    is_read = all(side.is_cpu and side.dtype is torch.float32 for side in (x_MI, *sides))
    return is_read and x_MI.stride(1) == 1 and build.library() is not None


@functools.cache
def _bind(library: ctypes.CDLL) -> Callable[..., int]:
    function = library.tw_low_rank_gradients
    function.argtypes = [
        ctypes.c_void_p * 5, ctypes.c_int64 * 10, ctypes.c_int64 * 3, ctypes.c_float, ctypes.c_int,
    ]  # fmt: skip
    function.restype = ctypes.c_int
    return function


def gradients(x_MI: Tensor, u_MR: Tensor, grad_IR: Tensor, w_IR: Tensor, out_MR: Tensor, scale: float) -> None:
    """grad += scale x' u and out = scale x w."""
    sides = (x_MI, u_MR, grad_IR, w_IR, out_MR)
    (rows, cols), rank = x_MI.shape, u_MR.shape[1]
    shapes = ((rows, cols), (rows, rank), (cols, rank), (cols, rank), (rows, rank))
    for tensor, shape in zip(sides, shapes, strict=True):
        if tensor.shape != shape or not fits(x_MI, tensor):
            raise DataError(
                f"got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device} beside {rows} x {cols}; expected float32 "
                f"{shape} on the CPU, the first of them dense in its rows"
            )
    if 0 in (rows, cols, rank):
        out_MR.zero_()
        return
    pointers = (ctypes.c_void_p * 5)(*(side.data_ptr() for side in sides))
    strides = (ctypes.c_int64 * 10)(*(stride for side in sides for stride in side.stride()))
    sizes = (ctypes.c_int64 * 3)(rows, cols, rank)
    if _bind(build.built_library())(pointers, strides, sizes, scale, waiting.num_threads()):
        raise MemoryError(f"no memory for the gradients of a low-rank part, {rows} x {cols}, rank {rank}")
