"""Items dealt in shuffled passes: each comes once before any comes again.

A batch depends on its number and the seed alone, so a resumed run goes on with the very tasks that were next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from turnwise.errors import ConfigError
from turnwise.rollout.seeds import derive_seed

T = TypeVar("T")


class Deck(Generic[T]):
    def __init__(self, items: Sequence[T], batch_size: int, seed: int) -> None:
        if not items:
            raise ConfigError("there is nothing to draw from")
        self._items = list(items)
        self._batch_size = batch_size
        self._seed = seed

    def __len__(self) -> int:
        return len(self._items)

    def batch(self, index: int) -> list[T]:
        """The batch of that number, from 0; a batch may reach over the end of a pass."""
        first = index * self._batch_size
        return [self._item(position) for position in range(first, first + self._batch_size)]

    def _item(self, position: int) -> T:
        number, offset = divmod(position, len(self._items))
        order = np.random.default_rng(derive_seed(self._seed, "pass", number)).permutation(len(self._items))
        return self._items[int(order[offset])]
