"""Which learner takes which datums of a batch.

Datums are put into the order of a walk through their prefix tree, and that order is cut into one piece per learner. A
cut costs the tokens that both sides then compute, so datums that share a long beginning stay together, and a beginning
that all share (a system prompt) does not keep the whole batch on one learner.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from turnwise.engine.training.pack import MIN_SHARED, is_worth_sharing, num_shared, sort_key

Ids = NDArray[np.int64]


def share_datums(
    sequences: Sequence[Ids],
    num_learners: int,
    units: Sequence[int] | None = None,
    *,
    min_shared: int = MIN_SHARED,
) -> list[list[int]]:
    """The indices of each learner's datums, in their own order; a learner may get none.

    Args:
        sequences: the input ids of each datum.
        units: the unit of each datum; datums of one unit, such as a pair, stay together. Default: each on its own.
        min_shared: a pass computes fewer common tokens than these once for each datum.
    """
    members: dict[int, list[int]] = {}
    for index, unit in enumerate(units if units is not None else range(len(sequences))):
        members.setdefault(unit, []).append(index)
    walk = sorted(members.values(), key=lambda own: sort_key(sequences[own[0]]))

    def saved(first: int, second: int) -> int:
        """Tokens of the second datum that a pass over both does not compute."""
        common = num_shared(sequences[first], sequences[second])
        return common if is_worth_sharing(sequences[first], sequences[second], common, min_shared) else 0

    costs = [
        sum(len(sequences[i]) for i in own) - sum(itertools.starmap(saved, itertools.pairwise(own))) for own in walk
    ]
    shared = [0, *(saved(a[-1], b[0]) for a, b in itertools.pairwise(walk))]
    low, high = max(costs, default=0), sum(costs)
    while low < high:  # the least load with which such a cut exists
        middle = (low + high) // 2
        if len(_cut(costs, shared, middle)) <= num_learners:
            high = middle
        else:
            low = middle + 1
    pieces = _cut(costs, shared, low)
    shares = [sorted(index for unit in piece for index in walk[unit]) for piece in pieces]
    return [*shares, *([] for _ in range(num_learners - len(shares)))]


def _cut(costs: Sequence[int], shared: Sequence[int], most: int) -> list[list[int]]:
    """Fill one piece after the other up to a limit of tokens. Neighbours share their beginnings."""
    pieces: list[list[int]] = []
    load = 0
    for unit, cost in enumerate(costs):
        own = max(0, cost - shared[unit])
        if pieces and load + own <= most:
            pieces[-1].append(unit)
            load += own
        else:
            pieces.append([unit])
            load = cost
    return pieces
