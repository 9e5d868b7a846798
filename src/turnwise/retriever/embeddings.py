"""Turns text into vectors. It downloads nothing: the model is part of an installed package.

`wordllama` (MIT) holds a table of 32,000 sub-words x 256 numbers, trained for similarity; a text is the mean of its
sub-words. It reads thousands of passages a second on one core. There is no attention in it: word order is lost, and a
name is the sum of its pieces. Only the package's two data files are read, its code is not imported.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from turnwise.errors import ConfigError

Vectors = npt.NDArray[np.float32]

INSTALL = "pip install 'turnwise[retriever]'"
MAX_CHARS = 20_000
"""Longest part of a text that is read."""


class Embedder(Protocol):
    """Makes vectors of unit length, so that the inner product is the cosine."""

    @property
    def name(self) -> str:
        """The name of the weights. A stored index with another name is not used."""
        ...

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return [N, D]. A text without a known token gives the zero vector."""
        ...


class StaticEmbedder:
    """The mean of a text's sub-word vectors."""

    def __init__(self) -> None:
        self._table_VD, self._tokenizer, version = _load_model()
        self.name = f"wordllama-256-{version}"

    def embed(self, texts: Sequence[str]) -> Vectors:
        vectors_ND = np.zeros((len(texts), self._table_VD.shape[1]), dtype=np.float32)
        encodings = self._tokenizer.encode_batch([text[:MAX_CHARS] for text in texts], add_special_tokens=False)
        for number, encoding in enumerate(encodings):
            if encoding.ids:
                vectors_ND[number] = self._table_VD[encoding.ids].mean(axis=0)
        lengths_N = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
        return (vectors_ND / np.where(lengths_N > 0, lengths_N, 1.0)).astype(np.float32)


@functools.cache
def _load_model() -> tuple[Vectors, Tokenizer, str]:
    spec = importlib.util.find_spec("wordllama")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"a dense index needs the package wordllama: {INSTALL}")
    folder, version = Path(spec.submodule_search_locations[0]), importlib.metadata.version("wordllama")
    weights = folder / "weights" / "l2_supercat_256.safetensors"
    tokenizer = folder / "tokenizers" / "l2_supercat_tokenizer_config.json"
    if not (weights.is_file() and tokenizer.is_file()):
        raise ConfigError(f"wordllama {version} does not hold the weights that 0.4 holds: {INSTALL}")
    table_VD = load_file(weights)["embedding.weight"].astype(np.float32)
    return table_VD, Tokenizer.from_file(str(tokenizer)), version
