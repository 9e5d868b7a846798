"""`for_each`: one test over many cases, and the one that failed is named."""

from __future__ import annotations

import inspect

import pytest
import torch

from cases import for_each


def test_every_combination_runs_once_and_starts_with_the_same_random_numbers() -> None:
    seen: list[tuple[int, str, int, float]] = []

    @for_each(("a", "b"), [(1, "x"), (2, "y")])
    @for_each("c", range(3))
    def check(a: int, b: str, c: int, fixture: int) -> None:
        assert fixture == 7
        seen.append((a, b, c, torch.rand(()).item()))

    assert list(inspect.signature(check).parameters) == ["fixture"]
    check(fixture=7)
    assert [case[:3] for case in seen] == [(a, b, c) for a, b in ((1, "x"), (2, "y")) for c in range(3)]
    assert len({case[3] for case in seen}) == 1


def test_the_case_that_fails_is_named() -> None:
    @for_each("a", [1, 2, 3])
    @for_each(("b", "c"), [("x", None)])
    def check(a: int, b: str, c: None) -> None:
        assert (b, c) == ("x", None)
        assert a != 2

    with pytest.raises(AssertionError) as failed:
        check()
    assert failed.value.__notes__ == ["case: b='x', c=None", "case: a=2"]


def test_cases_that_do_not_fit_the_test_are_refused() -> None:
    async def wait(a: int) -> None:
        raise NotImplementedError(a)

    def take(b: int) -> None:
        raise NotImplementedError(b)

    with pytest.raises(ValueError, match="0 cases"):
        for_each("a", [])
    with pytest.raises(ValueError, match="each with 2 values"):
        for_each(("a", "b"), [(1,)])
    with pytest.raises(TypeError, match="coroutine"):
        for_each("a", [1])(wait)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"takes \['b'\]"):
        for_each("a", [1])(take)
