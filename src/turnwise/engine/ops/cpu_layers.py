"""The steps between matrix products as fused C kernels (`cpu_layers.c`).

Each kernel reads its inputs once and writes its outputs once. The kernels take float32; tensors of another dtype, or
with a layout that the kernels cannot read, go to plain torch (`torch_layers.py`).

Shape legend: N packed tokens, H hidden size, Q query heads, K key (and value) heads, D head size, I inner size.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from turnwise.engine.ops import build, torch_layers, waiting
from turnwise.engine.ops.interface import CacheSlots, Heads, Rotation
from turnwise.errors import DataError


class LayerKernels:
    """The functions of one compiled library, with the types of their arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, int64, int32, float32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
        self.add_norm = library.tw_add_norm
        self.add_norm.argtypes = [*[pointer] * 3, float32, *[pointer] * 3, int64, int64, int32]
        self.norm_backward = library.tw_norm_backward
        self.norm_backward.argtypes = [*[pointer] * 5, int32, int64, int64, int32]
        self.rotate = library.tw_rotate
        angles = [*[pointer] * 3, int64, pointer, pointer, float32]
        self.rotate.argtypes = [pointer, *angles, *[pointer] * 5, *[int64] * 5, int32]
        self.rotate_backward = library.tw_rotate_backward
        self.rotate_backward.argtypes = [*[pointer] * 5, *angles, pointer, *[int64] * 4, int32]
        self.swiglu = library.tw_swiglu
        self.swiglu.argtypes = [pointer, int64, pointer, int64, int64, int32]
        self.swiglu_backward = library.tw_swiglu_backward
        self.swiglu_backward.argtypes = [pointer, pointer, int64, int64, int64, int32]
        for function in (self.add_norm, self.norm_backward, self.swiglu, self.swiglu_backward):
            function.restype = None
        for function in (self.rotate, self.rotate_backward):
            function.restype = int32


_bind = functools.cache(LayerKernels)


def _kernels() -> LayerKernels:
    return _bind(build.built_library())


