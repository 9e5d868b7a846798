"""When an answer is right: compared after the normalisation that open-domain question answering has agreed on.

Lower case, no punctuation, no articles, single spaces (as SQuAD's evaluation does it): "The Norhaven." is "norhaven".
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
    """Equal to one of the targets; nothing left after normalisation matches nothing."""
    given = normalise(answer)
    return bool(given) and given in {normalise(target) for target in targets}


def f1(answer: str, targets: Sequence[str]) -> float:
    """The best overlap in words with a target: 2 * shared / (words here + words there)."""
    return max((_f1(normalise(answer).split(), normalise(target).split()) for target in targets), default=0.0)


def _f1(given: list[str], target: list[str]) -> float:
    shared = (Counter(given) & Counter(target)).total()
    return 2 * shared / (len(given) + len(target)) if shared else 0.0
