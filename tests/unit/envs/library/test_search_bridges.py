from __future__ import annotations

from pathlib import Path

import pytest

from turnwise.envs.check import check_env
from turnwise.envs.library.search import Search
from turnwise.envs.library.search_bridges import make_corpus_questions
from turnwise.envs.splits import split_of
from turnwise.errors import ConfigError
from turnwise.retriever.corpus import Document, write_corpus


def documents() -> list[Document]:
    lands = [
        f'"Land{n}"\nLand{n} is a country. Its capital is Capital{n}. It has {1000 + n} people.' for n in range(30)
    ]
    towns = [f'"Town{n}"\nTown{n} lies in Land{n % 30}. Its mayor was born in {1900 + n}.' for n in range(300)]
    return [Document(id=str(number), contents=text) for number, text in enumerate([*lands, *towns])]


def test_a_question_of_two_hops_hides_the_name_between_and_never_tells_the_answer() -> None:
    questions = make_corpus_questions(documents(), "two_hop")
    assert len(questions) > 100
    for question in questions:
        first, second = question.searches
        assert first in question.text
        assert second not in question.text
        assert question.answer not in question.text
        number = second.removeprefix("Land")
        assert question.answer in (f"Capital{number}", str(1000 + int(number)))


def test_a_question_of_one_hop_leaves_a_fact_blank() -> None:
    texts = {question.text: question.answer for question in make_corpus_questions(documents(), "one_hop")}
    assert texts['Fill the blank: "Town7 lies in ____."'] == "Land7"


def test_both_passages_of_a_question_belong_to_its_split() -> None:
    for question in make_corpus_questions(documents(), "mixed"):
        assert {split_of(title) for title in question.searches} == {question.split}


def test_a_title_of_two_passages_is_not_asked_about() -> None:
    twice = [*documents(), Document(id="x", contents='"Town7"\nTown7 lies in Land9.')]
    assert not any("Town7" in question.searches for question in make_corpus_questions(twice, "mixed"))


def test_a_corpus_that_gives_no_questions_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 questions of kind=two_hop could be made from 1 passages"):
        make_corpus_questions([Document(id="1", contents="no names in here at all")], "two_hop")
    with pytest.raises(ConfigError, match="kind=comparison needs the invented corpus"):
        make_corpus_questions(documents(), "comparison")


def test_the_world_plays_on_any_corpus_and_its_expert_wins(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    write_corpus(corpus, documents())
    world = Search(corpus=corpus, kind="two_hop", topk=3)
    assert check_env(world).is_ok
    train, test = ({task.id for task in world.tasks(split, 500, 0)} for split in ("train", "test"))
    assert not train & test
    for dialogue in world.demonstrations(4, seed=0):
        answer = dialogue[-1].content.removeprefix("<answer>").removesuffix("</answer>")
        assert answer in dialogue[-2].content  # the last search showed it


def test_a_dialogue_that_did_not_find_its_answer_is_no_demonstration(tmp_path: Path) -> None:
    """Half of the lands stand in many passages: with one passage for each search theirs is not shown."""
    hidden = [f'"Place{n}"\nPlace{n} is near Land{n % 15}, Land{n % 15}, Land{n % 15}.' for n in range(300)]
    corpus = tmp_path / "corpus.jsonl"
    write_corpus(corpus, [*documents(), *(Document(id=f"p{n}", contents=text) for n, text in enumerate(hidden))])
    world = Search(corpus=corpus, kind="two_hop", topk=1)
    dialogues = world.demonstrations(20, seed=0)
    assert dialogues
    assert all(
        dialogue[-1].content.removeprefix("<answer>").removesuffix("</answer>")
        in " ".join(message.content for message in dialogue[2:-1])
        for dialogue in dialogues
    )
