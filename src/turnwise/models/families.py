"""Decides from a config.json which models can be played and trained here, without reading weights or loading torch.

A plan, a run, a server and a chat ask the same function. A family is on the list when its logprobs were compared with
transformers' own, alone, packed beside a longer dialogue, and decoded (`tests/numerics/test_families.py` does that for
each). Others are refused, because wrong results from packing or our KV cache would go unnoticed.

To add a family: one entry in `FAMILIES`, or `add_family(...)` from outside the package. An entry with `describe` says
what a decoder block is; the model then runs the fused body if its kernels support every part. Without `describe` it
runs transformers' own modelling code.

    add_family(Family(model_type="my_llama", describe=llama_block))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnwise.errors import ConfigError, ModelError
from turnwise.models.blocks import BlockSpec, LogitRule
from turnwise.models.experts import ExpertReader, ExpertSpec
from turnwise.models.layer_keys import LayerKeys, gemma4_inner_size, gemma4_keys, gemma4_kinds
from turnwise.models.refused import ENCODER_DECODER, REFUSED, SEVERAL_INPUTS

ModelJson = Mapping[str, Any]
"""The content of a config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models of one `model_type`."""

    model_type: str
    describe: Callable[[ModelJson], BlockSpec] | None = None
    """What a decoder block of a model with this config is; None: only transformers' code knows."""
    experts: ExpertReader | None = None
    """How a config spells the routed experts; None: the family has none."""
    default_window: int | None = None
    """`sliding_window` of a config that does not name one."""
    has_window_switch: bool = False
    """Whether the window counts only where the config says `use_sliding_window`."""
    window_pattern: str = "L"
    """Which layers have the window where the config does not say, repeated: L (local) has it, G (global) has none."""
    window_start: int | None = None
    """`max_window_layers` where the config does not say: the layers before it have no window. None: no such setting."""
    kinds: Callable[[ModelJson], Sequence[str]] | None = None
    """Which layers have the window, where neither `layer_types` nor the pattern says it."""
    keys: Callable[[ModelJson], tuple[LayerKeys, ...]] | None = None
    """The keys and values of each layer; None: all layers have heads of one size, and keys of their own."""
    inner_size: Callable[[ModelJson], int] | None = None
    """Width of the MLP's hidden layer, the mean over the layers; None: `intermediate_size`."""
    logits: Callable[[ModelJson], LogitRule] | None = None
    """What becomes of the head's product; None: nothing."""
    settings: frozenset[str] = frozenset()
    """Settings of `_CHECKED_SETTINGS` that `logits` reads or that the family's code hands to attention."""
    rotates_on_host: bool = False
    """Whether its code computes the angles on the host in every pass, which no captured graph can hold."""


def llama_block(config: ModelJson) -> BlockSpec:
    """RMS norm before each part, rotated halves of every head, gated MLP."""
    ropes = rope_types(config) or {"default"}
    return BlockSpec(
        norm_eps=float(config.get("rms_norm_eps") or 1e-6),
        angles="+".join(sorted(ropes)),
        activation=str(config.get("hidden_act") or "silu"),
    )


def qwen3_block(config: ModelJson) -> BlockSpec:
    """The block of `llama_block`, with a norm on each query and key head."""
    return replace(llama_block(config), head_norm="rms")


QWEN_EXPERTS = ExpertReader(scoring="softmax", normalises=False, has_dense_layers=True)
SIGMOID_EXPERTS = ExpertReader(scoring="sigmoid", shared="n_shared_experts", has_dense_layers=True)
LOCAL_EXPERTS = ExpertReader(inner="intermediate_size")
OLMO_EXPERTS = ExpertReader(scoring="softmax", inner="intermediate_size", normalises=False)
CHOSEN_EXPERTS = ExpertReader(scoring="chosen_softmax", inner="intermediate_size")


