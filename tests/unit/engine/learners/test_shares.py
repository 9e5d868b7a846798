"""A batch is shared out by tokens, and datums that share a long beginning go to one learner."""

from __future__ import annotations

import numpy as np

from turnwise.engine.learners.shares import share_datums
from turnwise.engine.training.pack import MIN_SHARED, NO_SHARING


def ids(*parts: tuple[int, int]) -> np.ndarray:
    """Random ids: (how many, seed) of each part."""
    return np.concatenate([np.random.default_rng(seed).integers(3, 1000, count) for count, seed in parts])


def num_computed(sequences: list[np.ndarray], members: list[int]) -> int:
    """Tokens of the prefix tree over some datums."""
    return len({tuple(sequences[i][: n + 1].tolist()) for i in members for n in range(len(sequences[i]))})


def test_every_datum_goes_to_one_learner_and_loads_are_even() -> None:
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(20, 60, 33)
        sequences = [ids((int(length), 100 * seed + i)) for i, length in enumerate(lengths)]
        for learners in (1, 2, 5):
            shares = share_datums(sequences, learners)
            assert sorted(i for share in shares for i in share) == list(range(33))
            assert all(share == sorted(share) for share in shares)
            loads = [num_computed(sequences, share) for share in shares]
            assert max(loads) <= lengths.sum() / learners + lengths.max()


def test_attempts_at_a_task_stay_together_though_all_share_the_system_prompt() -> None:
    system = (30, 1)
    sequences = [ids(system, (80, 10 + task), (15, 100 * task + i)) for i in range(4) for task in range(4)]
    shares = share_datums(sequences, 2)
    tasks = [{i % 4 for i in share} for share in shares]
    assert [len(own) for own in tasks] == [2, 2]
    assert not tasks[0] & tasks[1]
    loads = [num_computed(sequences, share) for share in shares]
    assert sum(loads) == num_computed(sequences, list(range(16))) + 30, "only the system prompt is computed twice"


def test_units_are_never_cut_and_a_learner_may_get_nothing() -> None:
    sequences = [ids((20, i)) for i in range(6)]
    shares = share_datums(sequences, 4, units=[0, 0, 1, 1, 2, 2])
    assert sorted(tuple(share) for share in shares) == [(), (0, 1), (2, 3), (4, 5)]


def test_a_beginning_that_passes_do_not_share_is_counted_for_every_datum() -> None:
    loners = [ids((70, 50 + i)) for i in range(4)]
    for start, min_shared in ((200, NO_SHARING), (MIN_SHARED - 1, MIN_SHARED)):
        sequences = [*(ids((start, 1), (10, 10 + i)) for i in range(8)), *loners]
        shares = share_datums(sequences, 2, min_shared=min_shared)
        loads = [sum(len(sequences[i]) for i in share) for share in shares]
        assert max(loads) - min(loads) <= max(map(len, sequences))
    together = share_datums([*(ids((200, 1), (10, 10 + i)) for i in range(8)), *loners], 2)
    assert any(set(range(8)) <= set(share) for share in together), "a long beginning that they share is counted once"
