"""An adapter that changes nothing, for servers that cannot leave a request without one (`vllm_dialect.py`)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from turnwise.errors import ConfigError
from turnwise.models.directories import ADAPTER_CONFIG, ADAPTER_WEIGHTS

FIRST_BLOCK = re.compile(r"(?P<module>.*\.0\.(?:.*\.)?(?P<name>[A-Za-z_]+))\.weight")
"""A weight of the first block of layers."""
PREFERRED = ("o_proj", "out_proj", "dense", "c_proj")
"""What families call the last projection of attention."""


def write_blank(model_directory: Path, target: Path) -> Path:
    """Write PEFT files of rank 1 with zeros for one matrix of the model; every other matrix has no adapter at all."""
    module, name, (num_out, num_in) = _find_matrix(model_directory)
    target.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_directory),
        "r": 1,
        "lora_alpha": 1,
        "target_modules": [name],
        "bias": "none",
    }
    (target / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2), encoding="utf-8")
    tensors = {
        f"base_model.model.{module}.lora_A.weight": np.zeros((1, num_in), dtype=np.float32),
        f"base_model.model.{module}.lora_B.weight": np.zeros((num_out, 1), dtype=np.float32),
    }
    save_file(tensors, target / ADAPTER_WEIGHTS)
    return target


def _find_matrix(model_directory: Path) -> tuple[str, str, tuple[int, int]]:
    """The full name, the last part of the name, and the shape of a matrix that takes adapters."""
    found: dict[str, tuple[str, tuple[int, int]]] = {}
    for file in sorted(model_directory.glob("*.safetensors")):
        with safe_open(str(file), framework="numpy") as weights:
            for key in weights.keys():  # noqa: SIM118 - a file of safetensors is no mapping
                match, shape = FIRST_BLOCK.fullmatch(key), weights.get_slice(key).get_shape()
                if match and len(shape) == 2:
                    found[match["name"]] = (match["module"], (int(shape[0]), int(shape[1])))
    for name in (*PREFERRED, *sorted(found)):
        if name in found:
            module, shape = found[name]
            return module, name, shape
    raise ConfigError(f"{model_directory} has no matrix in its first block of layers; expected a causal language model")