def add_norm(
    h: Tensor, delta: Tensor | None, weight: Tensor, eps: float, *, room: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """h + delta, its RMS norm times `weight`, written to `room` if it fits, and 1 / rms [N]."""
    weight = weight.float()
    if not _is_read(h, delta, weight):
        return torch_layers.add_norm(h, delta, weight, eps)
    rows, size = h.shape
    _check_sizes(add_norm.__name__, h, (delta, (rows, size)), (weight, (size,)))
    out_h = h if delta is None else torch.empty_like(h)
    out_x = _take(room, rows, size)
    rstd = torch.empty(rows, dtype=torch.float32)
    _kernels().add_norm(
        h.data_ptr(), _pointer(delta), weight.data_ptr(), eps, out_h.data_ptr(), out_x.data_ptr(), rstd.data_ptr(),
        rows, size, waiting.num_threads(),
    )  # fmt: skip
    return out_h, out_x, rstd


def norm_backward(dx: Tensor, h: Tensor, rstd: Tensor, weight: Tensor, dh: Tensor | None) -> Tensor:
    """Gradient of `add_norm` for its sum, added to `dh` in place."""
    weight = weight.float()
    if not _is_read(dx, h, rstd, weight, dh):
        return torch_layers.norm_backward(dx, h, rstd, weight, dh)
    rows, size = h.shape
    _check_sizes(norm_backward.__name__, h, (dx, (rows, size)), (rstd, (rows,)), (weight, (size,)), (dh, (rows, size)))
    out = torch.empty_like(h) if dh is None else dh
    _kernels().norm_backward(
        dx.data_ptr(), h.data_ptr(), rstd.data_ptr(), weight.data_ptr(), out.data_ptr(), dh is not None, rows, size,
        waiting.num_threads(),
    )  # fmt: skip
    return out


def rotate(qkv: Tensor, heads: Heads, rotation: Rotation, cache: CacheSlots | None) -> tuple[Tensor, Tensor, Tensor]:
    """Head norms and rotary position: query [N, Q, D], key and value [N, K, D].

    A training pass keeps its inputs for the backward pass. Heads without a norm are rotated in place, so that it keeps
    one copy and not two.
    """
    stored = () if cache is None else (cache.keys, cache.values)
    if not _is_read(qkv, heads.query_norm, heads.key_norm, *stored) or not _is_turned(rotation, cache):
        return torch_layers.rotate(qkv, heads, rotation, cache)
    rows = len(qkv)
    width = (heads.num_query + 2 * heads.num_kv) * heads.size
    sides = [(side, (len(side), heads.num_kv, heads.size)) for side in stored]
    _check_sizes(rotate.__name__, qkv, (qkv, (rows, width)), (rotation.positions, (rows,)), *sides)
    is_in_place = cache is None and heads.query_norm is None
    query = None if is_in_place else torch.empty(rows, heads.num_query, heads.size)
    key = None if is_in_place else torch.empty(rows, heads.num_kv, heads.size)
    slots = None if cache is None else cache.slots
    num_slots = 0 if cache is None else min(len(cache.keys), len(cache.values))
    _check_sizes(rotate.__name__, qkv, (slots, (rows,)))
    failed = _kernels().rotate(
        qkv.data_ptr(), *_angles(heads, rotation), _pointer(query), _pointer(key),
        *([None] * 2 if cache is None else [cache.keys.data_ptr(), cache.values.data_ptr()]), _pointer(slots),
        num_slots, rows, heads.num_query, heads.num_kv, heads.size, waiting.num_threads(),
    )  # fmt: skip
    _check_positions(failed, rotation, num_slots)
    parts = heads.split(qkv)
    return parts if query is None or key is None else (query, key, parts[2])


def rotate_backward(
    grads: tuple[Tensor, Tensor, Tensor], qkv: Tensor | None, heads: Heads, rotation: Rotation
) -> Tensor:
    """Gradient of the joined projection [N, (Q + 2 K) D]; `qkv` is needed where heads are normed."""
    is_read = all(grad.dtype is torch.float32 and grad.is_cpu and grad.stride(2) == 1 for grad in grads)
    if not is_read or not _is_read(qkv, heads.query_norm, heads.key_norm) or not _is_turned(rotation, None):
        return torch_layers.rotate_backward(grads, qkv, heads, rotation)
    rows = len(grads[0])
    width = (heads.num_query + 2 * heads.num_kv) * heads.size
    expected = [(rows, num, heads.size) for num in (heads.num_query, heads.num_kv, heads.num_kv)]
    sides = zip(grads, expected, strict=True)
    _check_sizes(rotate_backward.__name__, grads[0], (qkv, (rows, width)), (rotation.positions, (rows,)), *sides)
    out = torch.empty(rows, width)
    strides = (ctypes.c_int64 * 6)(*(stride for grad in grads for stride in grad.stride()[:2]))
    failed = _kernels().rotate_backward(
        *(grad.data_ptr() for grad in grads), strides, _pointer(qkv), *_angles(heads, rotation), out.data_ptr(),
        rows, heads.num_query, heads.num_kv, heads.size, waiting.num_threads(),
    )  # fmt: skip
    _check_positions(failed, rotation, 0)
    return out


def swiglu(gate_up: Tensor, *, room: Tensor | None = None) -> Tensor:
    """silu(gate) * up, from [N, 2 I], written to `room` if it fits."""
    if not _has_dense_rows(gate_up):
        return torch_layers.swiglu(gate_up)
    rows, size = len(gate_up), gate_up.shape[1] // 2
    act = _take(room, rows, size)
    _kernels().swiglu(gate_up.data_ptr(), gate_up.stride(0), act.data_ptr(), rows, size, waiting.num_threads())
    return act


def swiglu_backward(dact: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of `gate_up`, and the activation once more; both are written over the inputs."""
    if not _is_read(dact) or not _has_dense_rows(gate_up):
        return torch_layers.swiglu_backward(dact, gate_up)
    rows, size = dact.shape
    _check_sizes(swiglu_backward.__name__, dact, (gate_up, (rows, 2 * size)))
    _kernels().swiglu_backward(
        dact.data_ptr(), gate_up.data_ptr(), gate_up.stride(0), rows, size, waiting.num_threads()
    )
    return gate_up, dact


def _is_read(*tensors: Tensor | None) -> bool:
    """Whether the kernels can read these tensors without a copy."""
    return all(t is None or (t.dtype is torch.float32 and t.is_contiguous() and t.is_cpu) for t in tensors)


def _has_dense_rows(tensor: Tensor) -> bool:
    """Whether the kernels that take a row stride can read this tensor without a copy."""
    return tensor.dtype is torch.float32 and tensor.is_cpu and tensor.stride(1) == 1


def _take(room: Tensor | None, rows: int, size: int) -> Tensor:
    fits = room is not None and room.shape == (rows, size) and _is_read(room)
    return room if room is not None and fits else torch.empty(rows, size)


def _is_turned(rotation: Rotation, cache: CacheSlots | None) -> bool:
    indices = (rotation.positions,) if cache is None else (rotation.positions, cache.slots)
    is_int64 = all(t.dtype is torch.int64 and t.is_contiguous() for t in indices)
    return is_int64 and _is_read(rotation.cos, rotation.sin)


def _angles(heads: Heads, rotation: Rotation) -> tuple[int | float | None, ...]:
    return (
        rotation.cos.data_ptr(), rotation.sin.data_ptr(), rotation.positions.data_ptr(), len(rotation.cos),
        _pointer(heads.query_norm), _pointer(heads.key_norm), heads.eps,
    )  # fmt: skip


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check_sizes(name: str, first: Tensor, *pairs: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Check what C code cannot check: it reads whatever its pointers point to."""
    for tensor, shape in pairs:
        if tensor is not None and tensor.shape != shape:
            raise DataError(
                f"{name}: a tensor of {tuple(tensor.shape)} beside one of {tuple(first.shape)}, expected {shape}"
            )


def _check_positions(failed: int, rotation: Rotation, num_slots: int) -> None:
    if failed:
        raise DataError(
            f"positions must be within 0..{len(rotation.cos) - 1}, and cache slots, if any, within 0..{num_slots - 1}"
        )
