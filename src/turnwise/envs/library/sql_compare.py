"""Compares two query results.

rows       as a multiset: duplicates count, and their order only where the question asks for it
order      asked for exactly when the gold query has ORDER BY at its outermost level
columns    as many as the gold's, in its order; their names do not matter
numbers    3 and 3.0 are equal, and so are floats within a millionth of their size; '3' is text and no number
NULL       equals NULL
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence

from turnwise.envs.library.sql_runner import Value

Row = Sequence[Value]

RELATIVE_TOLERANCE = 1e-6
ABSOLUTE_TOLERANCE = 1e-9

_TOKEN = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/|[A-Za-z_]\w*|[()]""", re.DOTALL
)


def asks_for_order(gold_sql: str) -> bool:
    """ORDER BY outside of all brackets, strings and comments.

    >>> asks_for_order("SELECT a FROM t ORDER BY a"), asks_for_order("SELECT * FROM (SELECT a FROM t ORDER BY a)")
    (True, False)
    """
    depth = 0
    last = ""
    for token in _TOKEN.findall(gold_sql):
        word = token.upper()
        depth += (word == "(") - (word == ")")
        if depth == 0 and last == "ORDER" and word == "BY":
            return True
        last = word if not word.startswith(("--", "/*")) else last
    return False


def same_result(gold: Sequence[Row], given: Sequence[Row], *, ordered: bool) -> bool:
    """Whether `given` answers what `gold` answers."""
    if len(gold) != len(given):
        return False
    if ordered:
        return all(_same_row(one, other) for one, other in zip(gold, given, strict=True))
    golds, givens = _by_text(gold), _by_text(given)
    return golds.keys() == givens.keys() and all(_same_bag(golds[key], givens[key]) for key in golds)


def _by_text(rows: Sequence[Row]) -> dict[tuple[object, ...], list[tuple[float, ...]]]:
    """Group rows by the values that are compared exactly, and keep their numbers separate."""
    bags: defaultdict[tuple[object, ...], list[tuple[float, ...]]] = defaultdict(list)
    for row in rows:
        key = tuple("#" if _is_number(value) else (type(value).__name__, value) for value in row)
        bags[key].append(tuple(value for value in row if isinstance(value, int | float)))
    return bags


def _same_bag(golds: list[tuple[float, ...]], givens: list[tuple[float, ...]]) -> bool:
    """Whether both hold the same rows of numbers. Sorting pairs them up, except rows that rounding moved elsewhere."""
    if len(golds) != len(givens):
        return False
    golds, givens = sorted(golds), sorted(givens)
    left_golds: list[tuple[float, ...]] = []
    left_givens: list[tuple[float, ...]] = []
    for one, other in zip(golds, givens, strict=True):
        if not _same_row(one, other):
            left_golds.append(one)
            left_givens.append(other)
    for one in left_golds:
        twin = next((index for index, other in enumerate(left_givens) if _same_row(one, other)), None)
        if twin is None:
            return False
        del left_givens[twin]
    return True


def _same_row(one: Row, other: Row) -> bool:
    return len(one) == len(other) and all(_same_value(a, b) for a, b in zip(one, other, strict=True))


def _same_value(one: Value, other: Value) -> bool:
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    return type(one) is type(other) and one == other


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float)