def scaled_logits(setting: str, *, divides: bool = False) -> Callable[[ModelJson], LogitRule]:
    """Logits are multiplied (or divided) by a setting."""

    def read(config: ModelJson) -> LogitRule:
        value = float(config.get(setting) or 1.0)
        return LogitRule(scale=1 / value if divides else value)

    return read


def capped_logits(config: ModelJson) -> LogitRule:
    """The block of Gemma 2. A config that does not name the cap has none."""
    return LogitRule(softcap=config.get("final_logit_softcapping"))


_GEMMA4: dict[str, Any] = {
    "kinds": gemma4_kinds,
    "keys": gemma4_keys,
    "inner_size": gemma4_inner_size,
    "logits": capped_logits,
    "settings": frozenset({"final_logit_softcapping"}),
}
_CAPS = frozenset({"final_logit_softcapping", "attn_logit_softcapping"})
_FINAL_CAP = frozenset({"final_logit_softcapping"})
_COHERE = {"logits": scaled_logits("logit_scale"), "settings": frozenset({"logit_scale"})}
_GRANITE = {"logits": scaled_logits("logits_scaling", divides=True), "settings": frozenset({"logits_scaling"})}

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(model_type="apertus"),
        Family(model_type="arcee"),
        Family(model_type="bitnet"),
        Family(
            model_type="dots1", default_window=4096, window_start=62, experts=replace(SIGMOID_EXPERTS, normalises=False)
        ),
        Family(model_type="ernie4_5"),
        Family(
            model_type="ernie4_5_moe",
            experts=ExpertReader(shared="moe_num_shared_experts", has_dense_layers=True),
        ),
        Family(model_type="cohere", **_COHERE),
        Family(model_type="cohere2", default_window=4096, window_pattern="LLLG", **_COHERE),
        Family(model_type="cwm", describe=llama_block, default_window=8192, window_pattern="GLLL"),
        Family(model_type="exaone4", default_window=4096, window_pattern="LLLG"),
        Family(model_type="flex_olmo", experts=OLMO_EXPERTS),
        Family(model_type="gemma"),
        Family(model_type="gemma2", default_window=4096, window_pattern="LG", logits=capped_logits, settings=_CAPS),
        Family(
            model_type="gemma3_text",
            default_window=4096,
            window_pattern="LLLLLG",
            logits=capped_logits,
            settings=_FINAL_CAP,
        ),
        Family(
            model_type="gemma4_text",
            default_window=512,
            experts=ExpertReader(shared="intermediate_size", switch="enable_moe_block"),
            **_GEMMA4,
        ),
        Family(model_type="gemma4_unified_text", default_window=1024, **_GEMMA4),
        Family(model_type="glm"),
        Family(model_type="glm4"),
        Family(model_type="glm4_moe", experts=SIGMOID_EXPERTS),
        Family(model_type="gpt_neox"),
        Family(model_type="gpt_oss", experts=CHOSEN_EXPERTS, default_window=128, window_pattern="LG"),
        Family(model_type="granite", **_GRANITE),
        Family(model_type="granite_swa", default_window=128, window_pattern="GLLL", **_GRANITE),
        Family(model_type="granitemoe", experts=CHOSEN_EXPERTS, **_GRANITE),
        Family(
            model_type="granitemoeshared",
            experts=replace(CHOSEN_EXPERTS, shared="shared_intermediate_size"),
            **_GRANITE,
        ),
        Family(model_type="helium"),
        Family(model_type="hunyuan_v1_dense"),
        Family(model_type="hy_v3", experts=ExpertReader(shared="num_shared_experts", has_dense_layers=True)),
        Family(
            model_type="hyperclovax", logits=scaled_logits("logits_scaling"), settings=frozenset({"logits_scaling"})
        ),
        Family(model_type="jais2"),
        Family(model_type="llama", describe=llama_block),
        Family(model_type="minimax_m2", experts=LOCAL_EXPERTS),
        Family(model_type="ministral", describe=llama_block, default_window=4096),
        Family(model_type="ministral3"),
        Family(model_type="mistral", describe=llama_block, default_window=4096),
        Family(model_type="mixtral", describe=llama_block, experts=replace(LOCAL_EXPERTS, scoring="softmax")),
        Family(model_type="olmo"),
        Family(model_type="olmo2"),
        Family(model_type="olmo3", default_window=4096, window_pattern="LLLG"),
        Family(model_type="olmoe", experts=OLMO_EXPERTS),
        Family(model_type="opt"),
        Family(model_type="persimmon"),
        Family(model_type="phi"),
        Family(model_type="phi3"),
        Family(model_type="phimoe", experts=LOCAL_EXPERTS, rotates_on_host=True),
        Family(model_type="qwen2", describe=llama_block, has_window_switch=True, window_start=28),
        Family(
            model_type="qwen2_moe",
            describe=llama_block,
            experts=replace(QWEN_EXPERTS, shared="shared_expert_intermediate_size", has_shared_gate=True),
            has_window_switch=True,
        ),
        Family(model_type="qwen3", describe=qwen3_block, has_window_switch=True, window_start=28),
        Family(model_type="qwen3_moe", describe=qwen3_block, experts=QWEN_EXPERTS, has_window_switch=True),
        Family(model_type="seed_oss", describe=llama_block),
        Family(model_type="smollm3", has_window_switch=True, window_pattern="GGGL"),
        Family(model_type="solar_open", experts=replace(SIGMOID_EXPERTS, has_dense_layers=False)),
        Family(model_type="starcoder2"),
        Family(model_type="vaultgemma", default_window=4096, window_pattern="LG", logits=capped_logits, settings=_CAPS),
    )
}
"""The families whose results were compared with transformers', by `model_type`."""


