"""The device that an engine runs on. This file imports without torch, so that a plan can be made from it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from turnwise.engine.config import EngineConfig
from turnwise.engine.ops.facts import DeviceFacts, facts_of
from turnwise.engine.ops.processor import DOT_FLAG, lacking_for_bfloat16
from turnwise.errors import ConfigError

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
GPU_SHARE_VARIABLE = "TURNWISE_GPU_SHARE"
"""Environment variable: this process's share of the GPU, if several processes share one by agreement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """An engine's device and the dtype of its frozen weights, with the GPU's memory at the time of asking."""

    kind: str
    """`cpu` or `cuda`."""
    dtype: str
    why: str = ""
    """What a person should know about the dtype, where it is not plain."""
    free_bytes: int = 0
    """Bytes of the GPU's memory that this process may still take; 0 for a CPU."""
    total_bytes: int = 0
    """Bytes of the GPU's memory that belong to this process; 0 for a CPU."""
    reserved_bytes: int = 0
    """Bytes that other models will have taken before the engine is loaded."""

    @property
    def facts(self) -> DeviceFacts:
        return facts_of(self.kind)

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def activation_bytes(self) -> int:
        """Bytes of one number of the activations, and of the keys and values."""
        return DTYPE_BYTES["float32"] if self.facts.has_wide_activations else self.dtype_bytes


def choose_dtype(kind: str, wanted: str) -> tuple[str, str]:
    """The dtype of the frozen weights for `engine.dtype=wanted`, and what a person should know about it.

    On a CPU, bfloat16 needs the dot products of the processor; without them the weights are float32.
    """
    if kind != "cpu" or wanted != "bfloat16":
        return facts_of(kind).default_dtype if wanted == "auto" else wanted, ""
    lacking = lacking_for_bfloat16()
    if lacking:
        return "float32", f"float32 in place of bfloat16, because {lacking}"
    return wanted, f"bfloat16 weights and dot products ({DOT_FLAG}); sums, activations, KV cache and LoRA in float32"


def choose_device(config: EngineConfig) -> tuple[torch.device, torch.dtype]:
    """The device and the dtype of the frozen weights that `config` asks for."""
    import torch

    wanted = config.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"device={config.device!r}; expected auto, cpu or cuda")
    device = torch.device(wanted)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={config.device!r}, but torch sees no CUDA GPU; use device='cpu'")
    return device, getattr(torch, dtype_in_use(device.type, config.dtype)[0])


def dtype_in_use(kind: str, wanted: str) -> tuple[str, str]:
    """`choose_dtype` after a look at the kernels, which it builds: a compiler may not know the instructions."""
    name, why = choose_dtype(kind, wanted)
    if kind == "cpu" and name == "bfloat16":
        from turnwise.engine.ops import cpu

        kernels = cpu.load()
        if kernels is None or not kernels.has_pair_dots:
            return "float32", "float32 in place of bfloat16, because the compiler cannot build its kernels"
    return name, why


def dtype_reason(device: torch.device, config: EngineConfig) -> str:
    """Why an engine on this device uses its dtype; empty where the config says it all."""
    return dtype_in_use(device.type, config.dtype)[1]


def find_device(config: EngineConfig) -> DeviceInfo:
    """Where an engine with this config would run; loads torch unless the config says it all."""
    if config.device == "cpu":
        name, why = choose_dtype("cpu", config.dtype)
        return DeviceInfo(kind="cpu", dtype=name, why=why)
    import torch

    device, _ = choose_device(config)
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
    if device.type == "cuda":
        free, total = own_share(free, total, torch.cuda.memory_reserved(device))
    name, why = choose_dtype(device.type, config.dtype)
    return DeviceInfo(kind=device.type, dtype=name, why=why, free_bytes=free, total_bytes=total)


def device_name(device: torch.device) -> str:
    """What the maker calls a GPU, such as `NVIDIA H200`; the kind of any other device."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def is_cpu_chosen(config: EngineConfig) -> bool:
    """Whether the user wants the CPU, also where there is a GPU."""
    return config.device == "cpu"


def numbered_device(name: str, kind: str) -> str:
    """The name of one device: `cuda` is `cuda:0`. A device that nobody named is one of `kind`."""
    name = kind if name in ("", "auto") else name
    return name if ":" in name or name == "cpu" else f"{name}:0"


def num_gpus(kind: str) -> int:
    """GPUs that this process sees, for an engine on that kind of device; 0 if it runs on a CPU."""
    if not facts_of(kind).has_own_memory:
        return 0
    import torch

    return torch.cuda.device_count()


def share_among_engines(device: DeviceInfo, count: int) -> DeviceInfo:
    """The device as one of `count` learners and samplers on this machine sees it: GPUs that are too few are shared."""
    if not device.facts.has_own_memory or num_gpus(device.kind) >= count:
        return device
    return replace(device, free_bytes=device.free_bytes // count, total_bytes=device.total_bytes // count)


def own_share(free_bytes: int, total_bytes: int, own_bytes: int) -> tuple[int, int]:
    """Free and total bytes of this process's share of the GPU.

    Other processes take their shares while this one starts, so the GPU's free memory says little. What is free is the
    share minus what this process already holds.
    """
    share = read_gpu_share(os.environ.get(GPU_SHARE_VARIABLE))
    if share == 1:
        return free_bytes, total_bytes
    total = int(total_bytes * share)
    return max(0, min(free_bytes, total - own_bytes)), total


def read_gpu_share(text: str | None) -> float:
    """The share of the GPU that a value of `GPU_SHARE_VARIABLE` means; the whole GPU if it is not set."""
    try:
        share = float(text or "1")
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"{GPU_SHARE_VARIABLE}={text}; expected a share of the GPU, above 0 and up to 1")
    return share
