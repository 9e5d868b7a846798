"""Tokenizers of several chat formats, made from `tiny`'s."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

MakeTokenizer = Callable[..., Any]


def load_tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_dir: Path) -> Any:
    return load_tokenizer(tiny_dir)


@pytest.fixture(scope="session")
def make_tokenizer(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeTokenizer:
    """`tiny`'s tokenizer with another chat template and more special tokens, written to disk and read back."""

    def make(template: str | None, *, special: Sequence[str | AddedToken] = (), eos: str | None = None) -> Any:
        tokenizer = load_tokenizer(tiny_dir)
        tokens = [
            token if isinstance(token, AddedToken) else AddedToken(token, special=True, normalized=False)
            for token in special
        ]
        if tokens:
            tokenizer.add_tokens(tokens, special_tokens=True)
        tokenizer.chat_template = template
        if eos is not None:
            tokenizer.eos_token = eos
        directory = tmp_path_factory.mktemp("tokenizer")
        tokenizer.save_pretrained(directory)
        return load_tokenizer(directory)

    return make
