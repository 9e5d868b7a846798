"""Adapters on disk, in PEFT's file format, with the optimizer's state beside it.

`adapter_config.json` and `adapter_model.safetensors` are what `peft.PeftModel.from_pretrained` reads; what PEFT wrote
is read here too. `optimizer.safetensors` holds AdamW's moments in the order of the flat parameter tensor. A critic's
head is `value_head.safetensors`; PEFT leaves that file alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from turnwise.engine.model.lora import LORA_ALPHA, LoraWeights, num_parameters, split_pairs
from turnwise.engine.training.peft_names import SavedPair, from_peft, peft_targets, to_peft
from turnwise.errors import CheckpointError
from turnwise.models.directories import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from turnwise.models.linears import Shape, linear_kind
from turnwise.types import LoraConfig

OPTIMIZER_FILE = "optimizer.safetensors"
HEAD_FILE = "value_head.safetensors"
_PREFIX = "base_model.model."
_BASE_OF_HEAD = (".base_layer.weight", ".base_layer.bias")
"""With an adapter on the head, PEFT writes the head itself too; the model has it already."""
_REFUSED = (
    "use_dora",
    "modules_to_save",
    "layers_to_transform",
    "trainable_token_indices",
)
"""PEFT options that need more than plain A and B; they are refused."""


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The content of one safetensors file."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str] | None = None


def write_adapter(
    weights: LoraWeights, directory: Path, base_model: str, more: Mapping[str, TensorFile] | None = None
) -> None:
    """Write a complete directory or nothing: files are synced, then moved into place.

    `more` holds further files by name.
    """
    with new_directory(directory) as temporary:
        tensors: dict[str, Tensor] = {}
        for name, (a, b) in split_pairs(weights.flat, weights.shapes, weights.lora).items():
            stem, own_a, own_b = to_peft(name, a.detach().cpu(), b.detach().cpu())
            tensors[f"{_PREFIX}{stem}.lora_A.weight"] = own_a.contiguous()
            tensors[f"{_PREFIX}{stem}.lora_B.weight"] = own_b.contiguous()
        save_tensors(tensors, temporary / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        for name, content in (more or {}).items():
            save_tensors(content.tensors, temporary / name, metadata=content.metadata)
        config = json.dumps(_peft_config(weights, base_model), indent=2)
        (temporary / ADAPTER_CONFIG).write_text(config + "\n")


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Fill the directory that is given; it is synced and moved to `directory` at the end, or deleted after an error."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
    try:
        yield temporary
        _sync(temporary)
        _move(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def save_tensors(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file; a full disk raises `OSError`, as other writes do."""
    try:
        save_file(tensors, file, metadata=metadata)
    except SafetensorError as cause:
        number = re.search(r"\(os error (\d+)\)", str(cause))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from cause


def _peft_config(weights: LoraWeights, base_model: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": weights.lora.rank,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        **peft_targets(weights.shapes, weights.lora),
    }


def _sync(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _move(temporary: Path, directory: Path) -> None:
    """Move the directory into place; an older checkpoint of that name stays until the new one is complete."""
    if directory.exists():
        old = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}.old."))
        directory.rename(old / "old")
        temporary.rename(directory)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(directory)


def read_config(directory: Path) -> dict[str, Any]:
    path = directory / ADAPTER_CONFIG
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{directory} is not an adapter: it has no {ADAPTER_CONFIG}") from None
    except (OSError, json.JSONDecodeError) as cause:
        raise CheckpointError(f"{path} cannot be read: {cause}") from cause
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path} describes a {config.get('peft_type')} adapter; expected LORA")
    for option in _REFUSED:
        if config.get(option):
            raise CheckpointError(f"{path} uses {option}={config[option]}, which is not supported")
    return config


def read_lora_config(directory: Path) -> LoraConfig:
    """The shape of a saved adapter, read from its config and the names of its tensors."""
    rank = int(read_config(directory)["r"])
    saved = read_pairs(directory)
    kinds = {linear_kind(name) for name in saved}
    return LoraConfig(
        rank=rank,
        train_attn="attn" in kinds,
        train_mlp="mlp" in kinds,
        train_unembed="unembed" in kinds,
        train_router="router" in kinds,
        expert_rank=max((pair.a.shape[1] for pair in saved.values() if pair.a.dim() == 3), default=0),
    )


