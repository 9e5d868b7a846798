"""Which models the fused body runs (`body.py`). Imports without torch, so that a plan knows it too."""

from __future__ import annotations

from collections.abc import Mapping

from turnwise.errors import ConfigError
from turnwise.models.facts import ModelSizes

SUPPORTED: Mapping[str, tuple[str, ...]] = {
    "norm": ("rms",),
    "norm_place": ("before",),
    "head_norm": ("none", "rms"),
    "rotation": ("halves",),
    "angles": ("default", "dynamic", "linear", "llama3", "yarn"),
    "mlp": ("gated",),
    "activation": ("silu",),
}
"""The kinds that the fused kernels compute, by field of `BlockSpec`. The angles must not depend on a pass's length."""
SCORINGS = ("softmax", "chosen_softmax")
"""How routers may score experts here."""


def check_split(sizes: ModelSizes, activations: str, *, is_sharded: bool) -> None:
    """Refuse to split a sequence where transformers' layers run, and where weights are gathered."""
    if activations == "split" and is_sharded:
        raise ConfigError(
            "engine.activations=split with cluster.shard=true: every part would gather all weights; use "
            "engine.activations=recompute, or leave it out"
        )
    if activations == "split" and not is_fused(sizes):
        raise ConfigError(
            "engine.activations=split cuts a long datum into parts, which only our fused layers can run; this model "
            "runs transformers' layers: use engine.activations=recompute, or leave it out"
        )


def is_fused(sizes: ModelSizes) -> bool:
    """Whether the fused kernels compute every part of the model's blocks."""
    block = sizes.block
    if block is None or sizes.head_size % 2:
        return False
    if sizes.experts is not None and sizes.experts.scoring not in SCORINGS:
        return False
    return all(getattr(block, part) in kinds for part, kinds in SUPPORTED.items())
