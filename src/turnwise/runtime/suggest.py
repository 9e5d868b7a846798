"""The valid names that a misspelt one was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_WORD = 200
"""Longer words are cut before they are compared: the time of a comparison grows with the square of the length."""


def nearest_names(word: object, known: Iterable[str], *, count: int, cutoff: float = 0.5) -> list[str]:
    """Up to `count` known names that are similar to `word`, the most similar first; of equals, the one with the same
    letters."""
    given = str(word)[:MAX_WORD]
    found = difflib.get_close_matches(given, list(known), n=max(count, 4), cutoff=cutoff)

    def likeness(name: str) -> tuple[float, bool]:
        return -difflib.SequenceMatcher(None, name, given).ratio(), sorted(name) != sorted(given)

    return sorted(found, key=likeness)[:count]


def nearest(word: object, known: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """The most similar known name; None when none is similar enough.

    >>> nearest("gpro", ["gspo", "grpo", "ppo"])
    'grpo'
    """
    return next(iter(nearest_names(word, known, count=1, cutoff=cutoff)), None)


def did_you_mean(word: object, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """The end of a sentence about an unknown name: `; did you mean 'X'?`, or nothing where no name is similar."""
    near = nearest(word, known, cutoff=cutoff)
    return "" if near is None else f"; did you mean {near!r}?"
