"""What a model may be, and the words with which the others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DiffLlamaConfig, GPT2Config, LlamaConfig, MistralConfig, PretrainedConfig, Qwen3NextConfig

from naive import make_model
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.model.load import CausalModel
from turnwise.engine.ops import for_device
from turnwise.errors import ConfigError, ModelError

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (DiffLlamaConfig(**SMALL), "attends twice in a layer"),
        (Qwen3NextConfig(**SMALL), "qwen3_next"),
        (GPT2Config(), "gpt2"),
    ],
    ids=["diffllama", "qwen3_next", "gpt2"],
)
def test_an_attention_kind_that_is_not_supported_is_refused_by_name(
    config: PretrainedConfig, named: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=named):
        CausalModel(tmp_path, for_device(torch.device("cpu")), torch.float32)


def test_mistral_without_a_window_works(tmp_path: Path) -> None:
    make_model(MistralConfig(**SMALL, sliding_window=None), tmp_path)
    assert CausalModel(tmp_path, for_device(torch.device("cpu")), torch.float32).vocab_size == 64


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model that transformers can read"):
        CausalModel(tmp_path, for_device(torch.device("cpu")), torch.float32)


def test_a_cache_too_small_for_anything_is_refused_before_use(tmp_path: Path) -> None:
    make_model(LlamaConfig(**SMALL), tmp_path)
    with pytest.raises(ConfigError, match="kv_cache_gib"):
        Engine(tmp_path, EngineConfig(device="cpu", kv_cache_gib=1e-7), name="small")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"device": "tpu"}, "device"),
        ({"dtype": "float8"}, "dtype"),
        ({"merge_adapter": "perhaps"}, "merge_adapter"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        Engine(make_model(LlamaConfig(**SMALL), tmp_path), EngineConfig(**settings), name="small")
