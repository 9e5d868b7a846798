"""Tiny random models of every supported family, for `turnwise bench families` and the tests.

Every entry of `FAMILIES` has a model here. A family whose config needs settings of its own has a line in `OWN`. A part
that only some models of a family have (a window, a rotation) gets a further model in `VARIANTS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from turnwise.engine.model.pretrained import auto_class
from turnwise.models.families import COMPOSITES, FAMILIES

VOCAB = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "shared_expert_intermediate_size": 16,
}
"""Sizes of the sample models, under the names of all families; each family reads its own."""
WITHOUT_GROUPS = ("gpt_neox", "opt", "persimmon", "phi")
"""Families with as many key heads as query heads."""
MIXED_LAYERS = ["sliding_attention", "full_attention"]
GEMMA4: dict[str, Any] = {
    "sliding_window": 21,
    "head_dim": 8,
    "global_head_dim": 16,
    "layer_types": MIXED_LAYERS,
    "final_logit_softcapping": 9.0,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 0,
}
_EYE: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_PATCHES: dict[str, Any] = {"image_size": 28, "patch_size": 14}
EYES: dict[str, dict[str, Any]] = {
    "gemma3": {"vision_config": {**_EYE, **_PATCHES}, "mm_tokens_per_image": 4},
    "gemma4": {"vision_config": {**_EYE, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}},
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 32}},
    "mistral3": {"vision_config": {**_EYE, **_PATCHES, "model_type": "pixtral", "head_dim": 8}},
}
"""What models that read images have beside their language model."""
OWN: dict[str, dict[str, Any]] = {
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window": None, "n_group": 1, "topk_group": 1},
    "cohere2": {"sliding_window": 21, "layer_types": MIXED_LAYERS},
    "cwm": {"sliding_window": 21, "layer_types": MIXED_LAYERS},
    "exaone4": {"sliding_window": 21, "layer_types": MIXED_LAYERS},
    "flex_olmo": {"intermediate_size": 192},  # a norm divides by what experts return: narrow ones make large errors
    "gemma2": {"sliding_window": 21, "head_dim": 8, "final_logit_softcapping": 9.0, "attn_logit_softcapping": 6.0},
    "gemma3_text": {"sliding_window": 21, "head_dim": 8, "layer_types": MIXED_LAYERS},
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gpt_oss": {"sliding_window": 21, "head_dim": 8},
    "granite": {"logits_scaling": 3.0},
    "granite_swa": {"sliding_window": 21, "logits_scaling": 3.0, "layer_types": MIXED_LAYERS},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "ministral": {"sliding_window": 21, "head_dim": 8},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "ministral3": {"sliding_window": None},
    "olmo3": {"sliding_window": 21, "layer_types": MIXED_LAYERS},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi3": {"sliding_window": None},
    "phimoe": {"sliding_window": None},
    "starcoder2": {"sliding_window": None},
    "vaultgemma": {"sliding_window": 21, "head_dim": 8, "final_logit_softcapping": 9.0, "attn_logit_softcapping": 6.0},
}
"""Settings that a family's config needs besides `SHAPE`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySample:
    """One tiny model."""

    name: str
    """The row of the table: the model type, and what is special about this model."""
    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the Hugging Face config, on top of those of the family."""
    context_length: int = 0
    """`engine.context_length`"""

    def config(self) -> PretrainedConfig:
        if self.model_type in COMPOSITES:
            text = replace(self, model_type=COMPOSITES[self.model_type]).config()
            return CONFIG_MAPPING[self.model_type](text_config=text.to_dict(), **EYES[self.model_type])
        left_out = ("num_key_value_heads",) if self.model_type in WITHOUT_GROUPS else ()
        shape = {key: value for key, value in SHAPE.items() if key not in left_out}
        return CONFIG_MAPPING[self.model_type](**{**shape, **EXPERTS, **OWN.get(self.model_type, {}), **self.settings})


def _long_rope(original: int) -> dict[str, Any]:
    """Other factors for sequences of more than `original` tokens."""
    return {
        "max_position_embeddings": 1024,
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
            "rope_theta": 1e4,
        },
    }


VARIANTS: Sequence[FamilySample] = (
    FamilySample(name="qwen3, tied head", model_type="qwen3", settings={"tie_word_embeddings": True}),
    FamilySample(
        name="llama, YaRN",
        model_type="llama",
        settings={
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 1e4,
            }
        },
    ),
    FamilySample(
        name="llama, dynamic NTK",
        model_type="llama",
        settings={"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ),
    FamilySample(
        name="llama, dynamic NTK, long",
        model_type="llama",
        settings={
            "max_position_embeddings": 100,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        },
        context_length=180,
    ),
    FamilySample(name="phi3, LongRoPE", model_type="phi3", settings=_long_rope(192)),
    FamilySample(name="phi3, LongRoPE, long", model_type="phi3", settings=_long_rope(30), context_length=256),
    FamilySample(
        name="phi3, LongRoPE, long, window",
        model_type="phi3",
        settings={**_long_rope(30), "sliding_window": 21},
        context_length=256,
    ),
    FamilySample(name="gemma3", model_type="gemma3"),
    FamilySample(name="gemma4", model_type="gemma4"),
    FamilySample(name="gemma4_unified", model_type="gemma4_unified"),
    FamilySample(
        name="gemma4_text, keys as values",
        model_type="gemma4_text",
        settings={"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    FamilySample(
        name="gemma4_text, shared keys",
        model_type="gemma4_text",
        settings={
            "num_hidden_layers": 4,
            "layer_types": MIXED_LAYERS * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 24,  # a norm divides by what these gates let through: few make large errors
            "use_double_wide_mlp": True,
        },
    ),
    FamilySample(
        name="gemma4_text, experts",
        model_type="gemma4_text",
        settings={"enable_moe_block": True, "top_k_experts": 2},
    ),
    FamilySample(name="mistral3", model_type="mistral3"),
    FamilySample(name="mistral, window", model_type="mistral", settings={"sliding_window": 21}),
    FamilySample(name="phi3, window", model_type="phi3", settings={"sliding_window": 21}),
    FamilySample(name="llama, GELU", model_type="llama", settings={"hidden_act": "gelu"}),
)
"""Models with parts that the first model of their family lacks."""


def family_samples() -> list[FamilySample]:
    """One model of each family, and the variants, sorted by name."""
    plain = [FamilySample(name=model_type, model_type=model_type) for model_type in FAMILIES]
    return sorted([*plain, *VARIANTS], key=lambda sample: sample.name)


def write_model(config: PretrainedConfig, directory: Path, spread: float = 0.12) -> Path:
    """A random model with logits of a healthy spread, saved like any Hugging Face model."""
    torch.manual_seed(7)
    model = auto_class(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 3 * spread if "embed" in name or "lm_head" in name else spread)
            elif parameter.dim() == 3 and "experts" in name:
                parameter.normal_(0, spread)
            elif "bias" in name:
                parameter.normal_(0, 0.1)
            elif name.endswith("q_norm.weight") and config.model_type.startswith("gemma4"):
                parameter.fill_(8**-0.5)  # scores are not divided by the root of the head size: trained norms do that
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
    model.save_pretrained(directory)
    return directory
