"""Which models `engine.bitwise` takes, and the words with which it refuses the others."""

from __future__ import annotations

from typing import Any

import pytest

from turnwise.engine.config import EngineConfig
from turnwise.engine.model.fused_parts import check_bitwise
from turnwise.engine.ops.facts import CPU, CUDA
from turnwise.errors import ConfigError
from turnwise.models.facts import ModelSizes

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def sizes(**changes: Any) -> ModelSizes:
    return ModelSizes.read({**LLAMA, **changes}, 100)


def test_dense_models_with_our_layers_are_taken() -> None:
    for name in ("llama", "qwen2", "qwen3", "seed_oss"):
        check_bitwise(sizes(model_type=name), CPU, has_switch=False)
    check_bitwise(sizes(), CUDA, has_switch=False)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "runs transformers' layers"),
        ({"model_type": "qwen3_moe", **EXPERTS}, "routed experts"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding window"),
    ],
    ids=["other layers", "experts", "windows"],
)
def test_other_models_are_refused_by_what_they_have(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_bitwise(sizes(**changes), CPU, has_switch=False)


def test_angles_that_change_and_odd_widths_on_a_gpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="other angles"):
        check_bitwise(sizes(), CPU, has_switch=True)
    check_bitwise(sizes(intermediate_size=100), CPU, has_switch=False)
    with pytest.raises(ConfigError, match="64 outputs at once"):
        check_bitwise(sizes(intermediate_size=100), CUDA, has_switch=False)


def test_merged_weights_cannot_agree() -> None:
    with pytest.raises(ValueError, match="leave merge_adapter out"):
        EngineConfig(bitwise=True, merge_adapter="always")
