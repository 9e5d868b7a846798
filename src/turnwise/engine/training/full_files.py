"""All weights of a model on disk: an ordinary Hugging Face directory, with the optimizer's state beside it.

`model.safetensors` has the parameters under the names that transformers gives them, tied ones once, and what the base
has beside them: buffers, and the parts of it that read images or sound. `config.json` and the tokenizer are the base
model's. A state to go on from holds the float32 masters, and `optimizer.safetensors` AdamW's moments by parameter, so
it does not depend on how a process lays the weights out. `transformers` loads both kinds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from turnwise.engine.training.adapter_files import OPTIMIZER_FILE, load_tensors, new_directory, save_tensors
from turnwise.errors import CheckpointError
from turnwise.models.facts import is_outside_language
from turnwise.models.families import language_config

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Ends of the names of files that hold weights, or list them."""
_OWN_FILES = (CONFIG_FILE, "checkpoint.json", "model.json")
"""Written anew, or about another directory: a checkpoint's own list of files, a stored model's source."""
BUFFERS = ("layer_scalar", "e_score_correction_bias")
"""Ends of the names of weights that no optimizer changes; a model has them all the same."""
_DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """AdamW's state."""

    moments: Mapping[str, Mapping[str, Tensor]]
    """`exp_avg` and `exp_avg_sq`, each by parameter."""
    num_steps: int


def is_full(directory: Path) -> bool:
    """Whether the directory holds all weights of a model."""
    return (directory / WEIGHTS_FILE).is_file() and (directory / CONFIG_FILE).is_file()


def write_weights(directory: Path, tensors: Mapping[str, Tensor], base: Path) -> None:
    """Write a complete Hugging Face directory or nothing, in the dtype of the tensors."""
    with new_directory(directory) as temporary:
        fill_directory(temporary, tensors, base, next(iter(tensors.values())).dtype)


def write_state(
    directory: Path, masters: Mapping[str, Tensor], base: Path, state: OptimizerState, dtype: torch.dtype
) -> None:
    """Write float32 masters and the optimizer's state; `dtype` is the one that passes and samplers use."""
    with new_directory(directory) as temporary:
        fill_directory(temporary, masters, base, dtype)
        moments = {
            f"{name}.{parameter}": tensor.cpu().contiguous()
            for name, own in state.moments.items()
            for parameter, tensor in own.items()
        }
        save_tensors(moments, temporary / OPTIMIZER_FILE, metadata={"num_steps": str(state.num_steps)})


def export_weights(source: Path, out: Path) -> None:
    """Copy a checkpoint without its optimizer state, in the dtype that it was sampled in."""
    dtype = weights_dtype(source)
    tensors = {name: tensor.to(dtype) for name, tensor in load_tensors(source / WEIGHTS_FILE).items()}
    fill_directory(out, tensors, source, dtype)


def weights_dtype(directory: Path) -> torch.dtype:
    """The dtype that passes and samplers use; a state's masters are float32 all the same."""
    config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    return getattr(torch, str(config[_DTYPE_KEYS[0]]))


def read_weights(directory: Path, into: Mapping[str, Tensor]) -> None:
    """Copy the saved parameters into tensors by name; all are checked before the first is written."""
    saved = checked_weights(directory, into)
    for name, tensor in into.items():
        tensor.copy_(saved[name])


class HasShape(Protocol):
    """A tensor, or the place of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def checked_weights(directory: Path, expected: Mapping[str, HasShape]) -> dict[str, Tensor]:
    """The saved parameters by name, which are as many and as large as expected."""
    if not is_full(directory):
        raise CheckpointError(f"{directory} holds no full weights: it has no {WEIGHTS_FILE}; is it an adapter?")
    is_trained = trained_names(directory)
    saved = {name: one for name, one in load_tensors(directory / WEIGHTS_FILE).items() if is_trained(name)}
    _check_names(directory / WEIGHTS_FILE, saved, expected)
    for name, one in expected.items():
        if tuple(saved[name].shape) != tuple(one.shape):
            raise CheckpointError(
                f"{directory}: {name} has the shape {tuple(saved[name].shape)}; this base has {tuple(one.shape)}"
            )
    return saved


def read_optimizer(directory: Path, names: Iterable[str]) -> OptimizerState:
    """AdamW's state of these parameters."""
    path = directory / OPTIMIZER_FILE
    if not path.exists():
        raise CheckpointError(f"{directory} was saved without optimizer state; load it without the optimizer")
    saved = load_tensors(path)
    names = list(names)
    _check_names(path, saved, [f"{moment}.{name}" for moment in ("exp_avg", "exp_avg_sq") for name in names])
    moments = {moment: {name: saved[f"{moment}.{name}"] for name in names} for moment in ("exp_avg", "exp_avg_sq")}
    with safe_open(path, framework="pt") as file:
        return OptimizerState(moments, int((file.metadata() or {})["num_steps"]))


def _check_names(path: Path, saved: Iterable[str], expected: Iterable[str]) -> None:
    missing, unknown = sorted(set(expected) - set(saved)), sorted(set(saved) - set(expected))
    if missing or unknown:
        what = f"has no {missing[0]}" if missing else f"has {unknown[0]}, which this model does not have"
        raise CheckpointError(f"{path} {what}; is the base the same?")


def trained_names(directory: Path) -> Callable[[str], bool]:
    """Which weights of a model are parameters that are trained here."""
    config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    is_composite = language_config(config) is not config
    return lambda name: not name.endswith(BUFFERS) and not (is_composite and is_outside_language(name))


def _untrained_tensors(base: Path) -> dict[str, Tensor]:
    """What the base model's files have beside its parameters."""
    is_trained = trained_names(base)
    found: dict[str, Tensor] = {}
    for path in sorted(base.glob("*.safetensors")):
        if path.name == OPTIMIZER_FILE:
            continue
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys() if not is_trained(name)}  # noqa: SIM118
    return found


def fill_directory(directory: Path, tensors: Mapping[str, Tensor], base: Path, dtype: torch.dtype) -> None:
    """Weights, the base model's small files, and a config that names the dtype to load in."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    contiguous |= _untrained_tensors(base)
    save_tensors(contiguous, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    for file in base.iterdir():
        if file.is_file() and not file.name.endswith(_NOT_COPIED) and file.name not in _OWN_FILES:
            shutil.copy(file, directory / file.name)
    config = json.loads((base / CONFIG_FILE).read_text(encoding="utf-8"))
    config |= dict.fromkeys(_DTYPE_KEYS, str(dtype).removeprefix("torch."))
    config.pop("quantization_config", None)  # what is written are plain numbers
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
