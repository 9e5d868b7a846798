"""A plugin of vLLM for tests: where CUDA would open another process's memory, a file is mapped.

A vLLM on a CPU has no CUDA handles. With this, everything else on its side of `rollout.weight_transfer=ipc` is vLLM's
own code: its routes, its parser of a part, its packed form, and its loader. The folder is on the server's PYTHONPATH.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

UUID = "GPU-of-a-test"
"""What the one device of these tests is called."""


def install() -> None:
    """Called by vLLM in each of its processes."""
    import torch
    from torch.multiprocessing import reductions

    def map_file(path: str, num_bytes: int, *_: Any) -> torch.Tensor:
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)

    reductions.rebuild_cuda_tensor = map_file
    torch.cuda.get_device_properties = lambda _device=None: SimpleNamespace(uuid=UUID)
    torch.accelerator.synchronize = lambda _device=None: None
