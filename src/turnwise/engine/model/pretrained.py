"""transformers' own model of a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)


def auto_class(config: PretrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """What of transformers makes a model with this config that writes text."""
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def load_pretrained(
    directory: Path, dtype: torch.dtype | None, config: PretrainedConfig | None = None, **settings: Any
) -> Any:
    """The model of this directory; what is saved of it has plain numbers too.

    Args:
        dtype: None: that of the files.
    """
    config = AutoConfig.from_pretrained(directory) if config is None else config
    return auto_class(config).from_pretrained(directory, config=config, dtype=dtype or "auto", **settings)
