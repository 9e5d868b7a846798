"""Sizes and facts of a model, read from its config and the headers of its files: no weight is loaded, no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from turnwise.errors import ModelError
from turnwise.models.blocks import PLAIN_LOGITS, BlockSpec, LogitRule
from turnwise.models.families import ModelJson, check_supported, describe_block, layer_windows, logit_rule
from turnwise.models.linears import LoraTargets, Shape, adapted_linears, check_kinds

DEFAULT_CONTEXT = 4096
"""The context of a model whose config does not name one."""
HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = ("model.embed_tokens.weight", "model.decoder.embed_tokens.weight", "gpt_neox.embed_in.weight")
"""Names of the embedding; it is the head's matrix too where the two are tied."""
_FROZEN = (
    ("routed experts", re.compile(r"\.experts\.")),
    ("routers", re.compile(r"\.(mlp|block_sparse_moe|feed_forward)\.(gate|router)\.|\.router\.")),
)
"""Matrices that transformers keeps outside linear layers; they cannot get an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a decoder-only language model that its memory depends on."""

    num_layers: int
    hidden_size: int
    inner_size: int
    """Width of the MLP's hidden layer."""
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    windows: tuple[int | None, ...] = ()
    """[layers] how many positions each layer sees; None: all of them."""
    logits: LogitRule = PLAIN_LOGITS
    block: BlockSpec | None = None
    """What a decoder block is; None where only transformers' code knows."""

    @classmethod
    def read(cls, config: ModelJson, vocab_size: int, **more: Any) -> Self:
        """From a config.json, or from a config that transformers has read; `more` are the fields of a subclass."""
        num_heads, hidden_size = config.get("num_attention_heads", 1), config.get("hidden_size", 0)
        return cls(
            num_layers=config.get("num_hidden_layers", 0),
            hidden_size=hidden_size,
            inner_size=config.get("intermediate_size") or 4 * hidden_size,
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_size=config.get("head_dim") or hidden_size // num_heads,
            vocab_size=vocab_size,
            windows=layer_windows(config),
            logits=logit_rule(config),
            block=describe_block(config),
            **more,
        )

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """What the groups of layers see that have KV blocks of their own: everything (None) first, then each window."""
        windows = sorted({window for window in self.windows if window is not None})
        return (None, *windows) if None in self.windows or not windows else tuple(windows)

    def kv_group_values(self, window: int | None) -> int:
        """Keys and values per token of the layers with this window."""
        num_layers = self.windows.count(window) if window in self.windows else self.num_layers
        return 2 * num_layers * self.num_kv_heads * self.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts(ModelSizes):
    """A model's sizes, and its matrices as (outputs, inputs) by name."""

    directory: Path
    num_parameters: int
    context_length: int
    linears: dict[str, Shape]
    frozen: dict[str, int]
    """Parameters in matrices that cannot get an adapter, by what they are."""

    def num_adapter_parameters(self, model: LoraTargets, rank: int = 0) -> int:
        """Parameters of an adapter of `rank`; 0 stands for the rank in `model`."""
        return sum((rank or model.rank) * (o + i) for o, i in self.adapted(model).values())

    def num_adapted_parameters(self, model: LoraTargets) -> int:
        """Weights of the base's linears that get an adapter."""
        return sum(o * i for o, i in self.adapted(model).values())

    def adapted(self, model: LoraTargets) -> dict[str, Shape]:
        """The linears that get an adapter."""
        return adapted_linears(self.linears, model)

    def check_trained(self, model: LoraTargets) -> None:
        """Refuse to train kinds of layers that the model does not have."""
        check_kinds(self.linears, model)


def read_facts(directory: Path, *, runs_here: bool = True) -> ModelFacts:
    """Read the model in `directory`. With `runs_here`, refuse a model that our own engine cannot run."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        shapes = {name: shape for file in directory.glob("*.safetensors") for name, shape in _shapes(file).items()}
    except (OSError, ValueError, KeyError) as cause:
        raise ModelError(f"{directory} cannot be read as a model: {cause}") from cause
    if runs_here:
        check_supported(config)
    config = config.get("text_config", config)
    frozen = {what: _count(shapes, pattern) for what, pattern in _FROZEN}
    linears = {n.removesuffix(".weight"): (s[0], s[1]) for n, s in shapes.items() if _is_linear(n, s)}
    head = next((n for n in (*HEADS, *EMBEDDINGS) if n in shapes), None)
    if head is not None:
        linears["lm_head"] = (shapes[head][0], shapes[head][1])
    return ModelFacts.read(
        config,
        shapes[head][0] if head is not None else 0,
        directory=directory,
        num_parameters=sum(math.prod(shape) for shape in shapes.values()),
        context_length=config.get("max_position_embeddings") or DEFAULT_CONTEXT,
        linears=linears,
        frozen={what: count for what, count in frozen.items() if count},
    )


def _shapes(file: Path) -> dict[str, list[int]]:
    with file.open("rb") as stream:
        header: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def _is_linear(name: str, shape: list[int]) -> bool:
    is_matrix = len(shape) == 2 and name.endswith(".weight") and ".layers." in name and "norm" not in name
    return is_matrix and not any(pattern.search(name) for _, pattern in _FROZEN)


def _count(shapes: Mapping[str, list[int]], pattern: re.Pattern[str]) -> int:
    return sum(math.prod(shape) for name, shape in shapes.items() if pattern.search(name))
