"""Whether a number rose or fell, by more than chance explains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance

STRETCH_STEPS = 5
"""Length in steps of the stretches that are compared."""
CERTAIN_ERRORS = 3.0
"""A mean has moved if it differs by this many standard errors of the difference."""


def has_fallen(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether the mean of `after` is lower than that of `before`, by more than chance explains."""
    return fmean(before) - fmean(after) > CERTAIN_ERRORS * standard_error(before, after)


def has_risen(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether the mean of `after` is higher than that of `before`, by more than chance explains."""
    return has_fallen(after, before)


def standard_error(before: Sequence[float], after: Sequence[float]) -> float:
    """Standard error of the difference of two means; each stretch needs two values."""
    return math.sqrt(variance(before) / len(before) + variance(after) / len(after))


def best_stretch(values: Sequence[float], length: int = STRETCH_STEPS) -> tuple[int, Sequence[float]]:
    """The consecutive values with the highest mean, and the index of the first of them."""
    starts = range(max(1, len(values) - length + 1))
    first = max(starts, key=lambda start: fmean(values[start : start + length]))
    return first, values[first : first + length]
