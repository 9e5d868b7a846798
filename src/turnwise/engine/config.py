"""The section `engine` of a run's config, and of a service's. Imports without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from turnwise.runtime.section import Section


class EngineConfig(Section):
    """How one engine uses its device; 0 means that the engine chooses for the device and the model."""

    device: str = Field(
        default="auto", description="`cpu`, `cuda` or `cuda:1`; `auto` takes the GPU when there is one."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Type of the frozen weights and the activations; `auto` is float32 on a CPU and bfloat16 on a GPU. "
        "Adapters, losses and optimizer state are always float32.",
    )
    max_num_seqs: int = Field(
        default=256, ge=1, description="Most sequences that are decoded at once; the others wait."
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="Share of a GPU's memory that weights, KV cache and training plan with; a CPU does not read it.",
    )
    kv_cache_gib: float = Field(
        default=0.0,
        ge=0,
        description="Size of the KV cache in GiB; 0: 1 GiB on a CPU, half of what weights and their merged copy leave "
        "on a GPU.",
    )
    block_size: int = Field(default=16, ge=1, description="Tokens in one block of the KV cache, the unit of reuse.")
    prefix_cache: bool = Field(
        default=True, description="Reuse the KV blocks of earlier turns and sibling samples under the same weights."
    )
    prefill_tokens: int = Field(
        default=0, ge=0, description="Most prompt tokens read in one sampler step; 0: 512 on a CPU, 16384 on a GPU."
    )
    merge_adapter: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Sample from base weights with the adapter added in (a second copy of the adapted weights), or "
        "beside it; `auto` merges while one policy has the sampler to itself and the copy fits.",
    )
    share_prefixes: bool = Field(
        default=True, description="Train datums that share leading tokens as one tree, which computes them once."
    )
    micro_batch_tokens: int = Field(
        default=0,
        ge=0,
        description="Tokens in one training pass; datums that share a beginning may take four times as many. 0: 2048 "
        "on a CPU (4096 where they share), as many as fit on a GPU, up to 32768. A pass that does not fit computes its "
        "activations twice instead of keeping them.",
    )
    seed: int | None = Field(
        default=None,
        description="Seed of requests that bring none of their own; null: `train.seed` in a run, random in a service.",
    )