COMPOSITES: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "mistral3": "mistral",
}
"""Models that read images and sound too, and the family of their language model, which is trained alone.

A config may name another family in its `text_config`: Ministral 3 is `ministral3` inside `mistral3`.
"""
_UNSAID: Mapping[str, ModelJson] = {
    "gemma3": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    }
}
"""Sizes that a published `text_config` leaves out, as transformers fills them in."""


def supported_types() -> list[str]:
    """Every `model_type` that is let in."""
    return sorted([*FAMILIES, *COMPOSITES])


def auto_class_name(config: ModelJson) -> str:
    """The class of transformers that loads an export of this model."""
    return "AutoModelForImageTextToText" if config.get("model_type") == "mistral3" else "AutoModelForCausalLM"


def language_config(config: ModelJson) -> ModelJson:
    """What a config says of the language model: all of it, but for a model that reads more than text."""
    name = str(config.get("model_type", ""))
    if name not in COMPOSITES:
        return config
    return {"model_type": COMPOSITES[name], **_UNSAID.get(name, {}), **(config.get("text_config") or {})}


def add_family(family: Family) -> None:
    """Allow models of one more `model_type`. Compare its results with transformers' before you add it."""
    if family.model_type in FAMILIES:
        raise ConfigError(f"there is a family {family.model_type!r} already; choose another model_type")
    FAMILIES[family.model_type] = family


def describe_experts(config: ModelJson) -> ExpertSpec | None:
    """The routed experts of this model; None where it has none."""
    family = FAMILIES.get(str(config.get("model_type", "")))
    return None if family is None or family.experts is None else family.experts.read(config)


def describe_block(config: ModelJson) -> BlockSpec | None:
    """What a decoder block of this model is; None where only transformers' code knows."""
    family = FAMILIES.get(str(config.get("model_type", "")))
    return None if family is None or family.describe is None else family.describe(config)


def inner_size(config: ModelJson) -> int:
    """Width of the MLP's hidden layer; the mean, where layers differ."""
    family = FAMILIES.get(str(config.get("model_type", "")))
    if family is not None and family.inner_size is not None:
        return family.inner_size(config)
    return int(config.get("intermediate_size") or 4 * config.get("hidden_size", 0))


