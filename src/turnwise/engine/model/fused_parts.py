"""Which models the fused body runs (`body.py`). Imports without torch, so that a plan knows it too."""

from __future__ import annotations

from collections.abc import Mapping

from turnwise.engine.ops.facts import DeviceFacts
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
OUTPUT_BLOCK = 64
"""Outputs that one program of a GPU's kernel for adapters writes; all of them belong to one linear."""
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


def check_bitwise(sizes: ModelSizes, facts: DeviceFacts, *, has_switch: bool) -> None:
    """Refuse `engine.bitwise` where sampler and trainer sum in different orders."""
    widths = sizes.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size, sizes.inner_size
    why = ""
    if not is_fused(sizes):
        why = "this model runs transformers' layers, whose products sum in an order that depends on the batch"
    elif sizes.experts is not None:
        why = "the products of routed experts sum in an order that depends on the batch"
    elif any(window is not None for window in sizes.windows):
        why = "a sliding window begins at another key in the sampler than in the trainer"
    elif sizes.logits.softcap is not None:
        why = "the soft cap of the logits rounds in a way that depends on the batch"
    elif has_switch:
        why = "this model has other angles beyond a length, and a long dialogue is read again with them"
    elif facts.has_own_memory and any(width % OUTPUT_BLOCK for width in widths):
        why = f"the kernel of a GPU writes {OUTPUT_BLOCK} outputs at once, and a linear of this model is no multiple"
    if why:
        raise ConfigError(
            f"engine.bitwise=true: {why}; leave it out, or use a model with our fused layers, without experts and "
            "without windows (docs/numerics.md)"
        )


def is_fused(sizes: ModelSizes) -> bool:
    """Whether the fused kernels compute every part of the model's blocks."""
    block = sizes.block
    if block is None or sizes.head_size % 2:
        return False
    if sizes.experts is not None and sizes.experts.scoring not in SCORINGS:
        return False
    return all(getattr(block, part) in kinds for part, kinds in SUPPORTED.items())
