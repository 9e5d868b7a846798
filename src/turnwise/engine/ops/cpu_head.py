"""Softmax over a large vocabulary for training, in C (`cpu_head.c`). It reads float32 logits twice and writes once.

The functions of `triton_head.py`, for the CPU. `engine/training/logprobs.py` takes this module where `is_built()`.

Shape legend: R rows of logits (one chunk of the head's product), V vocabulary.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from turnwise.engine.ops import build, waiting
from turnwise.engine.ops.interface import SoftmaxGradients
from turnwise.errors import DataError


def is_built() -> bool:
    return build.library() is not None


class HeadKernels:
    """The functions of one compiled library, with the types of their arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, int64, int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self.row_stats = library.tw_row_stats
        self.row_stats.argtypes = [*[pointer] * 4, int64, int64, int32]
        self.row_stats.restype = None
        self.row_gradients = library.tw_row_gradients
        self.row_gradients.argtypes = [*[pointer] * 6, int64, int64, int32]
        self.row_gradients.restype = None


_bind = functools.cache(HeadKernels)


def _kernels() -> HeadKernels:
    return _bind(build.built_library())


def row_stats(logits_RV: Tensor, temperature_R: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and mean of logits / temperature under their softmax, [R] each; entropy is the difference."""
    rows, vocab = logits_RV.shape
    _check(logits_RV, temperature_R)
    logsumexps, means = torch.empty(rows), torch.empty(rows)
    _kernels().row_stats(
        logits_RV.data_ptr(), temperature_R.data_ptr(), logsumexps.data_ptr(), means.data_ptr(), rows, vocab,
        waiting.num_threads(),
    )  # fmt: skip
    return logsumexps, means


def row_gradients(logits_RV: Tensor, rows: SoftmaxGradients) -> Tensor:
    """Write the gradient over the logits; `interface.SoftmaxOps` has the formula."""
    num_rows, vocab = logits_RV.shape
    entropies, grad_entropies = rows.entropies, rows.grad_entropies
    looked_at = () if entropies is None or grad_entropies is None else (entropies, grad_entropies)
    sides = (rows.temperature, rows.logsumexps, rows.grads, *looked_at)
    _check(logits_RV, *sides)
    _kernels().row_gradients(
        logits_RV.data_ptr(), *(side.data_ptr() for side in sides), *[None] * (5 - len(sides)), num_rows, vocab,
        waiting.num_threads(),
    )  # fmt: skip
    return logits_RV


def _check(logits: Tensor, *sides: Tensor) -> None:
    """Check what C code cannot check: it reads whatever its pointers point to."""
    for tensor, shape in ((logits, logits.shape), *((side, logits.shape[:1]) for side in sides)):
        if tensor.shape != shape or tensor.dtype is not torch.float32 or not tensor.is_contiguous() or tensor.is_cuda:
            raise DataError(
                f"got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device} beside logits {tuple(logits.shape)}; "
                f"expected contiguous float32 {tuple(shape)} on the CPU"
            )
