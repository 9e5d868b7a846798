"""What a model directory says about itself without loading a weight: sizes from config and safetensors headers."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.errors import ModelError
from turnwise.model_sizes import ModelSizes
from turnwise.train.config import ModelConfig

DEFAULT_CONTEXT = 4096
"""Of a model whose config does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts(ModelSizes):
    """A model's sizes; matrices are (outputs, inputs) by name."""

    directory: Path
    num_parameters: int
    context_length: int
    linears: dict[str, tuple[int, int]]

    def num_adapter_parameters(self, model: ModelConfig, rank: int = 0) -> int:
        """Of an adapter of `rank`; 0: of the model's own."""
        return sum((rank or model.rank) * (o + i) for o, i in self._adapted(model))

    def num_adapted_parameters(self, model: ModelConfig) -> int:
        """Weights of the base that the adapter lies on."""
        return sum(o * i for o, i in self._adapted(model))

    def _adapted(self, model: ModelConfig) -> list[tuple[int, int]]:
        wanted = {"attn": model.train_attn, "mlp": model.train_mlp, "unembed": model.train_unembed}
        return [shape for name, shape in self.linears.items() if wanted[_kind(name)]]


def read_facts(directory: Path) -> ModelFacts:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        shapes = {name: shape for file in directory.glob("*.safetensors") for name, shape in _shapes(file).items()}
    except (OSError, ValueError, KeyError) as cause:
        raise ModelError(f"{directory} cannot be read as a model: {cause}") from cause
    config = config.get("text_config", config)
    linears = {n: (s[0], s[1]) for n, s in shapes.items() if len(s) == 2 and ".layers." in n and "norm" not in n}
    head = next((n for n in ("lm_head.weight", "model.embed_tokens.weight") if n in shapes), None)
    if head is not None:
        linears[head] = (shapes[head][0], shapes[head][1])
    heads, hidden_size = config.get("num_attention_heads", 1), config.get("hidden_size", 0)
    return ModelFacts(
        directory=directory,
        num_parameters=sum(math.prod(shape) for shape in shapes.values()),
        context_length=config.get("max_position_embeddings") or DEFAULT_CONTEXT,
        num_layers=config.get("num_hidden_layers", 0),
        hidden_size=hidden_size,
        inner_size=config.get("intermediate_size", 4 * hidden_size),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or hidden_size // heads,
        vocab_size=shapes[head][0] if head is not None else 0,
        linears=linears,
    )


def _shapes(file: Path) -> dict[str, list[int]]:
    with file.open("rb") as stream:
        header: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def _kind(name: str) -> str:
    if ".layers." not in name:
        return "unembed"
    return "attn" if "attn" in name or "attention" in name else "mlp"
