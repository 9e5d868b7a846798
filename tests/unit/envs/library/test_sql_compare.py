from __future__ import annotations

import pytest

from turnwise.envs.library.sql_compare import Row, asks_for_order, same_result


@pytest.mark.parametrize(
    ("gold", "given", "is_same"),
    [
        ([(1,), (2,)], [(2,), (1,)], True),
        ([(1,), (1,), (2,)], [(1,), (2,), (2,)], False),  # duplicates count
        ([(1,), (1,)], [(1,)], False),
        ([], [], True),
        ([("a", 1)], [(1, "a")], False),  # columns keep the gold's order
        ([("a", 1)], [("a",)], False),
        ([(3,)], [(3.0,)], True),
        ([(3,)], [("3",)], False),
        ([(0.1 + 0.2,)], [(0.3,)], True),
        ([(1.0,)], [(1.00001,)], False),
        ([(1e9,)], [(1e9 + 1,)], True),  # a millionth of its size
        ([(10**9,)], [(10**9 + 1,)], False),  # whole numbers are exact
        ([(None,)], [(None,)], True),
        ([(None,)], [(0,)], False),
        ([(None,)], [("",)], False),
        ([(b"a",)], [("a",)], False),
        ([("a",)], [("A",)], False),
        ([(float("inf"),)], [(float("inf"),)], True),
    ],
)
def test_rows_are_compared_as_a_multiset(gold: list[Row], given: list[Row], is_same: bool) -> None:
    assert same_result(gold, given, ordered=False) is is_same


def test_order_counts_where_it_was_asked_for() -> None:
    assert not same_result([(1,), (2,)], [(2,), (1,)], ordered=True)
    assert same_result([(1,), (2.0,)], [(1.0,), (2,)], ordered=True)


def test_rounding_that_swaps_rows_does_not_make_them_different() -> None:
    gold: list[Row] = [("x", 1.0, 5), ("x", 1.0 + 1e-12, 3)]
    given: list[Row] = [("x", 1.0 + 2e-12, 5), ("x", 1.0, 3)]
    assert same_result(gold, given, ordered=False)
    assert not same_result(gold, [("x", 1.0, 5), ("x", 1.0, 5)], ordered=False)


@pytest.mark.parametrize(
    ("sql", "is_ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("select a from t order   by a desc limit 3", True),
        ("SELECT a FROM t", False),
        ("SELECT * FROM (SELECT a FROM t ORDER BY a LIMIT 3)", False),
        ("SELECT a FROM t WHERE b = 'ORDER BY'", False),
        ('SELECT "order" FROM t', False),
        ("SELECT a FROM t -- ORDER BY a", False),
        ("SELECT a FROM t /* ORDER BY a */", False),
        ("SELECT rank() OVER (ORDER BY a) FROM t", False),
        ("SELECT rank() OVER (ORDER BY a) FROM t ORDER /* why */ BY 1", True),
        ("SELECT a FROM t UNION SELECT b FROM t ORDER BY 1", True),
    ],
)
def test_order_is_asked_for_by_the_outermost_order_by(sql: str, is_ordered: bool) -> None:
    assert asks_for_order(sql) is is_ordered
