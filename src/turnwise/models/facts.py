"""Sizes and facts of a model, read from its config and the headers of its files: no weight is loaded, no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from turnwise.errors import ConfigError, ModelError
from turnwise.models.blocks import PLAIN_LOGITS, BlockSpec, LogitRule
from turnwise.models.experts import ExpertSpec
from turnwise.models.families import (
    ModelJson,
    angle_note,
    angle_switch,
    check_supported,
    context_length,
    describe_block,
    describe_experts,
    has_stretched_angles,
    inner_size,
    is_packed,
    language_config,
    layer_keys,
    layer_windows,
    logit_rule,
)
from turnwise.models.layer_keys import LayerKeys
from turnwise.models.linears import LoraTargets, Shape, adapted_linears, check_kinds

HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "gpt_neox.embed_in.weight",
)
"""Names of the embedding; it is the head's matrix too where the two are tied."""
LANGUAGE_MODEL = "language_model"
"""The name of the language model inside a model that reads more than text."""
PACKED_BLOCKS, PACKED_SCALES = "_blocks", "_scales"
"""Ends of the names of experts as MXFP4 (`families.is_packed`)."""
_LAYER = r"^(?P<layer>.*\.layers\.\d+)\.(?P<parent>mlp\.|block_sparse_moe\.|)"
_EXPERT = re.compile(_LAYER + r"(experts\.|(input|output)_linear)")
_DOWN = re.compile(r"\.(down_proj|w2|output_linear)(\.weight)?$")
_ROUTER = re.compile(_LAYER + r"(gate|router)\.(layer\.|proj\.)?weight$")
"""Names of experts and routers in files; some keep one matrix per expert, some all experts of a layer in one tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a decoder-only language model that its memory depends on."""

    num_layers: int
    hidden_size: int
    inner_size: int
    """Width of the MLP's hidden layer; the mean, where layers differ."""
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    windows: tuple[int | None, ...] = ()
    """[layers] how many positions each layer sees; None: all of them."""
    keys: tuple[LayerKeys, ...] = ()
    """[layers] the keys and values of each layer; empty: `num_kv_heads` of `head_size` in every layer."""
    logits: LogitRule = PLAIN_LOGITS
    block: BlockSpec | None = None
    """What a decoder block is; None where only transformers' code knows."""
    experts: ExpertSpec | None = None
    """The routed experts, where the model has them."""

    @classmethod
    def read(cls, config: ModelJson, vocab_size: int, context: int = 0, **more: Any) -> Self:
        """From a config.json, or from a config that transformers has read.

        Args:
            context: tokens of the longest sequence that is run; 0: what the config says.
            more: the fields of a subclass.
        """
        num_heads, hidden_size = config.get("num_attention_heads", 1), config.get("hidden_size", 0)
        return cls(
            num_layers=config.get("num_hidden_layers", 0),
            hidden_size=hidden_size,
            inner_size=inner_size(config),
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_size=config.get("head_dim") or hidden_size // num_heads,
            vocab_size=vocab_size,
            windows=layer_windows(config, context),
            keys=layer_keys(config),
            logits=logit_rule(config),
            block=describe_block(config),
            experts=describe_experts(config),
            **more,
        )

    @property
    def active_inner_size(self) -> int:
        """Width of the hidden layer that one token uses: of all its experts together, where there are experts."""
        spec = self.experts
        return self.inner_size if spec is None else spec.num_chosen * spec.inner_size + spec.shared_size

    @property
    def layer_keys(self) -> tuple[LayerKeys, ...]:
        """[layers] the keys and values of each layer."""
        alike = (LayerKeys(self.num_kv_heads, self.head_size, layer) for layer in range(self.num_layers))
        return self.keys or tuple(alike)

    @property
    def largest_head(self) -> int:
        """The largest size of a head in any layer."""
        return max((own.head_size for own in self.keys), default=self.head_size)

    @property
    def query_size(self) -> int:
        """Numbers in a token's queries in one layer; the mean, rounded up, where layers differ."""
        return self._mean([self.num_heads * own.head_size for own in self.layer_keys])

    @property
    def key_size(self) -> int:
        """Numbers in a token's keys in one layer; the mean over all layers, rounded up, where layers differ."""
        return self._mean(self._own_key_sizes)

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * sum(self._own_key_sizes)

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """What the groups of layers see that have KV blocks of their own: everything (None) first, then each window."""
        windows = sorted({window for window in self.windows if window is not None})
        return (None, *windows) if None in self.windows or not windows else tuple(windows)

    def kv_group_values(self, window: int | None) -> int:
        """Keys and values per token of the layers with this window."""
        if window not in self.windows:
            return self.kv_values_per_token
        return 2 * sum(size for size, own in zip(self._own_key_sizes, self.windows, strict=True) if own == window)

    def check_replay(self, *, has_switch: bool) -> None:
        """Refuse to replay a choice of experts that cannot be recorded.

        Args:
            has_switch: whether longer sequences are read again with other angles.
        """
        if self.experts is None:
            why = "this model has no routed experts"
        elif not self.experts.is_routable:
            why = "this model's routers score experts in code of their own"
        elif self.kv_windows[0] is not None:
            why = (
                "every layer of this model has a sliding window and gives blocks back before a dialogue ends, and the "
                "choice of experts is kept beside them"
            )
        elif has_switch:
            why = (
                "this model reads a sequence again with other angles beyond its first length, and then chooses other "
                "experts (engine.context_length)"
            )
        else:
            return
        raise ConfigError(f"routing_replay=true, but {why}; leave it out")

    @property
    def _own_key_sizes(self) -> list[int]:
        """[layers] numbers in a token's keys; 0 for a layer that reads those of another one."""
        layers = enumerate(self.layer_keys)
        return [own.num_heads * own.head_size if own.source == layer else 0 for layer, own in layers]

    def _mean(self, sizes: Sequence[int]) -> int:
        return -(-sum(sizes) // max(1, self.num_layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts(ModelSizes):
    """A model's sizes, and its matrices as (outputs, inputs) by name."""

    directory: Path
    num_parameters: int
    context_length: int
    linears: dict[str, Shape]
    frozen: dict[str, int]
    """Parameters in matrices that cannot get an adapter, by what they are."""
    angle_note: str = ""
    """What there is to say about angles that depend on the length of a sequence."""
    angle_switch: int | None = None
    """Longer sequences have other angles, and a trainer runs them twice (`engine/model/rotation.py`)."""
    is_packed: bool = False
    """Whether the files hold experts in four bits a number (MXFP4)."""
    has_other_angles: bool = False
    """Whether `engine.context_length` goes beyond what the model reads with its first angles."""

    def num_adapter_parameters(self, model: LoraTargets) -> int:
        return sum(shape.num_adapter_values(model) for shape in self.adapted_linears(model).values())

    def num_adapted_parameters(self, model: LoraTargets) -> int:
        """Weights of the base's linears that get an adapter."""
        return sum(shape.num_values for shape in self.adapted_linears(model).values())

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses: of routed experts, those that are chosen."""
        unused = sum(shape.num_values - shape.num_active for shape in self.linears.values() if shape.experts)
        return self.num_parameters - unused

    def adapted_linears(self, model: LoraTargets) -> dict[str, Shape]:
        """The linears that get an adapter."""
        return adapted_linears(self.linears, model)

    def check_trained(self, model: LoraTargets) -> None:
        """Refuse to train kinds of layers that the model does not have."""
        check_kinds(self.linears, model)
        if model.expert_rank and self.experts is None:
            raise ConfigError(f"expert_rank={model.expert_rank}, but this model has no routed experts; leave it out")


def is_tied(directory: Path) -> bool:
    """Whether a model's output head shares the weights of its embedding."""
    return bool(read_config(directory).get("tie_word_embeddings"))


def read_config(directory: Path) -> ModelJson:
    """A model's config.json."""
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))


