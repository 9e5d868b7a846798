"""An order of tests by which none can rely on another: modules are shuffled, and the tests of each."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T")


def shuffled(items: Iterable[T], group_of: Callable[[T], Hashable], seed: int) -> list[T]:
    """Items of a group stay together, since a module's fixtures may be dear."""
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for item in items:
        groups[group_of(item)].append(item)
    numbers = random.Random(seed)
    order = list(groups.values())
    numbers.shuffle(order)
    for group in order:
        numbers.shuffle(group)
    return [item for group in order for item in group]