def adapted_names(directory: Path) -> list[str]:
    """The dotted names of the linears that a saved adapter changes."""
    return list(read_pairs(directory))


def read_flat(directory: Path, shapes: Mapping[str, Shape], lora: LoraConfig, start: Tensor | None = None) -> Tensor:
    """The saved A and B as one flat tensor in the order of `shapes`; linears without saved ones keep `start` (or
    zeros)."""
    config = read_config(directory)
    saved = read_pairs(directory)
    unknown = sorted(set(saved) - set(shapes))
    if unknown:
        raise CheckpointError(f"{directory} adapts {unknown[0]}, which this adapter does not; is the base the same?")
    if int(config["r"]) != lora.rank:
        raise CheckpointError(f"{directory} has rank {config['r']}; this adapter has rank {lora.rank}")
    flat = torch.zeros(num_parameters(shapes, lora)) if start is None else start.detach().cpu().clone()
    pairs = split_pairs(flat, shapes, lora)
    for name, (a, b, scale) in saved.items():
        own_a, own_b = pairs[name]
        fold = scale / (LORA_ALPHA / shapes[name].rank(lora))
        if a.shape != own_a.shape or b.shape != own_b.shape:
            raise CheckpointError(
                f"{directory}: {name} has A {tuple(a.shape)}, B {tuple(b.shape)}; this base needs A "
                f"{tuple(own_a.shape)}, B {tuple(own_b.shape)}"
            )
        own_a.copy_(a)
        own_b.copy_(b if fold == 1 else b * fold)
    return flat


def is_critic(directory: Path) -> bool:
    """Whether the directory has a value head beside the adapter."""
    return (directory / HEAD_FILE).is_file()


def read_head(directory: Path, hidden_size: int) -> Tensor:
    """[H + 1] the saved value head: weight, then bias."""
    if not is_critic(directory):
        raise CheckpointError(f"{directory} is a policy, not a critic: it has no {HEAD_FILE}")
    tensors = load_tensors(directory / HEAD_FILE)
    if sorted(tensors) != ["bias", "weight"] or tensors["weight"].shape != (hidden_size,):
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        raise CheckpointError(f"{directory / HEAD_FILE} holds {shapes}; expected weight [{hidden_size}] and bias [1]")
    return torch.cat([tensors["weight"].float(), tensors["bias"].float().reshape(1)])


def read_pairs(directory: Path) -> dict[str, SavedPair]:
    """A, B and scale of every matrix that a saved adapter changes, in float32."""
    tensors = load_tensors(directory / ADAPTER_WEIGHTS)
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for key in tensors:
        if key.endswith(".lora_A.weight"):
            stem = key.removesuffix(".lora_A.weight")
            other = tensors.get(f"{stem}.lora_B.weight")
            if other is None:
                raise CheckpointError(f"{directory}: {key} has no lora_B beside it")
            pairs[stem.removeprefix(_PREFIX)] = (tensors[key].float(), other.float())
        elif not key.endswith((".lora_B.weight", *_BASE_OF_HEAD)):
            raise CheckpointError(f"{directory}: tensor {key} is not part of a plain LoRA adapter")
    return from_peft(pairs, read_config(directory), directory)


def read_optimizer(directory: Path, num_values: int) -> tuple[dict[str, Tensor], int]:
    """AdamW's saved moments, by name, and the number of steps it had taken."""
    path = directory / OPTIMIZER_FILE
    if not path.exists():
        raise CheckpointError(f"{directory} was saved without optimizer state; load it without the optimizer")
    moments = load_tensors(path)
    for name in ("exp_avg", "exp_avg_sq"):
        if moments[name].numel() != num_values:
            raise CheckpointError(f"{path}: {name} has {moments[name].numel()} values; expected {num_values}")
    with safe_open(path, framework="pt") as file:
        return moments, int((file.metadata() or {})["num_steps"])


def load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, SafetensorError) as cause:
        raise CheckpointError(f"{path} is damaged: {cause}") from cause
