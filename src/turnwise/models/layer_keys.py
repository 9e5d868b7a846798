"""Models whose layers differ in their heads, or read the keys and values of another layer, as data.

Imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

LOCAL, GLOBAL = "sliding_attention", "full_attention"


class LayerKeys(NamedTuple):
    """The keys and values that one layer attends to."""

    num_heads: int
    head_size: int
    source: int
    """The layer that computes them: this one, or an earlier one."""


def gemma4_kinds(config: Mapping[str, Any]) -> list[str]:
    """Which layers have a window; the last one never has, whatever the config says."""
    count = int(config.get("num_hidden_layers") or 0)
    kinds = list(config.get("layer_types") or (LOCAL if (i + 1) % 6 else GLOBAL for i in range(count)))
    return [*kinds[:-1], GLOBAL] if kinds else []


def gemma4_keys(config: Mapping[str, Any]) -> tuple[LayerKeys, ...]:
    """Global layers have heads of their own size; the last layers read the keys and values of an earlier one."""
    kinds = gemma4_kinds(config)
    num_own = len(kinds) - int(config.get("num_kv_shared_layers") or 0)
    found: list[LayerKeys] = []
    for index, kind in enumerate(kinds):
        own = _gemma4_heads(config, index, kind)
        source = index
        if index >= num_own:
            source = max(i for i in range(num_own) if kinds[i] == kind)
        found.append(LayerKeys(*own, source))
    return tuple(found)


def gemma4_inner_size(config: Mapping[str, Any]) -> int:
    """Width of the MLP's hidden layer, the mean over the layers: it may be twice as wide where keys are shared."""
    size, count = int(config.get("intermediate_size") or 9216), int(config.get("num_hidden_layers") or 0)
    wide = int(config.get("num_kv_shared_layers") or 0) if config.get("use_double_wide_mlp") else 0
    return size + -(-size * wide // max(1, count))


def _gemma4_heads(config: Mapping[str, Any], index: int, kind: str) -> tuple[int, int]:
    """KV heads of a layer and their size. Published configs have settings for all global layers; those that
    transformers writes have what is special about each layer."""
    num_heads = int(config.get("num_key_value_heads") or 4)
    size = int(config.get("head_dim") or 256)
    layers = config.get("per_layer_config")
    if layers is not None:
        special = layers.get(index) or layers.get(str(index)) or {}
        return int(special.get("num_key_value_heads") or num_heads), int(special.get("head_dim") or size)
    if kind == LOCAL:
        return num_heads, size
    of_global = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
    return int(of_global or num_heads), int(config.get("global_head_dim") or 512)
