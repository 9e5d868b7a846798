"""When a critic's pre-training has nothing more to gain."""

from __future__ import annotations

import math
from typing import TypedDict

MIN_RISE = 0.01
"""Of the explained variance: what counts as better."""
MIN_FALL = 0.02
"""Of the loss, as a share of it: likewise. A critic that still learns the mean has no variance to show for it."""


class PlateauState(TypedDict):
    """What a `Plateau` knows, ready for JSON; None where nothing was measured yet."""

    best_variance: float | None
    best_loss: float | None
    num_since: int


class Plateau:
    """Knows when neither the explained variance rises nor the loss falls any more."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._best_variance, self._best_loss = -math.inf, math.inf
        self._num_since = 0

    def is_reached(self, explained_variance: float, loss: float) -> bool:
        """Tell the numbers of the next batch; a variance that could not be measured (nan) is not better."""
        is_rising = explained_variance >= self._best_variance + MIN_RISE
        is_falling = loss < self._best_loss * (1 - MIN_FALL)
        if is_rising:
            self._best_variance = explained_variance
        if is_falling:
            self._best_loss = loss
        self._num_since = 0 if is_rising or is_falling else self._num_since + 1
        return self._num_since >= self._patience

    def to_state(self) -> PlateauState:
        best = (value if math.isfinite(value) else None for value in (self._best_variance, self._best_loss))
        return PlateauState(best_variance=next(best), best_loss=next(best), num_since=self._num_since)

    def restore(self, state: PlateauState) -> None:
        variance, loss = state["best_variance"], state["best_loss"]
        self._best_variance = -math.inf if variance is None else variance
        self._best_loss = math.inf if loss is None else loss
        self._num_since = state["num_since"]