def layer_keys(config: ModelJson) -> tuple[LayerKeys, ...]:
    """[layers] the keys and values of each layer; empty where all layers have heads of one size."""
    family = FAMILIES.get(str(config.get("model_type", "")))
    return () if family is None or family.keys is None else family.keys(config)


def layer_windows(config: ModelJson, context: int = 0) -> tuple[int | None, ...]:
    """[layers] how many positions each layer sees, its own included; None where it sees all that a context holds.

    Args:
        context: tokens of the longest sequence that is run; 0: `max_position_embeddings`.
    """
    family = FAMILIES.get(str(config.get("model_type", "")), Family(model_type=""))
    num_layers = int(config.get("num_hidden_layers") or 0)
    window = config.get("sliding_window", family.default_window) or None
    if window is None or (family.has_window_switch and not config.get("use_sliding_window")):
        return (None,) * num_layers
    if window >= (context or config.get("max_position_embeddings") or window + 1):
        return (None,) * num_layers
    kinds = config.get("layer_types") if family.kinds is None else family.kinds(config)
    if kinds is None:
        pattern = config.get("sliding_window_pattern") or family.window_pattern
        pattern = "L" * (pattern - 1) + "G" if isinstance(pattern, int) else pattern
        start = 0 if family.window_start is None else config.get("max_window_layers", family.window_start)
        letters = [pattern[i % len(pattern)] if i >= start else "G" for i in range(num_layers)]
        return tuple(window if letter == "L" else None for letter in letters)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def logit_rule(config: ModelJson) -> LogitRule:
    """What becomes of the head's product in this model."""
    family = FAMILIES.get(str(config.get("model_type", "")))
    return LogitRule() if family is None or family.logits is None else family.logits(config)


DEFAULT_CONTEXT = 4096
"""The context of a model whose config does not name one."""
LONG_ROPES = ("longrope", "su")
"""Names of LongRoPE, whose factors change at the length of the model's first training."""
LENGTH_ROPES = (*LONG_ROPES, "dynamic")
"""Rotations whose angles depend on the longest sequence of a pass beyond some length."""
_CHECKED_SETTINGS = (
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "logits_scaling",
    "logit_scale",
    "attention_sink",
)
"""Settings that change logits or attention: accepted only in families that are known to read them."""


def check_supported(config: ModelJson) -> None:
    """Refuse a model that would fail here, or be wrong, by what its config.json says."""
    config = language_config(config)
    name = str(config.get("model_type", ""))
    if name in REFUSED:
        raise ModelError(_unknown_family(name, config))
    settings = config.get("rope_parameters") or {}
    if has_rope(config, LENGTH_ROPES) and any(isinstance(part, Mapping) for part in settings.values()):
        raise ModelError(
            f"{name} has a rotation for each kind of layer, and one of them depends on the length of a sequence "
            "(LongRoPE or dynamic NTK), which is not supported"
        )
    kinds = set(config.get("layer_types") or ["full_attention"]) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ModelError(
            f"{name} uses {', '.join(sorted(kinds))} layers; only full_attention and sliding_attention are supported"
        )
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):  # text is read in one direction
        raise ModelError(f"{name} sets use_bidirectional_attention; only attention to what came before is supported")
    family = FAMILIES.get(name, Family(model_type=name))
    for setting in _CHECKED_SETTINGS:
        value = config.get(setting)
        if value not in (None, False, 1, 1.0) and setting not in family.settings:
            raise ModelError(f"{name} sets {setting}={value}, which is not supported")
    if config.get("quantization_config") and not is_packed(config):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"{name} is quantised ({method}), which is not supported; take its weights in bfloat16")
    if name not in FAMILIES:
        raise ModelError(_unknown_family(name, config))


