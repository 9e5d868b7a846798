"""Attention over many queries in C (`cpu_attention.c`), forward and backward; float32 with heads of up to 256.

Sides are [batch, heads, tokens, D], strided but for the last axis; with fewer KV heads, query head h reads KV head
h // (heads / KV heads). A causal call has as many queries as keys.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from turnwise.engine.ops import build, waiting
from turnwise.errors import DataError

_MAX_HEAD_SIZE = 256  # MAX_D in cpu_attention.c


def fits(*sides: Tensor) -> bool:
    """Whether these functions can run on such tensors here."""
    is_read = all(side.is_cpu and side.dtype is torch.float32 and side.stride(-1) == 1 for side in sides)
    return is_read and sides[0].shape[-1] <= _MAX_HEAD_SIZE and build.library() is not None


class AttentionKernels:
    """The functions of one compiled library, with the types of their arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointers, int32 = ctypes.POINTER(ctypes.c_void_p), ctypes.c_int
        int64s = ctypes.POINTER(ctypes.c_int64)
        self.forward = library.tw_attend
        self.backward = library.tw_attend_backward
        for function in (self.forward, self.backward):
            function.argtypes = [pointers, int64s, int64s, ctypes.c_float, int32, int32, int32]
            function.restype = int32


@functools.cache
def _kernels() -> AttentionKernels:
    library = build.library()
    assert library is not None, "chosen only where the library is built"
    return AttentionKernels(library)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    scale: float,
    *,
    is_causal: bool,
    is_added: bool = False,
) -> None:
    """Write softmax(scale query key') value and its log-sum-exp [batch, heads, tokens].

    With `is_added`, `out` and `logsumexp` hold the attention of the same queries over other keys, and become those of
    one softmax over all of them.
    """
    if query.numel() == 0:
        return
    sides = [query, key, value, out, logsumexp]
    failed = _kernels().forward(*_arguments(sides, is_causal), scale, is_causal, is_added, waiting.num_threads())
    _check_memory(failed)


def attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
    scale: float,
    *,
    is_causal: bool,
    is_added: bool = False,
) -> None:
    """Write the gradients of query, key and value to `grads`, or add them there.

    `out` and `logsumexp` are those of whole rows, also where these keys are only some of what the queries saw.
    """
    if query.numel() == 0:
        for grad in () if is_added else grads:
            grad.zero_()
        return
    sides = [query, key, value, out, logsumexp, grad_out, *grads]
    failed = _kernels().backward(*_arguments(sides, is_causal), scale, is_causal, is_added, waiting.num_threads())
    _check_memory(failed)


def _arguments(sides: list[Tensor], is_causal: bool) -> tuple[ctypes.Array, ctypes.Array, ctypes.Array]:
    """Pointers, strides and sizes, checked: the C side trusts them."""
    query, key = sides[0], sides[1]
    batch, heads, queries, size = query.shape
    kv_heads, keys = key.shape[1:3]
    as_query, as_key = (batch, heads, queries, size), (batch, kv_heads, keys, size)
    expected = [as_query, as_key, as_key, as_query, as_query[:3], as_query, as_query, as_key, as_key]
    for side, shape in zip(sides, expected, strict=False):
        is_dense = side.dim() == 3 or size == 1 or side.stride(3) == 1
        if side.shape != shape or side.dtype is not torch.float32 or not side.is_cpu or not is_dense:
            raise DataError(
                f"got {side.dtype} {tuple(side.shape)} with strides {side.stride()} on {side.device} beside queries "
                f"{as_query} and keys {as_key}; expected float32 {shape}, dense in the last axis, on the CPU"
            )
    if heads % kv_heads or size > _MAX_HEAD_SIZE or keys == 0 or (is_causal and queries != keys):
        raise DataError(
            f"queries {as_query} over keys {as_key}: expected a multiple of the KV heads, heads of up to "
            f"{_MAX_HEAD_SIZE}, some keys, and, when causal, as many as queries"
        )
    pointers = (ctypes.c_void_p * 9)(*(side.data_ptr() for side in sides))
    strides = (ctypes.c_int64 * 27)(*(stride for side in sides for stride in side.stride()[:3]))
    return pointers, strides, (ctypes.c_int64 * 6)(batch, heads, kv_heads, queries, keys, size)


def _check_memory(failed: int) -> None:
    if failed:
        raise MemoryError("no memory for the attention of this batch")
