"""Questions for the world `search`: made from the invented corpus, or read from a data set.

A question is about one subject (a comparison is about two). Subjects are held out, not questions: training never asks
about a person or a town of the test split.

Data sets come in the layouts that search agents are trained on: rows with `question` and `golden_answers` (NQ,
TriviaQA), with `question` and `answer` (HotpotQA), or with `question` and `reward_model.ground_truth.target`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from turnwise.envs.base import Split, Task
from turnwise.envs.rows import Row, read_rows
from turnwise.envs.splits import in_split, random_for, split_of
from turnwise.errors import ConfigError
from turnwise.retriever.fiction import Fiction, Person, Town

QuestionKind = Literal["one_hop", "two_hop", "comparison", "mixed"]

_ABOUT_PEOPLE = {
    "town": ("Where was {name} born?", "In which town was {name} born?"),
    "year": ("When was {name} born?", "In which year was {name} born?"),
    "job": ("What is the job of {name}?", "What does {name} work as?"),
}
_ABOUT_TOWNS = {
    "land": ("In which land is {name}?", "Which land does {name} belong to?"),
    "river": ("On which river is {name}?", "Which river flows through {name}?"),
}
_ABOUT_BIRTHPLACES = {
    "land": ("In which land was {name} born?", "Which land does the birthplace of {name} belong to?"),
    "river": ("On which river is the birthplace of {name}?", "Which river flows through the birthplace of {name}?"),
}
_COMPARISONS = (("Who was born earlier, {one} or {two}?", True), ("Who was born later, {one} or {two}?", False))

_COMPARISONS_PER_PERSON = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchQuestion:
    """A generated question, with the searches that lead to its answer."""

    text: str
    answer: str
    searches: tuple[str, ...]
    kind: QuestionKind
    split: Split


def make_questions(fiction: Fiction, kind: QuestionKind) -> list[SearchQuestion]:
    """All questions of a kind about a corpus, in a fixed order."""
    questions: list[SearchQuestion] = []
    if kind in ("one_hop", "mixed"):
        questions += [question for person in fiction.people for question in _ask_about_person(person)]
        questions += [question for town in fiction.towns for question in _ask_about_town(town)]
    if kind in ("two_hop", "mixed"):
        questions += [question for person in fiction.people for question in _ask_about_birthplace(person)]
    if kind in ("comparison", "mixed"):
        questions += _compare_people(fiction.people)
    return questions


def question_to_task(question: SearchQuestion) -> Task:
    data = {
        "question": question.text,
        "answers": [question.answer],
        "searches": list(question.searches),
        "kind": question.kind,
    }
    return Task(id=_task_id(question.text), data=data)


def _ask_about_person(person: Person) -> list[SearchQuestion]:
    answers = {"town": person.town.name, "year": str(person.year), "job": person.job}
    return _ask(_ABOUT_PEOPLE, answers, (person.name,))


def _ask_about_town(town: Town) -> list[SearchQuestion]:
    return _ask(_ABOUT_TOWNS, {"land": town.land, "river": town.river}, (town.name,))


def _ask_about_birthplace(person: Person) -> list[SearchQuestion]:
    answers = {"land": person.town.land, "river": person.town.river}
    return _ask(_ABOUT_BIRTHPLACES, answers, (person.name, person.town.name))


def _ask(
    texts: Mapping[str, Sequence[str]], answers: Mapping[str, str], searches: tuple[str, ...]
) -> list[SearchQuestion]:
    """Every text about every relation of one subject, whose name is the first search."""
    name = searches[0]
    return [
        SearchQuestion(
            text=text.format(name=name),
            answer=answers[relation],
            searches=searches,
            kind="one_hop" if len(searches) == 1 else "two_hop",
            split=split_of(name),
        )
        for relation, own in texts.items()
        for text in own
    ]


def _compare_people(people: Sequence[Person]) -> list[SearchQuestion]:
    """Compare each person with a few others of the same split who were born in another year."""
    questions: list[SearchQuestion] = []
    for person in people:
        split = split_of(person.name)
        others = [other for other in people if split_of(other.name) == split and other.year != person.year]
        rng = random_for("compare", person.name)
        for other in rng.sample(others, min(_COMPARISONS_PER_PERSON, len(others))):
            text, wants_first = rng.choice(_COMPARISONS)
            first, last = sorted((person, other), key=lambda one: one.year)
            questions.append(
                SearchQuestion(
                    text=text.format(one=person.name, two=other.name),
                    answer=(first if wants_first else last).name,
                    searches=(person.name, other.name),
                    kind="comparison",
                    split=split,
                )
            )
    return list({question.text: question for question in questions}.values())


def load_questions(path: Path) -> Mapping[Split, Sequence[Task]]:
    """Load both splits from a folder (`train`, and `test` or `dev`; JSON lines or parquet), or divide one file."""
    path = path.expanduser()
    if path.is_file():
        tasks = _read_file(path)
        return {"train": in_split(tasks, "train"), "test": in_split(tasks, "test")}
    if not path.is_dir():
        raise ConfigError(f"path={path} does not exist; expected a file of questions, or a folder with train and test")
    train, test = _read_file(_find(path, ("train",))), _read_file(_find(path, ("test", "dev")))
    seen = {task.id for task in train}
    return {"train": train, "test": [task for task in test if task.id not in seen]}


def _find(folder: Path, names: Sequence[str]) -> Path:
    for name in names:
        for ending in (".jsonl", ".json", "*.parquet"):
            found = sorted(folder.glob(f"{name}{ending}"))
            if found:
                return found[0]
    raise ConfigError(f"no {' or '.join(names)} (.jsonl, .json, .parquet) in {folder}; expected both splits")


def _read_file(path: Path) -> list[Task]:
    tasks: dict[str, Task] = {}
    for number, row in enumerate(read_rows(path), start=1):
        question, answers = row.get("question"), _answers(row)
        if not isinstance(question, str) or not question.strip() or not answers:
            raise ConfigError(
                f"{path}, row {number}: expected a question, and golden_answers (a list) or answer (text); "
                f"it has {', '.join(list(row)[:8])}"
            )
        task = Task(id=_task_id(question), data={"question": question.strip(), "answers": answers})
        tasks[task.id] = task
    return list(tasks.values())


def _answers(row: Row) -> list[str]:
    """Every wording of the answer that the row accepts."""
    found: Any = row.get("golden_answers", row.get("answers", row.get("answer")))
    if found is None and isinstance(row.get("reward_model"), Mapping):
        truth: Any = row["reward_model"].get("ground_truth")
        found = truth.get("target") if hasattr(truth, "get") else truth
    many = cast(Sequence[object], found) if isinstance(found, Sequence) else ()
    texts = [found] if isinstance(found, str | int) else many
    return [str(text) for text in texts if isinstance(text, str | int) and str(text).strip()]


def _task_id(question: str) -> str:
    return f"search-{hashlib.sha256(question.strip().encode('utf-8')).hexdigest()[:16]}"
