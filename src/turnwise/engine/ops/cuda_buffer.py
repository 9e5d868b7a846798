"""Memory of a GPU that another process can open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from turnwise.errors import ConfigError


class CudaBuffer:
    """Bytes of a GPU, with a CUDA IPC handle."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        try:
            self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as cause:
            raise ConfigError(
                f"{device} has no room for the {num_bytes / 2**20:.0f} MiB through which a server reads the weights; "
                "lower rollout.gpu_memory_utilization, or set rollout.weight_transfer=disk"
            ) from cause
        _, arguments = reduce_tensor(self.bytes)
        self.handles: Mapping[str, tuple[Any, ...]] = {
            str(torch.cuda.get_device_properties(self.bytes.device).uuid): tuple(arguments)
        }
        """By the UUID of the GPU: what `rebuild_cuda_tensor` takes."""

    def settle(self) -> None:
        torch.cuda.current_stream(self.bytes.device).synchronize()

    def close(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.handles = {}
        torch.cuda.ipc_collect()
