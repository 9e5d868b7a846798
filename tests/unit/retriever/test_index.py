from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnwise.errors import ConfigError
from turnwise.retriever.corpus import Corpus, Document
from turnwise.retriever.embeddings import StaticEmbedder
from turnwise.retriever.fiction import draw_fiction
from turnwise.retriever.index import INDEX_KINDS, CorpusIndex, IndexKind, build_index, drop_damaged, fuse, open_index
from turnwise.retriever.lexical import best

ANIMALS = [
    "The whale is a mammal that lives in the sea.",
    "A locomotive pulls trains along a railway.",
    "Bread is baked from flour and water in an oven.",
    "A lawyer speaks for people in front of a judge.",
]


def corpus_of(*texts: str) -> Corpus:
    return Corpus.of(Document(id=str(number), contents=text) for number, text in enumerate(texts))


def found(index: CorpusIndex, query: str, topk: int) -> list[str]:
    return [hit.document.id for hit in index.search(query, topk)]


def recall(index: CorpusIndex, questions: list[tuple[str, str]], topk: int) -> float:
    return float(np.mean([target in found(index, query, topk) for query, target in questions]))


def questions_about_fiction() -> list[tuple[str, str]]:
    fiction = draw_fiction(0)
    people = [(f"Where was {person.name} born?", str(n)) for n, person in enumerate(fiction.people)]
    names = [(person.name, str(n)) for n, person in enumerate(fiction.people)]
    towns = [(f"In which land is {town.name}?", str(n + len(people))) for n, town in enumerate(fiction.towns)]
    return people + names + towns


@pytest.mark.parametrize(("kind", "at_1", "at_5"), [("bm25", 1.0, 1.0), ("dense", 0.85, 0.93), ("hybrid", 0.90, 0.98)])
def test_the_gold_passage_of_the_invented_corpus_is_found(kind: IndexKind, at_1: float, at_5: float) -> None:
    index = build_index(Corpus.of(draw_fiction(0).documents), kind)
    questions = questions_about_fiction()
    assert recall(index, questions, 1) >= at_1
    assert recall(index, questions, 5) >= at_5


def test_a_dense_index_finds_meaning_where_no_word_is_shared() -> None:
    corpus = corpus_of(*ANIMALS)
    bm25, dense = build_index(corpus, "bm25"), build_index(corpus, "dense")
    for query, target in (("ocean animals", "0"), ("rail transport", "1"), ("cooking dough", "2"), ("attorney", "3")):
        assert found(bm25, query, 1) == []
        assert found(dense, query, 1) == [target]


def test_bm25_scores_are_those_of_the_formula() -> None:
    """Lucene's: idf * tf / (tf + k1 * (1 - b + b * length / mean length)), idf = ln(1 + (N - n + 0.5) / (n + 0.5))."""
    texts = [["apple", "apple", "pear"], ["apple", "plum"], ["fig", "plum", "pear", "fig"]]
    index = build_index(corpus_of(*(" ".join(words) for words in texts)), "bm25")
    mean = np.mean([len(words) for words in texts])
    scores = {hit.document.id: hit.score for hit in index.search("apple fig", 3)}
    for number, words in enumerate(texts):
        expected = 0.0
        for term in ("apple", "fig"):
            holders = sum(term in other for other in texts)
            idf = np.log(1 + (len(texts) - holders + 0.5) / (holders + 0.5))
            count = words.count(term)
            expected += idf * count / (count + 1.5 * (1 - 0.75 + 0.75 * len(words) / mean))
        assert scores[str(number)] == pytest.approx(expected, rel=1e-5)


def test_dense_scores_are_cosines_and_sorted() -> None:
    embedder = StaticEmbedder()
    index = build_index(corpus_of(*ANIMALS), "dense", embedder)
    vectors, query = embedder.embed(ANIMALS), embedder.embed(["a fish in the water"])[0]
    hits = index.search("a fish in the water", 4)
    np.testing.assert_allclose([hit.score for hit in hits], sorted(vectors @ query, reverse=True), rtol=1e-5)


def test_embeddings_have_unit_length_and_an_empty_text_none() -> None:
    vectors = StaticEmbedder().embed(["hello", "", "a longer text, with words"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 0, 1], atol=1e-6)
    assert vectors.dtype == np.float32
    assert StaticEmbedder().embed([]).shape == (0, 256)


@pytest.mark.parametrize("kind", INDEX_KINDS)
def test_a_query_with_nothing_in_it_finds_nothing(kind: IndexKind) -> None:
    assert found(build_index(corpus_of(*ANIMALS), kind), "", 3) == []


