"""The valid name that a misspelt one was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_WORD = 80
"""Longer words are cut before they are compared: comparing takes time that grows with the square of the length."""


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """The most similar known name; None when none is similar enough.

    >>> nearest("gpro", ["grpo", "ppo"])
    'grpo'
    """
    found = difflib.get_close_matches(word[:MAX_WORD], list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.5) -> str:
    """The end of a sentence about an unknown name: `; did you mean X?`, or nothing."""
    near = nearest(word, known, cutoff=cutoff)
    return "" if near is None else f"; did you mean {near}?"
