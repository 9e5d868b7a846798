"""Which models can be played and trained here, told from a config.json alone: no weight is read, no torch is loaded.

A plan, a run, a server and a chat ask the same function. A family is on the list when its logprobs were compared with
transformers' own, alone, packed beside a longer dialogue, and decoded (`tests/numerics/test_families.py` does that for
each). Others are refused: a model that packing or our KV cache makes wrong says nothing about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.errors import ModelError

FAMILIES = frozenset(
    {
        "apertus",
        "arcee",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "gemma",
        "glm",
        "glm4",
        "glm4_moe",
        "gpt_neox",
        "granite",
        "granitemoe",
        "helium",
        "hunyuan_v1_dense",
        "hyperclovax",
        "jais2",
        "llama",
        "ministral3",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "olmoe",
        "opt",
        "persimmon",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "solar_open",
        "starcoder2",
    }
)
"""`model_type` of the families that were compared."""

_OWN_ATTENTION = "computes attention itself and does not let it be replaced"
_CONV1D = "keeps its projections as Conv1D, and adapters lie on linear layers alone"
_LATENT = "has keys and values of different sizes (multi-head latent attention), and the KV cache has one size for both"
_REASONS = {
    "diffllama": "attends twice in a layer with different values, and the KV cache keeps one of each",
    "gpt2": _CONV1D,
    "openai-gpt": _CONV1D,
    "falcon": _OWN_ATTENTION,
    "gptj": _OWN_ATTENTION,
    "bloom": _OWN_ATTENTION,
    "codegen": _OWN_ATTENTION,
    "mpt": _OWN_ATTENTION,
    "stablelm": _OWN_ATTENTION,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "minicpm3": _LATENT,
}
"""Why a family that people ask for is not on the list."""
_LENGTH_ROPES = {
    "longrope": "LongRoPE",
    "su": "LongRoPE",
}
"""Rotations whose angles depend on the longest sequence of a pass."""
_WINDOWS_UNSAID = {"exaone4": 4096, "mistral": 4096}
"""sliding_window of families whose configs mean one where they name none."""
_WINDOW_SWITCHES = {"qwen2": False, "qwen2_moe": False, "qwen3": False, "qwen3_moe": False, "smollm3": False}
"""use_sliding_window where a config does not say; families without that switch use the window that they name."""
_REFUSED_SETTINGS = (
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "attention_sink",
)
"""Settings that change logits or attention outside the parts that we replace."""


def check_supported(config: Mapping[str, Any]) -> None:
    """Refuse a model that would fail here, or be wrong, by what its config.json says."""
    name = str(config.get("model_type", ""))
    for rope in _rope_types(config):
        if rope in _LENGTH_ROPES:
            raise ModelError(
                f"{name} uses {_LENGTH_ROPES[rope]} (rope type {rope!r}), which is not supported: its angles depend on "
                "the longest sequence of a pass, so a dialogue would change with those that are packed beside it"
            )
    kinds = set(config.get("layer_types") or ["full_attention"]) - {"full_attention"}
    if kinds:
        raise ModelError(f"{name} uses {', '.join(sorted(kinds))} layers; only full_attention is supported")
    window = config.get("sliding_window", _WINDOWS_UNSAID.get(name))
    if window is not None and config.get("use_sliding_window", _WINDOW_SWITCHES.get(name, True)):
        raise ModelError(f"{name} uses sliding_window={window}; only full attention is supported")
    for setting in _REFUSED_SETTINGS:
        value = config.get(setting)
        if value not in (None, False, 1, 1.0):
            raise ModelError(f"{name} sets {setting}={value}, which is not supported")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"{name} is quantised ({method}), which is not supported; take its weights in bfloat16")
    if name not in FAMILIES:
        raise ModelError(_unknown_family(name, config))


def _unknown_family(name: str, config: Mapping[str, Any]) -> str:
    if not name:
        return "its config.json names no model_type; expected a causal language model that transformers can read"
    reason = _REASONS.get(name)
    if reason is None and "text_config" in config:
        reason = "takes more than text"
    told = f"{name} is not supported: it {reason}" if reason else f"{name} is not among the supported families"
    return f"{told}. Supported: {', '.join(sorted(FAMILIES))}"


def _rope_types(config: Mapping[str, Any]) -> set[str]:
    """Of all layers; a config names one for all, or one per kind of layer."""
    found: set[str] = set()
    for key in ("rope_scaling", "rope_parameters"):
        settings = config.get(key) or {}
        for part in (settings, *(part for part in settings.values() if isinstance(part, Mapping))):
            found |= {part[word] for word in ("rope_type", "type") if isinstance(part.get(word), str)}
    return found
