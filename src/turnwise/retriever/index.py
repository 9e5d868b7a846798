"""Builds an index of a corpus, and stores it on disk under a checksum.

`hybrid` fuses the two rankings: a passage scores 1 / (60 + rank) in each, added up (reciprocal rank fusion).

A stored index is in `CACHE/KIND-CHECKSUM/`; the checksum covers the passages and the weights. Its manifest holds the
size, the time and the checksum of every file. A file with its size and time is taken as it is, so that a large index is
not read before it is mapped; one with another time is read and compared. A folder that does not match is built again.
`drop_damaged` reads everything. An index is written to a temporary folder and renamed, so a stored one is complete.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol, get_args

from turnwise.errors import ConfigError
from turnwise.retriever.corpus import Corpus, Hit
from turnwise.retriever.dense import DenseIndex, VectorKind, choose_vectors
from turnwise.retriever.embeddings import Embedder, StaticEmbedder
from turnwise.retriever.lexical import Bm25Index, Progress, Ranked, no_progress
from turnwise.runtime.checksum import sha256_of

IndexKind = Literal["bm25", "dense", "hybrid"]
INDEX_KINDS: tuple[IndexKind, ...] = get_args(IndexKind)

FORMAT = 3
"""Version of the stored files. Increase it when they change."""
FUSION_OFFSET = 60
FUSION_DEPTH = 100
"""Number of passages of each ranking that are fused."""

_MANIFEST = "manifest.json"


class _Ranking(Protocol):
    def search(self, query: str, topk: int) -> Ranked: ...

    def save(self, folder: Path) -> None: ...


class CorpusIndex:
    """Finds passages of one corpus. Searching changes nothing, so threads may share it."""

    def __init__(self, corpus: Corpus, kind: IndexKind, parts: Sequence[_Ranking]) -> None:
        self.corpus = corpus
        self.kind = kind
        self._parts = parts

    def search(self, query: str, topk: int) -> list[Hit]:
        """Find at most `topk` passages, best first. Empty if no word of the query is known."""
        if len(self._parts) == 1:
            ranked = self._parts[0].search(query, topk)
        else:
            depth = max(topk, FUSION_DEPTH)
            ranked = fuse([part.search(query, depth) for part in self._parts])[:topk]
        return [Hit(document=self.corpus.documents[place], score=score) for place, score in ranked]

    def save(self, folder: Path) -> None:
        for number, part in enumerate(self._parts):
            (folder / str(number)).mkdir()
            part.save(folder / str(number))


def fuse(rankings: Sequence[Ranked]) -> Ranked:
    """Fuse rankings by reciprocal rank. Equal sums keep the order of the corpus."""
    totals: defaultdict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, (place, _) in enumerate(ranking, start=1):
            totals[place] += 1 / (FUSION_OFFSET + rank)
    return sorted(totals.items(), key=lambda item: (-item[1], item[0]))


def build_index(
    corpus: Corpus,
    kind: IndexKind,
    embedder: Embedder | None = None,
    vectors: VectorKind = "auto",
    report: Progress = no_progress,
) -> CorpusIndex:
    """Index a corpus in memory."""
    texts = [document.contents for document in corpus.documents]
    parts: list[_Ranking] = []
    if kind != "dense":
        parts.append(Bm25Index.build(texts, report))
    if kind != "bm25":
        parts.append(DenseIndex.build(texts, embedder or StaticEmbedder(), vectors, report))
    return CorpusIndex(corpus, kind, parts)


def make_embedder(name: str) -> Embedder:
    """The encoder of a name: `static`, `minilm`, or a folder with the weights of a sentence encoder."""
    if name == "static":
        return StaticEmbedder()
    from turnwise.retriever.sentence_encoder import SentenceEncoder, find_minilm

    return SentenceEncoder(find_minilm() if name == "minilm" else Path(name).expanduser())


def open_index(
    corpus: Corpus,
    kind: IndexKind,
    *,
    cache: Path | None = None,
    embedder: Embedder | None = None,
    vectors: VectorKind = "auto",
    report: Progress = no_progress,
) -> tuple[CorpusIndex, bool]:
    """Load a corpus's index from `cache`, or build it. Return the index, and whether it was loaded.

    Args:
        cache: The folder of stored indexes. None stores nothing.
    """
    if kind not in INDEX_KINDS:
        raise ConfigError(f"index {kind!r}; expected {', '.join(INDEX_KINDS)}")
    if kind != "bm25":
        embedder = embedder or StaticEmbedder()
    vectors = choose_vectors(vectors, len(corpus.documents))
    if cache is None:
        return build_index(corpus, kind, embedder, vectors, report), False
    place = cache.expanduser() / f"{kind}-{_key(corpus, kind, embedder, vectors)}"
    if _is_whole(place):
        return _load(corpus, kind, place, embedder), True
    index = build_index(corpus, kind, embedder, vectors, report)
    _keep(index, place)
    return index, False


def drop_damaged(cache: Path) -> list[str]:
    """Read every stored index, and remove those with a file that is not as it was written. Returns their names."""
    folders = [place for place in sorted(cache.expanduser().glob("*-*")) if (place / _MANIFEST).is_file()]
    damaged = [place for place in folders if not _is_whole(place, reads_all=True)]
    for place in damaged:
        shutil.rmtree(place)
    return [place.name for place in damaged]


def _key(corpus: Corpus, kind: IndexKind, embedder: Embedder | None, vectors: VectorKind) -> str:
    made_from = [FORMAT, kind, corpus.checksum, *([embedder.name, vectors] if embedder else [])]
    return hashlib.sha256(json.dumps(made_from).encode("utf-8")).hexdigest()[:20]


def _load(corpus: Corpus, kind: IndexKind, place: Path, embedder: Embedder | None) -> CorpusIndex:
    if kind == "bm25":
        return CorpusIndex(corpus, kind, [Bm25Index.load(place / "0")])
    assert embedder is not None
    if kind == "dense":
        return CorpusIndex(corpus, kind, [DenseIndex.load(place / "0", embedder)])
    return CorpusIndex(corpus, kind, [Bm25Index.load(place / "0"), DenseIndex.load(place / "1", embedder)])


def _keep(index: CorpusIndex, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        index.save(fresh)
        manifest = {name: _describe(fresh / name) for name in _files(fresh)}
        (fresh / _MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        if place.exists():
            shutil.rmtree(place)  # it exists but is not complete
        try:
            fresh.replace(place)
        except OSError:
            if not _is_whole(place):  # otherwise another process wrote the same files first
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _is_whole(place: Path, *, reads_all: bool = False) -> bool:
    try:
        manifest = json.loads((place / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(manifest, dict) or set(_files(place)) != set(manifest):
        return False
    return all(_is_same(place / name, written, reads_all=reads_all) for name, written in manifest.items())


def _describe(file: Path) -> dict[str, int | str]:
    found = file.stat()
    return {"bytes": found.st_size, "time_ns": found.st_mtime_ns, "sha256": sha256_of(file)}


def _is_same(file: Path, written: dict[str, int | str], *, reads_all: bool) -> bool:
    """Whether a file is as the manifest says: by size and time, or by its checksum."""
    found = file.stat()
    if found.st_size != written["bytes"]:
        return False
    if found.st_mtime_ns == written["time_ns"] and not reads_all:
        return True
    return sha256_of(file) == written["sha256"]


def _files(folder: Path) -> list[str]:
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return sorted(name for name in files if name != _MANIFEST)
