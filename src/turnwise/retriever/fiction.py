"""A small invented corpus: people and towns that exist nowhere, so that no model can know them.

    Anna Belford is a baker who was born in Norhaven in 1874.
    Norhaven is a town in Selmark. It lies on the river Wenna.

Everything is drawn from one seed. People share first names and surnames, as in life, so a search for half a name finds
the wrong person too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.errors import ConfigError
from turnwise.retriever.corpus import Document

FIRST_NAMES = (
    *("Adam", "Alice", "Anna", "Ben", "Clara", "Daniel", "David", "Edith", "Emma", "Eric", "Frank", "George"),
    *("Grace", "Helen", "Henry", "Jack", "James", "Jane", "John", "Karl", "Laura", "Leo", "Lucy", "Mark"),
    *("Martin", "Mary", "Max", "Nina", "Oscar", "Paul", "Peter", "Rose", "Ruth", "Sam", "Sara", "Tom"),
)
JOBS = (
    *("baker", "barber", "butcher", "carpenter", "cook", "dentist", "doctor", "driver", "farmer", "gardener"),
    *("judge", "lawyer", "librarian", "miller", "miner", "nurse", "painter", "pilot", "plumber", "poet"),
    *("sailor", "singer", "tailor", "teacher"),
)
_ROOTS = (
    *("Bel", "Dor", "Fen", "Gar", "Hal", "Kel", "Lan", "Mor", "Nor", "Pel", "Ros", "Sel", "Tor", "Val", "Wen", "Zan"),
)
_SURNAME_ENDS = ("berg", "den", "field", "ford", "ler", "man", "son", "ton")
_TOWN_ENDS = ("bury", "dale", "ham", "haven", "mouth", "port")
_LAND_ENDS = ("ia", "land", "mark")
_RIVER_ENDS = ("a", "ne", "ska")

_FIRST_YEAR, _LAST_YEAR = 1800, 1990
_PERSON_TEXTS = (
    "{name} is a {job} who was born in {town} in {year}.",
    "{name} was born in {year} in {town} and works as a {job}.",
    "{name} works as a {job}. Born in {town} in {year}.",
)
_TOWN_TEXTS = (
    "{name} is a town in {land}. It lies on the river {river}.",
    "The town of {name} lies on the river {river} in {land}.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Town:
    name: str
    land: str
    river: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    name: str
    job: str
    town: Town
    """Town of birth."""
    year: int
    """Year of birth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fiction:
    """The facts, and the passages that tell them: first those of the people, then those of the towns."""

    people: Sequence[Person]
    towns: Sequence[Town]
    documents: Sequence[Document]


def draw_fiction(seed: int, *, num_people: int = 240, num_towns: int = 40) -> Fiction:
    """Draw a corpus. The same arguments give the same people, towns and passages on every machine."""
    _check_count("num_people", num_people, len(FIRST_NAMES) * len(_ROOTS) * len(_SURNAME_ENDS) // 2)
    _check_count("num_towns", num_towns, len(_ROOTS) * len(_TOWN_ENDS))
    rng = random.Random(f"fiction:{seed}")
    lands = rng.sample(_names(_LAND_ENDS), 12)
    rivers = rng.sample(_names(_RIVER_ENDS), 20)
    towns = [
        Town(name=name, land=rng.choice(lands), river=rng.choice(rivers))
        for name in rng.sample(_names(_TOWN_ENDS), num_towns)
    ]
    people = [
        Person(name=name, job=rng.choice(JOBS), town=rng.choice(towns), year=rng.randint(_FIRST_YEAR, _LAST_YEAR))
        for name in _draw_full_names(rng, num_people)
    ]
    texts = [*(_tell_person(person, rng) for person in people), *(_tell_town(town, rng) for town in towns)]
    documents = [Document(id=str(number), contents=text) for number, text in enumerate(texts)]
    return Fiction(people=tuple(people), towns=tuple(towns), documents=tuple(documents))


def _check_count(name: str, count: int, most: int) -> None:
    if not 2 <= count <= most:
        raise ConfigError(f"{name}={count}; expected 2 to {most}")


def _names(ends: Sequence[str]) -> list[str]:
    return [root + end for root in _ROOTS for end in ends]


def _draw_full_names(rng: random.Random, count: int) -> list[str]:
    surnames = _names(_SURNAME_ENDS)
    pairs = rng.sample(range(len(FIRST_NAMES) * len(surnames)), count)
    return [f"{FIRST_NAMES[pair // len(surnames)]} {surnames[pair % len(surnames)]}" for pair in pairs]


def _tell_person(person: Person, rng: random.Random) -> str:
    text = rng.choice(_PERSON_TEXTS)
    return text.format(name=person.name, job=person.job, town=person.town.name, year=person.year)


def _tell_town(town: Town, rng: random.Random) -> str:
    return rng.choice(_TOWN_TEXTS).format(name=town.name, land=town.land, river=town.river)
