"""One test for one claim that holds in many cases: a loop where `parametrize` would make a test of each.

A cartesian product of small cases costs more in set-up, collection and reports than in work.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

from turnwise.envs.registry import world_names


def for_each(
    names: str | tuple[str, ...], values: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test once for each value, as `parametrize` would, within one test; a failure is noted with its case.

    Several of these give every combination. Every case starts with the same random numbers.
    """
    keys = (names,) if isinstance(names, str) else names
    cases = [(value,) if isinstance(names, str) else tuple(value) for value in values]
    if not cases or any(len(case) != len(keys) for case in cases):
        raise ValueError(f"{len(cases)} cases for {keys}; expected at least one, each with {len(keys)} values")

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        if inspect.iscoroutinefunction(test):
            raise TypeError(f"{test.__name__} is a coroutine; for_each runs plain functions")
        signature = inspect.signature(test)
        rest = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        if len(rest) + len(keys) != len(signature.parameters):
            raise TypeError(f"{test.__name__} takes {list(signature.parameters)}; expected {keys} among them")

        @functools.wraps(test)
        def run(**given: Any) -> None:
            for case in cases:
                if "torch" in sys.modules:
                    sys.modules["torch"].manual_seed(0)
                named = dict(zip(keys, case, strict=True))
                try:
                    test(**given, **named)
                except BaseException as error:  # `pytest.fail` among them
                    error.add_note("case: " + ", ".join(f"{key}={value!r}" for key, value in named.items()))
                    raise

        run.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]  # what pytest is to fill in
        return run

    return decorate


WORLDS_WITH_PACKAGES = {"browser"}
"""Shipped worlds that need a large package; they are tested where it is, in an environment of its own."""


def plain_world_names() -> list[str]:
    """The shipped worlds that need nothing but turnwise."""
    return [name for name in world_names() if name not in WORLDS_WITH_PACKAGES]