def is_packed(config: ModelJson) -> bool:
    """Whether the files hold experts as MXFP4, which is multiplied out when the model is loaded."""
    settings = config.get("quantization_config") or {}
    return config.get("model_type") == "gpt_oss" and settings.get("quant_method") == "mxfp4"


def _unknown_family(name: str, config: ModelJson) -> str:
    if not name:
        return "its config.json names no model_type; expected a causal language model that transformers can read"
    reason = REFUSED.get(name)
    if reason is None and config.get("is_encoder_decoder"):
        reason = ENCODER_DECODER
    elif reason is None and "text_config" in config:
        reason = SEVERAL_INPUTS
    told = f"{name} is not supported: it {reason}" if reason else f"{name} is not among the supported families"
    return f"{told}. Supported: {', '.join(supported_types())}"


def has_rope(config: ModelJson, kinds: Sequence[str]) -> bool:
    return not rope_types(config).isdisjoint(kinds)


def has_fixed_angles(config: ModelJson) -> bool:
    """Whether the angles of all positions are computed at load, in place of transformers' code in every pass."""
    family = FAMILIES.get(str(config.get("model_type", "")))
    return has_rope(config, LENGTH_ROPES) or (family is not None and family.rotates_on_host)


def context_length(config: ModelJson, wanted: int = 0) -> int:
    """The longest sequence that a model reads here: `wanted` (`engine.context_length`), or what it reads by itself.

    By itself, a model reads what it reads with one set of angles: with LongRoPE, that ends at its original length.
    """
    longest = int(config.get("max_position_embeddings") or DEFAULT_CONTEXT)
    own, most = longest, longest
    if has_rope(config, LONG_ROPES):
        own = int(min([longest, *_rope_numbers(config, "original_max_position_embeddings")]))
    elif has_rope(config, ("dynamic",)):
        most = int(longest * max([1.0, *_rope_numbers(config, "factor")]))
    if wanted > most:
        raise ConfigError(f"engine.context_length={wanted}, and this model reads at most {most} tokens; lower it")
    return wanted or own


def angle_switch(config: ModelJson, context: int) -> int | None:
    """The longest sequence with the first angles of LongRoPE, in a context that goes beyond it; None: no switch."""
    if not has_rope(config, LONG_ROPES):
        return None
    first = context_length(config)
    return first if first < context else None


def has_stretched_angles(config: ModelJson, context: int) -> bool:
    """Whether dynamic NTK has the angles of a sequence of `context` tokens, which is longer than the model's own."""
    return has_rope(config, ("dynamic",)) and context > context_length(config)


def angle_note(config: ModelJson, context: int) -> str:
    """What a plan says about angles that depend on the length; nothing where they do not."""
    own = context_length(config)
    if has_stretched_angles(config, context):
        return f"all sequences have the angles of one of {context:,} tokens (dynamic NTK beyond {own:,})"
    if angle_switch(config, context) is not None:
        return f"a token behind more than {own:,} is predicted with other angles (LongRoPE); the dialogue is read again"
    if has_rope(config, LENGTH_ROPES) and context == own:
        return f"the context ends at {own:,} tokens, beyond which angles change; engine.context_length goes beyond"
    return ""


def _rope_numbers(config: ModelJson, name: str) -> list[float]:
    """The values of a setting, wherever a config keeps it."""
    parts = (config, config.get("rope_scaling") or {}, config.get("rope_parameters") or {})
    return [float(part[name]) for part in parts if part.get(name)]


def rope_types(config: ModelJson) -> set[str]:
    """The rotations of all layers; a config names one for all, or one per kind of layer."""
    found: set[str] = set()
    for key in ("rope_scaling", "rope_parameters"):
        settings = config.get(key) or {}
        for part in (settings, *(part for part in settings.values() if isinstance(part, Mapping))):
            found |= {part[word] for word in ("rope_type", "type") if isinstance(part.get(word), str)}
    return found
