"""BM25: passages that share rare words with the query come first."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from turnwise.errors import ConfigError
from turnwise.retriever.embeddings import INSTALL

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many are done, and of how many."""

_EVERY = 1000
"""Passages between two reports of progress."""
_PASSES = 3
"""How often bm25s goes through the passages to weigh their words; the last time takes longest."""

Ranked = list[tuple[int, float]]
"""Positions in the corpus with their scores, best first."""


def no_progress(what: str, done: int, total: int) -> None:
    """Show nothing."""


class Bm25Index:
    """Lucene's variant of BM25 over lower-case words, without English stop words."""

    kind = "bm25"

    def __init__(self, model: Any) -> None:
        self._model = model

    @classmethod
    def build(cls, texts: Sequence[str], report: Progress = no_progress) -> Bm25Index:
        model = _bm25s().BM25(method="lucene")
        tokens = _bm25s().tokenize(_told(texts, "words read", report), stopwords="en", show_progress=False)
        if not tokens.vocab:
            raise ConfigError("the corpus has no word to index; expected passages of text")
        report("words weighed", 0, len(texts))
        model.index(tokens._replace(ids=_ToldPasses(tokens.ids, report)), show_progress=False)
        report("words weighed", len(texts), len(texts))
        return cls(model)

    @classmethod
    def load(cls, folder: Path) -> Bm25Index:
        return cls(_bm25s().BM25.load(str(folder), load_corpus=False, mmap=True, show_progress=False))

    def save(self, folder: Path) -> None:
        self._model.save(str(folder), show_progress=False)

    def search(self, query: str, topk: int) -> Ranked:
        """Find passages that share a word with the query. Equal scores keep the order of the corpus."""
        (words,) = _bm25s().tokenize([query], stopwords="en", return_ids=False, show_progress=False)
        if not words:
            return []
        return best(self._model.get_scores(words), topk, above=0.0)


def _told(texts: Sequence[str], what: str, report: Progress) -> Iterator[str]:
    """The texts, telling how many were taken."""
    for done, text in enumerate(texts):
        if done % _EVERY == 0:
            report(what, done, len(texts))
        yield text
    report(what, len(texts), len(texts))


class _ToldPasses(list[list[int]]):
    """Passages as ids; reading them reports the progress. bm25s reads them `_PASSES` times."""

    def __init__(self, passages: Sequence[list[int]], report: Progress) -> None:
        super().__init__(passages)
        self._report = report
        self._seen = 0

    def __iter__(self) -> Iterator[list[int]]:
        for passage in super().__iter__():
            self._seen += 1
            if self._seen % (_EVERY * _PASSES) == 0:
                self._report("words weighed", min(self._seen // _PASSES, len(self)), len(self))
            yield passage


def best(scores_N: npt.NDArray[np.float32], topk: int, *, above: float) -> Ranked:
    """The `topk` highest scores. Ties keep the order of the corpus, so that results are the same on every machine."""
    count = min(topk, len(scores_N))
    lowest = np.partition(scores_N, -count)[-count]
    candidates = np.flatnonzero((scores_N >= lowest) & (scores_N > above))
    order = candidates[np.argsort(-scores_N[candidates], kind="stable")][:count]
    return [(int(place), float(scores_N[place])) for place in order]


def _bm25s() -> Any:
    try:
        with _without_jax():
            import bm25s
    except ImportError as cause:
        raise ConfigError(f"a BM25 index needs the package bm25s: {INSTALL}") from cause
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # the package sets it to DEBUG
    return bm25s


@contextmanager
def _without_jax() -> Iterator[None]:
    """Hide JAX while bm25s is imported.

    Where JAX is installed, bm25s starts it, and JAX then takes three quarters of a GPU's memory. We rank the scores
    ourselves (`best`), so nothing of it is needed. A program that imported JAX before keeps it.
    """
    if "jax" in sys.modules or "bm25s" in sys.modules:
        yield
        return
    sys.modules["jax"] = None  # pyright: ignore[reportArgumentType] - the import system reads None as "not there"
    try:
        yield
    finally:
        del sys.modules["jax"]
