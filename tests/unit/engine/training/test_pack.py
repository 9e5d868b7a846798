"""The prefix tree: every datum finds its own tokens in it, in order, and sees no others."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.engine.budget import PassLimit
from turnwise.engine.training.pack import (
    NO_SHARING,
    cut_passes,
    is_worth_sharing,
    num_shared,
    pack,
    sort_key,
    split_batches,
)

sequences_of_few_tokens = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=9)


def visible(plan, num_tokens: int) -> np.ndarray:
    """[N, N] which token attends to which, as the plan's slices say."""
    seen = np.zeros((num_tokens, num_tokens), dtype=int)
    for q, k, is_causal in plan.slices():
        block = np.ones((q.stop - q.start, k.stop - k.start), dtype=int)
        seen[q, k] += np.tril(block) if is_causal else block
    return seen


@settings(max_examples=200, deadline=None)
@given(sequences_of_few_tokens, st.integers(1, 4))
def test_each_token_attends_to_its_own_prefix_once_and_to_nothing_else(rows: list[list[int]], min_shared: int) -> None:
    sequences = [np.asarray(row) for row in rows]
    batch = pack(sequences, range(len(sequences)), min_shared=min_shared)
    seen = visible(batch.plan, batch.num_tokens)
    assert sorted(batch.members) == list(range(len(sequences)))
    for member, index in zip(batch.members, batch.packed_index, strict=True):
        assert batch.input_ids[index].tolist() == rows[member]
        assert batch.position_ids[index].tolist() == list(range(len(rows[member])))
        for position, token in enumerate(index):
            assert np.nonzero(seen[token])[0].tolist() == sorted(index[: position + 1])
            assert seen[token].max() == 1


@settings(max_examples=100, deadline=None)
@given(sequences_of_few_tokens)
def test_with_full_sharing_the_tree_holds_each_distinct_prefix_once(rows: list[list[int]]) -> None:
    batch = pack([np.asarray(row) for row in rows], range(len(rows)), min_shared=1)
    assert batch.num_tokens == len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})


@settings(max_examples=100, deadline=None)
@given(sequences_of_few_tokens, st.integers(1, 30))
def test_passes_hold_every_datum_exactly_once(rows: list[list[int]], max_tokens: int) -> None:
    batches = list(split_batches([np.asarray(row) for row in rows], PassLimit.of(max_tokens), min_shared=2))
    assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))


def test_unrelated_datums_are_cut_at_the_token_budget_and_a_group_stays_together() -> None:
    loners = [np.full(100, i) for i in range(6)]
    assert [len(b) for b in split_batches(loners, PassLimit.of(200))] == [2, 2, 2]
    group = [np.concatenate([np.zeros(100, dtype=int), np.full(50, i + 1)]) for i in range(6)]
    assert [len(b) for b in split_batches(group, PassLimit.of(200))] == [6]


@settings(max_examples=200, deadline=None)
@given(sequences_of_few_tokens, st.integers(2, 30))
def test_evening_out_makes_no_pass_larger_and_adds_none(rows: list[list[int]], max_tokens: int) -> None:
    sequences, limit = [np.asarray(row) for row in rows], PassLimit(alone=max_tokens, sharing=3 * max_tokens)
    order = sorted(range(len(rows)), key=lambda i: sort_key(sequences[i]))
    ordered = [sequences[i] for i in order]
    common = [0, *(num_shared(a, b) for a, b in itertools.pairwise(ordered))]
    shared = [n if i and is_worth_sharing(ordered[i - 1], ordered[i], n, 2) else 0 for i, n in enumerate(common)]
    cuts, largest = cut_passes([len(row) for row in ordered], shared, limit)
    batches = list(split_batches(sequences, limit, min_shared=2))
    assert len(batches) <= len(cuts)
    assert [i for batch in batches for i in batch] == order
    starts = itertools.accumulate((len(batch) for batch in batches[:-1]), initial=0)
    sizes = [
        sum(len(ordered[i]) - (shared[i] if i > start else 0) for i in range(start, start + len(batch)))
        for start, batch in zip(starts, batches, strict=True)
    ]
    assert max(sizes) <= largest


def test_passes_are_as_few_as_the_budget_allows_and_as_even_as_the_datums_are() -> None:
    loners = [np.full(100, i) for i in range(7)]
    assert [len(b) for b in split_batches(loners, PassLimit.of(600))] == [4, 3]  # not six, and one alone
    groups = [np.concatenate([np.full(100, g), np.full(50, 90 + i)]) for g in range(9) for i in range(4)]
    sizes = [pack(groups, batch).num_tokens for batch in split_batches(groups, PassLimit.of(1200))]
    assert sizes == [900, 900, 900]  # not five groups and four


def test_a_datum_that_is_the_start_of_another_adds_no_token_however_short() -> None:
    sequences = [np.asarray([1, 2, 3]), np.asarray([1, 2, 3]), np.asarray([1, 2, 3, 4]), np.asarray([1, 2, 9])]
    assert pack(sequences, range(4)).num_tokens == 4 + 3
    assert pack(sequences, range(4), min_shared=NO_SHARING).num_tokens == 3 + 3 + 4 + 3


def test_sequences_beyond_the_switch_run_twice_and_each_position_is_read_where_its_angles_are() -> None:
    beginning = list(range(20))
    rows = [[*beginning, *range(50, 50 + count)] for count in (2, 9, 30)] + [[7, 8, 9]]
    sequences = [np.asarray(row) for row in rows]
    batch = pack(sequences, range(4), min_shared=4, switch=25)
    assert batch.num_tokens == (22 + 3 + 3) + (22 + 7 + 21)
    for member, index in zip(batch.members, batch.packed_index, strict=True):
        assert batch.input_ids[index].tolist() == rows[member]
        positions = np.arange(len(rows[member]))
        assert batch.position_ids[index].tolist() == (positions + 25 * (positions >= 25)).tolist()


def test_passes_count_what_runs_twice() -> None:
    loners = [np.full(40, i) for i in range(6)]
    assert [len(b) for b in split_batches(loners, PassLimit.of(120))] == [3, 3]
    assert [len(b) for b in split_batches(loners, PassLimit.of(120), switch=20)] == [2, 2, 2]
    assert [len(b) for b in split_batches(loners, PassLimit.of(120), switch=40)] == [3, 3]
    group = [np.append(np.arange(30), [i] * 2) for i in range(4)]
    sizes = [pack(group, batch, switch=20).num_tokens for batch in split_batches(group, PassLimit.of(62), switch=20)]
    assert sizes == [20 + 30 + 4 * 2]
