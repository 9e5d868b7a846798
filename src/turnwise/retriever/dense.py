"""Finds the passages whose vectors are nearest to the query's vector, by exact cosine similarity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError
from turnwise.retriever.embeddings import INSTALL, Embedder
from turnwise.retriever.lexical import Ranked

_FILE = "vectors.faiss"
_BATCH = 4096


class DenseIndex:
    """A flat FAISS index: 1 KiB per passage at 256 dimensions."""

    kind = "dense"

    def __init__(self, index: Any, embedder: Embedder) -> None:
        self._index = index
        self._embedder = embedder

    @classmethod
    def build(cls, texts: Sequence[str], embedder: Embedder) -> DenseIndex:
        index = None
        for start in range(0, len(texts), _BATCH):
            vectors_ND = embedder.embed(texts[start : start + _BATCH])
            index = index if index is not None else _faiss().IndexFlatIP(vectors_ND.shape[1])
            index.add(vectors_ND)
        return cls(index, embedder)

    @classmethod
    def load(cls, folder: Path, embedder: Embedder) -> DenseIndex:
        return cls(_faiss().read_index(str(folder / _FILE)), embedder)

    def save(self, folder: Path) -> None:
        _faiss().write_index(self._index, str(folder / _FILE))

    def search(self, query: str, topk: int) -> Ranked:
        vectors_1D = self._embedder.embed([query])
        if not vectors_1D.any():
            return []
        scores, places = self._index.search(vectors_1D, min(topk, self._index.ntotal))
        return [(int(p), float(s)) for p, s in zip(places[0], scores[0], strict=True) if p >= 0]


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as cause:
        raise ConfigError(f"a dense index needs the package faiss-cpu: {INSTALL}") from cause
    return faiss
