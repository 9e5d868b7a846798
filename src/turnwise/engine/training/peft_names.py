"""What PEFT calls the matrices that an adapter changes, and how it lays out those of routed experts.

transformers keeps the experts of a layer in two tensors, `experts.gate_up_proj` and `experts.down_proj`. PEFT adapts
them as parameters (`target_parameters`): A is [E r, I], B is [O, r E] with the expert last, and the file names the
module, not the parameter: `experts.base_layer` stands for gate_up_proj and `experts` for down_proj. Older files have
A and B of every expert's own linear (`experts.3.gate_proj`); gate and up then become one matrix of twice the rank.

PEFT reads `gate_proj`, `up_proj` and `down_proj` in `target_modules` as those of the experts, and leaves out shared
experts and dense layers of the same name. So their weights are written as parameters too.

Shape legend: E experts, I inputs, O outputs, r rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turnwise.errors import CheckpointError
from turnwise.models.facts import LANGUAGE_MODEL
from turnwise.models.linears import Shape, linear_kind
from turnwise.types import LoraConfig

GATE_UP, DOWN = "gate_up_proj", "down_proj"
LINEARS = ("gate_proj", "up_proj", "down_proj")
_OWN_LINEAR = re.compile(
    r"^(?P<layer>.*)\.(mlp|block_sparse_moe)\.experts\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj|w[123])$"
)
_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

PairTensors = tuple[Tensor, Tensor]


class SavedPair(NamedTuple):
    """A and B of one matrix, with a first axis for experts, and the scale of their product."""

    a: Tensor
    b: Tensor
    scale: float


def to_peft(name: str, a: Tensor, b: Tensor) -> tuple[str, Tensor, Tensor]:
    """(name in the file, A, B) as PEFT lays them out."""
    if a.dim() == 2:
        return name, a, b
    module, _, parameter = name.rpartition(".")
    stem = f"{module}.base_layer" if parameter == GATE_UP else module
    return stem, a.flatten(0, 1), b.permute(1, 2, 0).flatten(1, 2)


def peft_targets(shapes: Mapping[str, Shape], lora: LoraConfig) -> dict[str, Any]:
    """The entries of `adapter_config.json` that say what is adapted."""
    has_experts = any(shape.experts for shape in shapes.values())
    modules, parameters, ranks = set(), set(), {}
    for name, shape in shapes.items():
        kind, place = linear_kind(name), re.sub(r"^.*\.layers\.\d+\.", "", name)
        if shape.experts:
            parameters.add(place)
            if shape.rank(lora) != lora.rank:
                ranks[place] = shape.rank(lora)
        elif kind == "router" or (kind == "mlp" and has_experts):
            parameters.add(f"{place}.weight")
        else:
            # A model that reads more than text has linears of the same names that are not adapted.
            modules.add(name if f".{LANGUAGE_MODEL}." in name else name.rpartition(".")[2])
    found: dict[str, Any] = {"target_modules": sorted(modules)}
    if parameters:
        found["target_parameters"] = sorted(parameters)
    if ranks:
        found["rank_pattern"] = dict(sorted(ranks.items()))
    return found


def from_peft(pairs: Mapping[str, PairTensors], config: Mapping[str, Any], directory: Path) -> dict[str, SavedPair]:
    """All pairs of a file by the names of our matrices, those of experts with a first axis."""
    found: dict[str, SavedPair] = {}
    own: dict[str, dict[tuple[str, int], PairTensors]] = {}
    for stem, (a, b) in pairs.items():
        linear = _OWN_LINEAR.match(stem)
        if linear is not None:
            part = _PARTS.get(linear["part"], linear["part"])
            own.setdefault(f"{linear['layer']}.mlp.experts", {})[part, int(linear["expert"])] = (a, b)
        elif stem.endswith((".experts", ".experts.base_layer")):
            name = _parameter_name(stem, pairs, config, directory)
            rank = _setting(config, "rank_pattern", "r", name)
            if a.shape[0] % rank or b.shape[1] != a.shape[0]:
                raise CheckpointError(f"{directory}: {stem} has A {tuple(a.shape)}, which rank {rank} does not divide")
            by_expert = a.unflatten(0, (-1, rank)), b.unflatten(1, (rank, -1)).permute(2, 0, 1)
            found[name] = SavedPair(*by_expert, _scale(config, name, rank))
        else:
            found[stem] = SavedPair(a, b, _scale(config, stem, a.shape[0]))
    for module, linears in own.items():
        found |= _join_experts(module, linears, config, directory)
    return found


def _parameter_name(stem: str, pairs: Mapping[str, PairTensors], config: Mapping[str, Any], directory: Path) -> str:
    """The parameter that a module's A and B belong to."""
    if stem.endswith(".base_layer"):
        return f"{stem.removesuffix('.base_layer')}.{GATE_UP}"
    targets = [str(target) for target in config.get("target_parameters") or ()]
    adapted = [name for name in (GATE_UP, DOWN) if any(target.endswith(name) for target in targets)]
    if f"{stem}.base_layer" in pairs:
        return f"{stem}.{DOWN}"
    if len(adapted) != 1:
        raise CheckpointError(
            f"{directory}: {stem} has one A and B, and target_parameters={targets} does not say of which parameter"
        )
    return f"{stem}.{adapted[0]}"


def _join_experts(
    module: str, linears: Mapping[tuple[str, int], PairTensors], config: Mapping[str, Any], directory: Path
) -> dict[str, SavedPair]:
    """A and B of every expert's own linears as those of two matrices: gate and up stand one below the other."""
    num_experts = 1 + max(expert for _, expert in linears)
    wanted = [(part, expert) for expert in range(num_experts) for part in LINEARS]
    missing = [f"{module}.{expert}.{part}" for part, expert in wanted if (part, expert) not in linears]
    if missing:
        raise CheckpointError(
            f"{directory} adapts some linears of {module}, but not {missing[0]}; expected all or none"
        )
    stacked = [
        (
            torch.stack([linears[part, e][0] for e in range(num_experts)]),
            [linears[part, e][1] for e in range(num_experts)],
        )
        for part in LINEARS
    ]
    (gate_a, gate_b), (up_a, up_b), (down_a, down_b) = stacked
    gate_up_b = torch.stack([torch.block_diag(gate, up) for gate, up in zip(gate_b, up_b, strict=True)])
    down_b = torch.stack(down_b)
    scale = _scale(config, f"{module}.0.gate_proj", gate_a.shape[1])
    return {
        f"{module}.{GATE_UP}": SavedPair(torch.cat([gate_a, up_a], dim=1), gate_up_b, scale),
        f"{module}.{DOWN}": SavedPair(
            torch.cat([down_a, torch.zeros_like(down_a)], dim=1),
            torch.cat([down_b, torch.zeros_like(down_b)], dim=2),
            scale,
        ),
    }


def _scale(config: Mapping[str, Any], name: str, rank: int) -> float:
    alpha = _setting(config, "alpha_pattern", "lora_alpha", name)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _setting(config: Mapping[str, Any], patterns: str, default: str, name: str) -> Any:
    """A number of one matrix: that of the first pattern that ends its name, or the number of all."""
    for pattern, value in (config.get(patterns) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return config[default]
