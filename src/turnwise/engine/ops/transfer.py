"""Copies between the host and a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from turnwise.engine.ops.interface import PendingRead

ALIGNMENT = 64
"""Bytes. Kernels are compiled for one alignment of their pointers, so every array has the same one."""
_TORCH_DTYPES = {
    np.dtype(name).str: dtype
    for name, dtype in (("int32", torch.int32), ("int64", torch.int64), ("float32", torch.float32))
}


@dataclass(frozen=True, slots=True)
class _Here:
    """A tensor that is on the host already."""

    tensor: Tensor

    def wait(self) -> Tensor:
        return self.tensor


class HostTransfer:
    """The device is the CPU: nothing has to be copied."""

    def upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array)

    def upload_all(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def host_buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype)

    def read_later(self, tensor: Tensor) -> PendingRead:
        return _Here(tensor)

    def wait(self) -> None:
        """Nothing to wait for: on a CPU the work is done when a call returns."""


class PackedTransfer:
    """Arrays travel in one copy; the host waits for what it reads."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def upload_all(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
        offsets = np.cumsum([0, *sizes]).tolist()
        staging = self.host_buffer(offsets[-1], torch.uint8)
        places = list(zip(arrays, offsets, strict=False))
        for array, offset in places:
            staging.numpy()[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        packed = staging.to(self.device, non_blocking=True)
        return [
            packed[offset : offset + array.nbytes].view(_TORCH_DTYPES[array.dtype.str]).view(array.shape)
            for array, offset in places
        ]

    def host_buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype)

    def read_later(self, tensor: Tensor) -> PendingRead:
        return _Here(tensor.cpu())

    def wait(self) -> None:
        """Do nothing: reading a result waits for it."""


class PinnedTransfer(PackedTransfer):
    """A GPU reads and writes pinned memory itself, so the host does not wait for a copy."""

    def upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).pin_memory().to(self.device, non_blocking=True)

    def host_buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def read_later(self, tensor: Tensor) -> PendingRead:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _Copying(host, event)

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()


@dataclass(frozen=True, slots=True)
class _Copying:
    tensor: Tensor
    event: torch.cuda.Event

    def wait(self) -> Tensor:
        self.event.synchronize()
        return self.tensor