@pytest.mark.parametrize("kind", INDEX_KINDS)
def test_more_than_there_is_may_be_asked_for(kind: IndexKind) -> None:
    index = build_index(corpus_of(*ANIMALS), kind)
    assert 1 <= len(index.search("the judge and the sea", 50)) <= len(ANIMALS)


def test_equal_scores_come_in_the_order_of_the_corpus() -> None:
    index = build_index(corpus_of("red fox", "red hen", "red cat", "blue dog"), "bm25")
    assert found(index, "red", 2) == ["0", "1"]
    assert best(np.array([1, 3, 3, 2, 3], dtype=np.float32), 2, above=0.0) == [(1, 3.0), (2, 3.0)]


def test_fusion_adds_reciprocal_ranks() -> None:
    fused = fuse([[(7, 9.0), (8, 1.0)], [(8, 0.5)]])
    assert fused == [(8, pytest.approx(1 / 62 + 1 / 61)), (7, pytest.approx(1 / 61))]


@pytest.mark.parametrize("kind", INDEX_KINDS)
def test_a_kept_index_answers_as_the_one_that_was_built(kind: IndexKind, tmp_path: Path) -> None:
    corpus = Corpus.of(draw_fiction(0, num_people=40, num_towns=8).documents)
    built, was_kept = open_index(corpus, kind, cache=tmp_path)
    again, is_kept = open_index(corpus, kind, cache=tmp_path)
    assert (was_kept, is_kept) == (False, True)
    for query in ("Anna", "born in 1900", "the river"):
        assert built.search(query, 5) == again.search(query, 5)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_damaged_index_is_made_again(tmp_path: Path) -> None:
    corpus = corpus_of(*ANIMALS)
    open_index(corpus, "bm25", cache=tmp_path)
    (folder,) = tmp_path.iterdir()
    victim = next(path for path in sorted(folder.rglob("*.npy")))
    victim.write_bytes(victim.read_bytes()[:-1] + b"\x01")
    index, was_kept = open_index(corpus, "bm25", cache=tmp_path)
    assert not was_kept
    assert found(index, "whale", 1) == ["0"]
    assert open_index(corpus, "bm25", cache=tmp_path)[1]
    (folder / "manifest.json").write_text(json.dumps([]), encoding="utf-8")
    assert not open_index(corpus, "bm25", cache=tmp_path)[1]


def test_a_stored_index_is_not_read_to_be_opened_unless_a_file_has_another_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = corpus_of(*ANIMALS)
    open_index(corpus, "bm25", cache=tmp_path)
    read: list[str] = []
    real = hashlib.file_digest

    def watched(file: Any, name: str) -> Any:
        read.append(Path(file.name).name)
        return real(file, name)

    monkeypatch.setattr(hashlib, "file_digest", watched)
    assert open_index(corpus, "bm25", cache=tmp_path)[1]
    assert read == []
    victim = next(iter(sorted(tmp_path.rglob("*.npy"))))
    os.utime(victim, (1, 1))  # as after a copy
    assert open_index(corpus, "bm25", cache=tmp_path)[1]
    assert read == [victim.name]


def test_damage_that_keeps_size_and_time_is_found_when_everything_is_read(tmp_path: Path) -> None:
    corpus = corpus_of(*ANIMALS)
    open_index(corpus, "bm25", cache=tmp_path)
    assert drop_damaged(tmp_path) == []
    (folder,) = tmp_path.iterdir()
    victim = next(iter(sorted(folder.rglob("*.npy"))))
    before = victim.stat()
    victim.write_bytes(victim.read_bytes()[:-1] + b"\x01")
    os.utime(victim, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert drop_damaged(tmp_path) == [folder.name]
    assert not open_index(corpus, "bm25", cache=tmp_path)[1]


def test_a_bm25_index_tells_how_far_it_is_while_it_is_built() -> None:
    told: list[tuple[str, int, int]] = []
    texts = [f"passage {number} of many words" for number in range(5000)]
    build_index(corpus_of(*texts), "bm25", report=lambda *one: told.append(one))
    for what in ("words read", "words weighed"):
        done = [one for name, one, total in told if name == what and total == 5000]
        assert done == sorted(done)
        assert {0, 2000, 4000, 5000} <= set(done)


def test_other_passages_get_an_index_of_their_own(tmp_path: Path) -> None:
    open_index(corpus_of("one word"), "bm25", cache=tmp_path)
    index, was_kept = open_index(corpus_of("another word"), "bm25", cache=tmp_path)
    assert not was_kept
    assert found(index, "another", 1) == ["0"]


def test_an_unknown_kind_and_a_corpus_without_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected bm25, dense, hybrid"):
        open_index(corpus_of("x"), "sparse")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="no word to index"):
        build_index(corpus_of("?", "!"), "bm25")
