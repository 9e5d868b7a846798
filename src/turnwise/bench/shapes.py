"""Models of a known shape with random weights, for speed measurements only."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from turnwise.engine.model.load import RANDOM_FILE
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


def _qwen3_8b() -> PretrainedConfig:
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
        max_position_embeddings=131072,  # more than the published 40,960, for attempts of that length
    )


def _qwen3_30b_a3b() -> PretrainedConfig:
    return Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,  # pyright: ignore[reportCallIssue] - not declared by this class, and read by its layers
        tie_word_embeddings=False,
        max_position_embeddings=40960,
    )


SHAPES = {"qwen3-0.6b": _qwen3_0_6b}
DRAWN_SHAPES = {"qwen3-8b": _qwen3_8b, "qwen3-30b-a3b": _qwen3_30b_a3b}
"""Shapes whose weights are drawn when the model is loaded: they would be a file of many gigabytes."""


def random_model_directory(name: str) -> Path:
    """The directory of a random model of that shape. It is made on first use."""
    if name not in SHAPES | DRAWN_SHAPES:
        raise ConfigError(f"no shape {name!r}; known: {', '.join(SHAPES | DRAWN_SHAPES)}")
    directory = home() / "shapes" / name
    if name in DRAWN_SHAPES:
        DRAWN_SHAPES[name]().save_pretrained(directory)
        (directory / RANDOM_FILE).touch()
        return directory
    if not (directory / "config.json").exists():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(SHAPES[name](), dtype=torch.bfloat16)
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=directory.parent))
        model.save_pretrained(temporary)
        temporary.rename(directory)
    return directory
