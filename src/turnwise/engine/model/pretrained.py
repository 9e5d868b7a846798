"""transformers' own model of a directory: its class, and its weights as plain numbers.

The published weights of gpt-oss are MXFP4: four bits a number (e2m1), and a power of two for every 32 of them. bfloat16
holds each product of the two exactly, so they are multiplied out when the model is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Mxfp4Config,
    PretrainedConfig,
)

from turnwise.models.families import is_packed


def auto_class(config: PretrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """What of transformers makes a model with this config that writes text."""
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def load_pretrained(
    directory: Path, dtype: torch.dtype | None, config: PretrainedConfig | None = None, **settings: Any
) -> Any:
    """The model of this directory; what is saved of it has plain numbers too.

    Args:
        dtype: None: that of the files, bfloat16 where they are packed.
    """
    config = AutoConfig.from_pretrained(directory) if config is None else config
    if not is_packed(config.to_dict()):
        return auto_class(config).from_pretrained(directory, config=config, dtype=dtype or "auto", **settings)
    dtype = dtype or torch.bfloat16
    how = Mxfp4Config(dequantize=True)
    model: Any = auto_class(config).from_pretrained(
        directory, config=config, dtype=dtype, quantization_config=how, **settings
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # transformers multiplies out in bfloat16, whatever was asked for
    model._weight_conversions = None  # it would save the plain numbers under the names of packed ones
    return model
