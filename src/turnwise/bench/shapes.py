"""Models of a known shape with random weights, for speed measurements only."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config

from turnwise.errors import ConfigError
from turnwise.models.store import home


def _qwen3_0_6b() -> PretrainedConfig:
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
    )


SHAPES = {"qwen3-0.6b": _qwen3_0_6b}


def random_model_directory(name: str) -> Path:
    """The directory of a random model of that shape. It is made on first use."""
    if name not in SHAPES:
        raise ConfigError(f"no shape {name!r}; known: {', '.join(SHAPES)}")
    directory = home() / "shapes" / name
    if not (directory / "config.json").exists():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(SHAPES[name](), dtype=torch.bfloat16)
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=directory.parent))
        model.save_pretrained(temporary)
        temporary.rename(directory)
    return directory
