"""Blocks: who shares them, who is evicted, and that a prefix is found under its own weights alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwise.engine.sampling.kvcache import BlockPool, Prefix


def fill(pool: BlockPool, tokens: list[int], version: int = 1) -> list[int]:
    """A sequence that computed `tokens` and is done with them."""
    blocks = [b for b in (pool.allocate() for _ in range(-(-len(tokens) // pool.block_size))) if b is not None]
    pool.register(tokens, blocks, Prefix.root(version))
    pool.release(blocks)
    return blocks


def test_a_second_turn_finds_the_full_blocks_of_the_first() -> None:
    pool = BlockPool(num_blocks=10, block_size=4)
    first = fill(pool, list(range(10)))
    blocks, prefix = pool.match(1, list(range(20)), limit=19)
    assert blocks == first[:2]
    assert prefix.num_blocks == 2


def test_a_match_leaves_at_least_the_last_token_to_compute() -> None:
    pool = BlockPool(num_blocks=10, block_size=4)
    fill(pool, list(range(8)))
    blocks, _ = pool.match(1, list(range(8)), limit=7)
    assert len(blocks) == 1


def test_another_version_finds_nothing() -> None:
    pool = BlockPool(num_blocks=10, block_size=4)
    fill(pool, list(range(8)), version=1)
    assert pool.match(2, list(range(8)), limit=8)[0] == []


def test_the_same_tokens_after_another_start_are_another_block() -> None:
    pool = BlockPool(num_blocks=10, block_size=2)
    fill(pool, [1, 2, 3, 4])
    assert pool.match(1, [9, 9, 3, 4], limit=4)[0] == []


def test_children_are_evicted_before_their_parents() -> None:
    pool = BlockPool(num_blocks=3, block_size=2)
    blocks = fill(pool, [1, 2, 3, 4, 5, 6])
    assert pool.allocate() == blocks[2]
    assert pool.match(1, [1, 2, 3, 4, 5, 6], limit=6)[0] == blocks[:2]


def test_a_block_in_use_is_never_handed_out() -> None:
    pool = BlockPool(num_blocks=2, block_size=2)
    fill(pool, [1, 2])
    (shared,), _ = pool.match(1, [1, 2, 3], limit=2)
    assert pool.allocate() != shared
    assert pool.allocate() is None


def test_twins_share_one_findable_prefix_and_each_others_children() -> None:
    pool = BlockPool(num_blocks=8, block_size=2)
    a, b = [[pool.allocate() or 0 for _ in range(2)] for _ in range(2)]
    known = [pool.register([1, 2], side[:1], Prefix.root(1)) for side in (a, b)]
    pool.register([1, 2, 7, 7], a, known[0])
    pool.register([1, 2, 8, 8], b, known[1])
    assert pool.match(1, [1, 2, 7, 7], limit=4)[0] == a
    assert pool.match(1, [1, 2, 8, 8], limit=4)[0] == [a[0], b[1]]


def test_clear_forgets_prefixes_and_keeps_blocks_in_use() -> None:
    pool = BlockPool(num_blocks=4, block_size=2)
    fill(pool, [1, 2, 3, 4])
    held = pool.allocate()
    pool.clear()
    assert pool.match(1, [1, 2], limit=2)[0] == []
    assert pool.num_available == 3
    assert held not in [pool.allocate() for _ in range(3)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=30))
def test_a_match_always_holds_exactly_the_tokens_asked_for(sequences: list[list[int]]) -> None:
    pool = BlockPool(num_blocks=5, block_size=2)
    content: dict[int, tuple[int, ...]] = {}
    for tokens in sequences:
        blocks, prefix = pool.match(1, tokens, limit=len(tokens) - 1)
        for index, block in enumerate(blocks):
            assert content[block] == tuple(tokens[: 2 * (index + 1)])
        while len(blocks) * 2 < len(tokens):
            block = pool.allocate()
            if block is None:
                break
            blocks.append(block)
        full = min(len(blocks), len(tokens) // 2)
        for index in range(prefix.num_blocks, full):
            content[blocks[index]] = tuple(tokens[: 2 * (index + 1)])
        pool.register(tokens[: 2 * full], blocks, prefix)
        pool.release(blocks)
        assert pool.num_available == 5


class Books:
    """A pool, the sequences that use it, and what each block truly holds: its version and all tokens up to its end."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, block_size=2)
        self.content: dict[int, tuple[int, ...]] = {}
        self.open: list[list[int]] = []

    def start(self, version: int, tokens: list[int]) -> None:
        """Match, check what was found, compute the rest and register it."""
        blocks, prefix = self.pool.match(version, tokens, limit=len(tokens) - 1)
        for index, block in enumerate(blocks):
            assert self.content[block] == (version, *tokens[: 2 * (index + 1)])
        missing = -(-len(tokens) // 2) - len(blocks)
        if missing > self.pool.num_available:
            self.pool.release(blocks)
            return
        first = len(blocks)
        blocks += self.pool.allocate_many(missing)
        for index in range(first, len(blocks)):
            self.content[blocks[index]] = (version, *tokens[: 2 * (index + 1)])
        middle = len(tokens) // 2
        prefix = self.pool.register(tokens[:middle], blocks, prefix)
        self.pool.register(tokens, blocks, prefix)
        self.open.append(blocks)

    def check(self) -> None:
        users = [block for blocks in self.open for block in blocks]
        assert self.pool.num_available == self.pool.num_blocks - len(set(users))


_STEPS = st.one_of(
    st.tuples(st.integers(1, 2), st.lists(st.integers(0, 1), min_size=1, max_size=40)),
    st.integers(0, 5),
    st.just("clear"),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_STEPS, min_size=1, max_size=40))
def test_whatever_is_shared_evicted_and_cleared_a_match_holds_its_own_tokens_and_version(steps: list) -> None:
    books = Books(num_blocks=45)
    for step in steps:
        if isinstance(step, tuple):
            books.start(*step)
        elif isinstance(step, int) and books.open:
            books.pool.release(books.open.pop(step % len(books.open)))
        elif step == "clear":
            books.pool.clear()
        books.check()
    for blocks in books.open:
        books.pool.release(blocks)
    assert books.pool.num_available == 45


def test_release_more_often_than_taken_is_our_bug() -> None:
    pool = BlockPool(num_blocks=2, block_size=2)
    block = pool.allocate()
    assert block is not None
    pool.release([block])
    with pytest.raises(AssertionError):
        pool.release([block])
