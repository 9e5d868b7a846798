from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnwise.errors import ConfigError
from turnwise.retriever.corpus import Corpus, Document, read_corpus, write_corpus
from turnwise.retriever.fiction import draw_fiction


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    documents = [Document(id="a", contents="One\nline"), Document(id="b", contents="Zwölf")]
    assert write_corpus(tmp_path / "c.jsonl", documents) == 2
    corpus = read_corpus(tmp_path / "c.jsonl")
    assert list(corpus.documents) == documents
    assert corpus.checksum == Corpus.of(documents).checksum


def test_the_checksum_is_of_the_passages_and_not_of_the_file(tmp_path: Path) -> None:
    rows = [{"id": 1, "contents": "x"}, {"id": 2, "contents": "y"}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(
        "\n\n".join(json.dumps({**row, "more": 1}, indent=None) for row in rows) + "\n", encoding="utf-8"
    )
    one, two = read_corpus(tmp_path / "a.jsonl"), read_corpus(tmp_path / "b.jsonl")
    assert one.checksum == two.checksum
    assert one.checksum != Corpus.of([Document(id="1", contents="xy")]).checksum


def test_title_and_text_are_read_in_place_of_contents(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"_id": "q", "title": "Emma", "text": "A novel."}\n', encoding="utf-8")
    assert read_corpus(tmp_path / "c.jsonl").documents == (Document(id="q", contents='"Emma"\nA novel.'),)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no passages"),
        ("{", "line 1: .*expected one JSON object per line"),
        ("[1]", "line 1 is list; expected an object with id and contents"),
        ('{"id": 1}', "line 1 has no text"),
        ('{"id": 1, "contents": " "}', "line 1 has no text"),
        ('{"id": [1], "contents": "x"}', r"line 1: id is \[1\]"),
        ('{"id": 1, "contents": "x"}\n{"id": "1", "contents": "y"}', "line 2: id '1' was used before"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=problem):
        read_corpus(tmp_path / "c.jsonl")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no corpus file"):
        read_corpus(tmp_path / "none.jsonl")


def test_the_same_seed_draws_the_same_fiction_and_another_seed_another() -> None:
    assert draw_fiction(3) == draw_fiction(3)
    assert draw_fiction(3).documents != draw_fiction(4).documents


def test_every_fact_stands_in_its_passage_and_names_are_unique() -> None:
    fiction = draw_fiction(1)
    texts = [document.contents for document in fiction.documents]
    for person, text in zip(fiction.people, texts, strict=False):
        assert all(fact in text for fact in (person.name, person.job, person.town.name, str(person.year)))
    for town, text in zip(fiction.towns, texts[len(fiction.people) :], strict=True):
        assert all(fact in text for fact in (town.name, town.land, town.river))
    names = [one.name for one in [*fiction.people, *fiction.towns]]
    assert len(set(names)) == len(names)


def test_people_share_names_so_that_half_a_name_is_not_enough() -> None:
    people = draw_fiction(0).people
    surnames = [person.name.split()[1] for person in people]
    assert sum(surnames.count(surname) > 1 for surname in surnames) > len(people) / 2


@pytest.mark.parametrize("size", [{"num_people": 1}, {"num_towns": 1000}])
def test_a_size_that_cannot_be_drawn_is_refused(size: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"expected 2 to \d+"):
        draw_fiction(0, **size)
