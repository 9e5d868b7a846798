"""Settings of one engine. Imports without torch; 0 means "chosen for the device and the model"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from turnwise.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How one engine uses its device."""

    device: str = "auto"
    """`cpu`, `cuda` or `cuda:1`; `auto` takes the GPU when there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the frozen weights and the activations; `auto` is float32 on a CPU, bfloat16 on a GPU. Adapters, losses and
    optimizer state are float32 always."""
    max_num_seqs: int = 256
    """Most sequences that are decoded at once; the others wait."""
    gpu_memory_utilization: float = 0.9
    """Share of the card's memory that weights, KV cache and training together may plan with."""
    kv_cache_gib: float = 0.0
    """KV cache budget; 0: 1 GiB on a CPU, half of what weights and their merged copy leave on a GPU."""
    block_size: int = 16
    """Tokens in one KV block, the unit of reuse."""
    prefix_cache: bool = True
    """Reuse the blocks of earlier turns and sibling samples under the same weights."""
    prefill_tokens: int = 0
    """Most prompt tokens read in one sampler step; 0: 512 on a CPU, 16384 on a GPU."""
    merge_adapter: Literal["auto", "always", "never"] = "auto"
    """Sample from base weights with the adapter added in (a second copy of the adapted weights), or beside it;
    `auto` merges while one policy has the sampler to itself and the copy fits."""
    share_prefixes: bool = True
    """Train datums that share leading tokens as one tree."""
    micro_batch_tokens: int = 0
    """Tokens in one training pass; datums that share a beginning may take four times as many. 0: 2048 on a CPU (4096
    where they share), as many as fit on a GPU, up to 32768. A pass that does not fit computes its activations twice
    instead of keeping them."""
    seed: int | None = None
    """Seeds requests that bring no seed of their own; None draws one."""

    def __post_init__(self) -> None:
        for name, low in (("max_num_seqs", 1), ("block_size", 1), ("prefill_tokens", 0), ("micro_batch_tokens", 0)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name}={getattr(self, name)}; expected at least {low}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization={self.gpu_memory_utilization}; expected above 0, at most 1")
        if self.kv_cache_gib < 0:
            raise ConfigError(f"kv_cache_gib={self.kv_cache_gib}; expected 0 (chosen for the device) or more")
        for name, choices in (
            ("dtype", ("auto", "float32", "bfloat16")),
            ("merge_adapter", ("auto", "always", "never")),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}={getattr(self, name)!r}; expected one of {', '.join(choices)}")
