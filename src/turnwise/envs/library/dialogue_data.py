"""Short conversations for the world `dialogue`: facts, sums and things to remember, where a later turn needs an
earlier one. The test split holds out whole conversations: other countries, other names, other numbers."""

from __future__ import annotations

from typing import Any

SYSTEM = "Answer in a few words."

CAPITALS = (
    ("France", "Paris", "Europe"),
    ("Italy", "Rome", "Europe"),
    ("Spain", "Madrid", "Europe"),
    ("Germany", "Berlin", "Europe"),
    ("Greece", "Athens", "Europe"),
    ("Poland", "Warsaw", "Europe"),
    ("Austria", "Vienna", "Europe"),
    ("Portugal", "Lisbon", "Europe"),
    ("Japan", "Tokyo", "Asia"),
    ("China", "Beijing", "Asia"),
    ("Thailand", "Bangkok", "Asia"),
    ("South Korea", "Seoul", "Asia"),
    ("Egypt", "Cairo", "Africa"),
    ("Kenya", "Nairobi", "Africa"),
    ("Ghana", "Accra", "Africa"),
    ("Peru", "Lima", "South America"),
    ("Chile", "Santiago", "South America"),
    ("Cuba", "Havana", "North America"),
    ("Norway", "Oslo", "Europe"),
    ("Ireland", "Dublin", "Europe"),
    ("Hungary", "Budapest", "Europe"),
    ("Vietnam", "Hanoi", "Asia"),
    ("Morocco", "Rabat", "Africa"),
    ("Canada", "Ottawa", "North America"),
)
OPPOSITES = (
    ("hot", "cold"),
    ("big", "small"),
    ("day", "night"),
    ("up", "down"),
    ("old", "young"),
    ("full", "empty"),
    ("fast", "slow"),
    ("wet", "dry"),
    ("left", "right"),
    ("open", "closed"),
    ("happy", "sad"),
    ("strong", "weak"),
    ("early", "late"),
    ("high", "low"),
    ("hard", "soft"),
    ("light", "dark"),
    ("rich", "poor"),
    ("true", "false"),
    ("clean", "dirty"),
    ("first", "last"),
)
PEOPLE = (
    *("Anna", "Ben", "Clara", "David", "Ella", "Felix", "Grace", "Hugo", "Ivy", "Jack", "Lena", "Max"),
    *("Nora", "Oscar", "Paul", "Rosa", "Sam", "Tina", "Victor", "Wendy", "Adam", "Emma", "Leo", "Mia"),
)
COLOURS = ("red", "blue", "green", "yellow", "black", "white")
COLOURS_EACH = 3
"""Number of conversations with each person."""
SUMS = tuple((a, b, (a + b) % 3 + 1) for a in range(2, 10) for b in range(1, 9))


def make_conversations() -> list[dict[str, Any]]:
    """Make all conversations, in the form that `dialogue.load_conversations` reads."""
    return [
        *(_capital(*row) for row in CAPITALS),
        *(_opposite(*row) for row in OPPOSITES),
        *(
            _person(name, COLOURS[(i + 2 * k) % len(COLOURS)])
            for i, name in enumerate(PEOPLE)
            for k in range(COLOURS_EACH)
        ),
        *(_sum(*row) for row in SUMS),
    ]


def _capital(country: str, capital: str, continent: str) -> dict[str, Any]:
    return _conversation(
        f"capital-{country}",
        _turn(f"What is the capital of {country}?", capital, capital),
        _turn("On which continent is it?", continent, continent),
    )


def _opposite(word: str, opposite: str) -> dict[str, Any]:
    return _conversation(
        f"opposite-{word}",
        _turn(f"What is the opposite of {word}?", opposite, opposite),
        _turn("And the opposite of that?", word, word),
    )


def _person(name: str, colour: str) -> dict[str, Any]:
    return _conversation(
        f"person-{name}-{colour}",
        _turn(f"Hello, my name is {name}. Greet me by name.", f"Hello, {name}!", name),
        _turn(f"I like {colour}. Which colour do I like?", colour.capitalize(), colour),
        _turn("What is my name?", name, name),
    )


def _sum(a: int, b: int, more: int) -> dict[str, Any]:
    return _conversation(
        f"sum-{a}-{b}-{more}",
        _turn(f"What is {a} plus {b}?", str(a + b), str(a + b)),
        _turn(f"Add {more} to that.", str(a + b + more), str(a + b + more)),
    )


def _turn(text: str, reply: str, keyword: str) -> dict[str, Any]:
    return {"user": text, "assistant": reply, "keywords": [keyword]}


def _conversation(name: str, *turns: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "system": SYSTEM, "turns": list(turns)}
