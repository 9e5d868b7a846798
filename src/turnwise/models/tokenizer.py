"""The tokenizer of a model, as transformers reads it from the model's directory."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any


@cache
def load_tokenizer(directory: Path) -> Any:
    """Load a tokenizer. transformers is imported by the first call."""
    from transformers import AutoTokenizer

    loader: Any = AutoTokenizer
    return loader.from_pretrained(str(directory))
