"""Gives items out in shuffled passes: each comes once before any comes again.

A batch depends on its number and the seed alone, so a resumed run goes on with the very tasks that were next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from turnwise.errors import ConfigError
from turnwise.rollout.seeds import derive_seed

T = TypeVar("T")


class ShuffledItems(Generic[T]):
    """An endless sequence of batches of the items."""

    def __init__(self, items: Sequence[T], batch_size: int, seed: int) -> None:
        if not items:
            raise ConfigError("there is nothing to draw from")
        self._items = list(items)
        self._batch_size = batch_size
        self._seed = seed
        self._orders: dict[int, NDArray[np.int64]] = {}
        """The order of the pass that was asked for last, by its number."""

    def __len__(self) -> int:
        return len(self._items)

    def batch(self, index: int) -> list[T]:
        """The batch with that number, from 0. A batch may reach over the end of a pass."""
        first = index * self._batch_size
        return [self.item(position) for position in range(first, first + self._batch_size)]

    def item(self, position: int) -> T:
        """The item at that position, from 0, over all batches."""
        number, offset = divmod(position, len(self._items))
        if number not in self._orders:
            rng = np.random.default_rng(derive_seed(self._seed, "pass", number))
            self._orders = {number: rng.permutation(len(self._items))}
        return self._items[int(self._orders[number][offset])]
