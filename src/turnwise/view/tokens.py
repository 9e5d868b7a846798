"""The text of each token of a turn, read with the tokenizer of the run's model; no model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from turnwise.models.directories import find_local

TOKENIZER_FILE = "tokenizer.json"


def token_texts(model: str, ids: Sequence[int]) -> list[str] | None:
    """The pieces of text that the ids stand for; None if the model's tokenizer is not on this machine.

    A sign of several bytes may take several tokens; it is shown at the last of them, and the others are empty.
    """
    tokenizer = _tokenizer(model)
    if tokenizer is None:
        return None
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, int(token_id)) or "" for token_id in ids]


@lru_cache(maxsize=8)
def _tokenizer(model: str) -> Any:
    directory = find_local(model) if model else None
    file = None if directory is None else Path(directory) / TOKENIZER_FILE
    if file is None or not file.is_file():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))