def read_facts(directory: Path, *, runs_here: bool = True, wanted_context: int = 0) -> ModelFacts:
    """Read the model in `directory`. With `runs_here`, refuse a model that our own engine cannot run.

    Args:
        wanted_context: tokens of the longest sequence (`engine.context_length`); 0: the model's own.
    """
    try:
        config = read_config(directory)
        shapes = {name: shape for file in directory.glob("*.safetensors") for name, shape in _shapes(file).items()}
    except (OSError, ValueError, KeyError) as cause:
        raise ModelError(f"{directory} cannot be read as a model: {cause}") from cause
    if runs_here:
        check_supported(config)
    if (text := language_config(config)) is not config:
        shapes = {whole_name(name): shape for name, shape in shapes.items() if not is_outside_language(name)}
    config = config.get("text_config", config) if text is config else text
    linears = {n.removesuffix(".weight"): Shape(s[0], s[1]) for n, s in shapes.items() if _is_linear(n, s)}
    frozen = _add_experts(linears, shapes, describe_experts(config), config.get("hidden_size", 0))
    head = next((n for n in (*HEADS, *EMBEDDINGS) if n in shapes), None)
    if head is not None:
        linears["lm_head"] = Shape(shapes[head][0], shapes[head][1])
    context = context_length(config, wanted_context)
    switch = angle_switch(config, context)
    return ModelFacts.read(
        config,
        shapes[head][0] if head is not None else 0,
        context,
        directory=directory,
        num_parameters=sum(math.prod(shape) for shape in shapes.values()),
        context_length=context,
        linears=linears,
        frozen={what: count for what, count in frozen.items() if count},
        angle_note=angle_note(config, context),
        angle_switch=switch,
        is_packed=is_packed(config),
        has_other_angles=switch is not None or has_stretched_angles(config, context),
    )


