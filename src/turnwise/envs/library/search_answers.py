"""Compares answers after the usual normalisation of open-domain question answering.

It makes text lower-case, and removes punctuation, articles and repeated spaces, as SQuAD's evaluation does: "The
Norhaven." becomes "norhaven".
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """The form in which answers are compared."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(answer: str, targets: Sequence[str]) -> bool:
    """Whether an answer equals one of the targets. An answer that normalises to nothing never does."""
    given = normalise(answer)
    return bool(given) and given in {normalise(target) for target in targets}


def f1(answer: str, targets: Sequence[str]) -> float:
    """The best overlap of words with a target: 2 * shared / (words of the answer + words of the target)."""
    return max((_f1(normalise(answer).split(), normalise(target).split()) for target in targets), default=0.0)


def _f1(given: list[str], target: list[str]) -> float:
    shared = (Counter(given) & Counter(target)).total()
    return 2 * shared / (len(given) + len(target)) if shared else 0.0
