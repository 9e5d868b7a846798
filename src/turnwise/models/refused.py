"""Families that people ask for and that cannot work here, each with the reason. Imports without torch."""

from __future__ import annotations

from collections.abc import Mapping

_OWN_ATTENTION = "computes attention itself and does not let it be replaced"
_CONV1D = "keeps its projections as Conv1D, and adapters lie on linear layers alone"
_LATENT = "has keys and values of different sizes (multi-head latent attention), and the KV cache has one size for both"
_STATE = (
    "has layers with a running state in place of keys and values (linear attention, Mamba or convolutions), and packed "
    "training and the KV cache do not carry one"
)
_BOTH_WAYS = "reads its text in both directions, so it does not write text from left to right"
_SPARSE = "chooses which keys a token attends to (sparse attention), and the packed passes attend to all of them"

_STREAMS = "keeps several residual streams side by side (AltUp), and nobody compared that with transformers yet"

_BY_REASON: Mapping[str, tuple[str, ...]] = {
    _OWN_ATTENTION: (
        "biogpt",
        "bloom",
        "codegen",
        "falcon",
        "gpt_neo",
        "gpt_neox_japanese",
        "gptj",
        "mpt",
        "nemotron",
        "stablelm",
        "xglm",
    ),
    _CONV1D: ("gpt2", "gpt-sw3", "openai-gpt"),
    _LATENT: (
        "axk1",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe_lite",
        "longcat_flash",
        "mimo_v2_flash",
        "minicpm3",
        "youtu",
    ),
    _STATE: (
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
    ),
    _STREAMS: ("gemma3n", "gemma3n_text"),
    _SPARSE: ("axk2", "deepseek_v32", "deepseek_v4", "glm_moe_dsa"),
    _BOTH_WAYS: ("bert", "deberta-v2", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta"),
    "attends twice in a layer with different values, and the KV cache keeps one of each": ("diffllama",),
}
REFUSED: Mapping[str, str] = {name: reason for reason, names in _BY_REASON.items() for name in names}
"""Why each family is refused, as the end of a sentence that begins with "it"."""
ENCODER_DECODER = "has an encoder beside its decoder, and a dialogue here is one sequence of tokens"
"""Why a model whose config says `is_encoder_decoder` is refused."""
SEVERAL_INPUTS = "takes more than text"
"""Why a model whose config has a `text_config` is refused."""