def is_outside_language(name: str) -> bool:
    """Whether a weight of a model that reads more than text is not its language model's."""
    return not whole_name(name).startswith((*HEADS, f"model.{LANGUAGE_MODEL}."))


def whole_name(name: str) -> str:
    """The name that transformers has for a weight of a model that reads more than text; some files have an older one.

    They are of a time when the language model, with its head, was one part of such a model.
    """
    name = re.sub(rf"^{LANGUAGE_MODEL}\.model\.", f"model.{LANGUAGE_MODEL}.", name)
    return name.removeprefix(f"{LANGUAGE_MODEL}.") if name.startswith(f"{LANGUAGE_MODEL}.lm_head.") else name


def _shapes(file: Path) -> dict[str, list[int]]:
    with file.open("rb") as stream:
        header: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    shapes = {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return dict(_unpacked(name, shape) for name, shape in shapes.items() if not name.endswith(PACKED_SCALES))


def _unpacked(name: str, shape: list[int]) -> tuple[str, list[int]]:
    """The parameter that is made of these bytes; MXFP4 keeps 32 inputs of an output as 16 bytes.

    [E, outputs, inputs / 32, 16] in the file is [E, inputs, outputs] in the model.
    """
    if not name.endswith(PACKED_BLOCKS):
        return name, shape
    experts, outputs, groups, count = shape
    return name.removesuffix(PACKED_BLOCKS), [experts, 2 * groups * count, outputs]


def _is_linear(name: str, shape: list[int]) -> bool:
    is_matrix = len(shape) == 2 and name.endswith(".weight") and ".layers." in name and "norm" not in name
    return is_matrix and not _EXPERT.search(name) and not _ROUTER.search(name)


def _add_experts(
    linears: dict[str, Shape], shapes: Mapping[str, list[int]], spec: ExpertSpec | None, hidden: int
) -> dict[str, int]:
    """Add the experts of each layer and its router; returns the parameters of matrices that cannot get an adapter."""
    frozen: dict[str, int] = {}
    routers = {name: shape for name, shape in shapes.items() if _ROUTER.search(name)}
    experts = {name: shape for name, shape in shapes.items() if _EXPERT.search(name) and not name.endswith("_bias")}
    if spec is None:
        counts = {"routed experts": experts, "routers": routers}
        return {what: count for what, found in counts.items() if (count := _count(found))}
    for name in experts:
        layer = _place_in_layer(name, _EXPERT)
        if _DOWN.search(name):
            sizes = (spec.num_experts, spec.num_chosen)
            linears[f"{layer}experts.gate_up_proj"] = Shape(2 * spec.inner_size, hidden, *sizes)
            linears[f"{layer}experts.down_proj"] = Shape(hidden, spec.inner_size, *sizes)
    if not spec.is_routable and routers:
        frozen["routers"] = _count(routers)
    else:
        linears.update({f"{_place_in_layer(n, _ROUTER)}gate": Shape(s[0], s[1]) for n, s in routers.items()})
    return frozen


def _place_in_layer(name: str, pattern: re.Pattern[str]) -> str:
    """What stands before the name of experts or routers in our models: all but one family keep them in the MLP."""
    found = pattern.search(name)
    assert found is not None, "the caller has looked"
    return f"{found['layer']}.{'mlp.' if found['parent'] else ''}"


def _count(shapes: Mapping[str, list[int]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
