"""Finds the passages whose vectors are nearest to the query's vector, by cosine similarity.

    flat   compares the query with every passage; exact
    hnsw   walks a graph of neighbours; some of the nearest passages are missed, and a query takes far less time
    ivf    looks into the nearest of many cells; the same, with little memory besides the vectors
    auto   flat up to 50,000 passages, hnsw up to a million, ivf above

A stored index is mapped into memory, not read: processes share it, and one that is larger than memory still works.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from turnwise.errors import ConfigError
from turnwise.retriever.embeddings import INSTALL, Embedder, Vectors
from turnwise.retriever.lexical import Progress, Ranked, no_progress

VectorKind = Literal["auto", "flat", "hnsw", "ivf"]

MAX_FLAT, MAX_HNSW = 50_000, 1_000_000
HNSW_LINKS, HNSW_BUILD_WIDTH, HNSW_SEARCH_WIDTH = 32, 120, 128
IVF_TRAINED_PER_CELL = 64
_FILE = "vectors.faiss"
_BATCH = 1024


def choose_vectors(kind: VectorKind, num_passages: int) -> VectorKind:
    """The kind that `auto` stands for."""
    if kind != "auto":
        return kind
    return "flat" if num_passages <= MAX_FLAT else "hnsw" if num_passages <= MAX_HNSW else "ivf"


class DenseIndex:
    """A FAISS index: four bytes per dimension and passage, and a graph of 256 bytes per passage with hnsw."""

    kind = "dense"

    def __init__(self, index: Any, embedder: Embedder) -> None:
        self._index = index
        self._embedder = embedder

    @classmethod
    def build(
        cls, texts: Sequence[str], embedder: Embedder, vectors: VectorKind = "auto", report: Progress = no_progress
    ) -> DenseIndex:
        kind = choose_vectors(vectors, len(texts))
        waiting: list[Vectors] = []
        num_waiting, index = 0, None
        for start in range(0, len(texts), _BATCH):
            vectors_ND = embedder.embed(texts[start : start + _BATCH])
            waiting.append(vectors_ND)
            num_waiting += len(vectors_ND)
            if index is None:
                index = _new_index(kind, vectors_ND.shape[1], len(texts))
            if _is_ready(index, num_waiting, len(texts)):
                _add(index, waiting)
                waiting, num_waiting = [], 0
            report("passages read", min(start + _BATCH, len(texts)), len(texts))
        return cls(index, embedder)

    @classmethod
    def load(cls, folder: Path, embedder: Embedder) -> DenseIndex:
        faiss = _faiss()
        index = faiss.read_index(str(folder / _FILE), faiss.IO_FLAG_MMAP_IFC)
        return cls(index, embedder)

    def save(self, folder: Path) -> None:
        _faiss().write_index(self._index, str(folder / _FILE))

    def search(self, query: str, topk: int) -> Ranked:
        vectors_1D = self._embedder.embed([query])
        if not vectors_1D.any():
            return []
        scores, places = self._index.search(vectors_1D, min(topk, self._index.ntotal))
        return [(int(p), float(s)) for p, s in zip(places[0], scores[0], strict=True) if p >= 0]


def _new_index(kind: VectorKind, width: int, num_passages: int) -> Any:
    faiss = _faiss()
    if kind == "flat":
        return faiss.IndexFlatIP(width)
    if kind == "hnsw":
        index = faiss.IndexHNSWFlat(width, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction, index.hnsw.efSearch = HNSW_BUILD_WIDTH, HNSW_SEARCH_WIDTH
        return index
    cells = num_cells(num_passages)
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, cells, faiss.METRIC_INNER_PRODUCT)
    index.nprobe = max(1, cells // 8)
    return index


def num_cells(num_passages: int) -> int:
    """Cells of an ivf index: four times the square root of the passages, with enough passages to place each."""
    return max(1, min(int(4 * math.sqrt(num_passages)), num_passages // 40))


def _is_ready(index: Any, num_waiting: int, num_passages: int) -> bool:
    """Whether the vectors so far can be added. The cells of an ivf index are placed by its first passages."""
    if index.is_trained:
        return True
    return num_waiting >= min(num_passages, index.nlist * IVF_TRAINED_PER_CELL)


def _add(index: Any, waiting: Sequence[Vectors]) -> None:
    import numpy as np

    vectors_ND = np.concatenate(waiting)
    if not index.is_trained:
        index.train(vectors_ND)
    index.add(vectors_ND)


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as cause:
        raise ConfigError(f"a dense index needs the package faiss-cpu: {INSTALL}") from cause
    return faiss
