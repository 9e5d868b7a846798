"""Who holds which KV blocks: the tables of all rows, in every group of layers at once.

A row holds all its blocks in a group that sees everything, and those of its last window in the others. Blocks for a
whole prompt are taken when the row is admitted, or as many as a window and one piece of the prompt need: a row that has
begun to read never waits for blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from turnwise.engine.sampling.kvcache import BlockPool
from turnwise.engine.sampling.requests import BlockTable, Row
from turnwise.engine.sampling.windows import WindowPool

CopyBlock = Callable[[int, int, int], None]
"""(group, source, target)"""


class KvTables:
    """The tables of a sampler's rows over the pools of its groups."""

    def __init__(self, pools: Sequence[BlockPool], copy_block: CopyBlock, prefill_tokens: int) -> None:
        self.pools = pools
        self.block_size = pools[0].block_size
        self._copy_block = copy_block
        rooms = [(pool.num_blocks - pool.most_held(0)) * self.block_size for pool in _windowed(pools)]
        self.chunk = max(self.block_size, min([prefill_tokens, *rooms]))
        """Tokens of a prompt that a row reads at once, at most."""

    @property
    def most_tokens(self) -> int | None:
        """Tokens of the longest sequence that fits the empty pools; None if windows make room for any."""
        limits = [
            pool.num_blocks * self.block_size
            for pool in self.pools
            if not isinstance(pool, WindowPool) or pool.most_held(self.chunk) > pool.num_blocks
        ]
        return min(limits, default=None)

    @property
    def num_available(self) -> int:
        """Blocks that can be taken in every group."""
        return min(pool.num_available for pool in self.pools)

    def find(self, row: Row, *, is_cached: bool) -> list[BlockTable]:
        """Share the blocks of the longest beginning that every group can go on from."""
        version, tokens = row.root, row.tokens
        if not is_cached:
            return [BlockTable(prefix=pool.root(version)) for pool in self.pools]
        limit = len(tokens) - 1
        found = [None if isinstance(p, WindowPool) else p.match(version, tokens, limit) for p in self.pools]
        count = min([limit // self.block_size, *(len(match[0]) for match in found if match is not None)])
        names = self._names(row, count)
        settled = -1
        while settled != count:  # a shorter beginning for one group may be in the middle of another's gap
            settled = count
            for pool, known in names:
                count = pool.find(known, count)
        tables: list[BlockTable] = []
        windowed = iter(names)
        for pool, match in zip(self.pools, found, strict=True):
            if match is None:
                own, known = next(windowed)
                tables.append(own.take(known, count))
                continue
            blocks, _ = match
            pool.release(blocks[count:])
            tables.append(BlockTable(array("i", blocks[:count]), prefix=pool.prefix_at(version, blocks[:count])))
        return tables

    def _names(self, row: Row, num_blocks: int) -> list[tuple[WindowPool, list[int]]]:
        """The names that each windowed pool has for the row's prefixes; a row that asks again finds them ready."""
        return [
            (pool, pool.names(row.root, row.tokens, num_blocks, row.names.setdefault(index, [])))
            for index, pool in enumerate(_windowed(self.pools))
        ]

    def give_back(self, tables: Sequence[BlockTable]) -> None:
        for pool, table in zip(self.pools, tables, strict=True):
            pool.release(table.blocks[table.first :])
            pool.release(table.spare)

    def reserve(self, row: Row, tables: Sequence[BlockTable], headroom: int) -> bool:
        """Take what the row needs to read its tokens and sample one; False, and nothing changes, if there is no room.

        `headroom` blocks stay free for others.
        """
        total = self._num_blocks(len(row.tokens) + 1)
        missing = [
            min(total - len(table.blocks), pool.most_held(self.chunk) - len(table.blocks) + table.first)
            if isinstance(pool, WindowPool)
            else total - len(table.blocks)
            for pool, table in zip(self.pools, tables, strict=True)
        ]
        if any(p.num_available < count + headroom for p, count in zip(self.pools, missing, strict=True)):
            return False
        for pool, table, count in zip(self.pools, tables, missing, strict=True):
            blocks = pool.allocate_many(count)
            if isinstance(pool, WindowPool):
                table.spare = blocks
            else:
                table.blocks.extend(blocks)
        row.tables = list(tables)
        return True

    def fill(self, row: Row, stop: int) -> None:
        """Make room for a piece of the row's prompt that ends at `stop`, from what the row has reserved."""
        total = self._num_blocks(len(row.tokens) + 1)
        for pool, table in zip(self.pools, row.tables, strict=True):
            if isinstance(pool, WindowPool):
                freed = slide(row, table, pool)
                still_needed = total - len(table.blocks) - len(table.spare)
                table.spare += pool.allocate_many(max(0, min(freed, still_needed)))
                count = min(self._num_blocks(stop + 1), total) - len(table.blocks)
                table.blocks.extend(table.spare[:count])
                del table.spare[:count]

    def end_reading(self, row: Row) -> None:
        for pool, table in zip(self.pools, row.tables, strict=True):
            pool.release(table.spare)
            table.spare = []

    def grow(self, row: Row) -> bool:
        """One more block in every group; False if there is none."""
        for pool, table in zip(self.pools, row.tables, strict=True):
            if isinstance(pool, WindowPool):
                slide(row, table, pool)
        if not self.num_available:
            return False
        for pool, table in zip(self.pools, row.tables, strict=True):
            table.blocks.extend(pool.allocate_many(1))
        return True

    def fork(self, parent: Row, child: Row) -> bool:
        """Let a sibling share the parent's full blocks; False if there is no room for its copy of the last one."""
        num_full, tail = divmod(parent.num_computed, self.block_size)
        if tail and not self.num_available:
            return False
        tables: list[BlockTable] = []
        for group, (pool, table) in enumerate(zip(self.pools, parent.tables, strict=True)):
            blocks = table.blocks[:num_full]
            pool.share(blocks[table.first :])
            if tail:
                (own,) = pool.allocate_many(1)
                self._copy_block(group, table.blocks[num_full], own)
                blocks.append(own)
            tables.append(BlockTable(blocks, table.first, prefix=table.prefix))
        child.tables = tables
        return True

    def register(self, row: Row) -> None:
        """Make the row's full blocks findable."""
        num_known = min(len(row.tokens), row.num_computed)
        if num_known // self.block_size > row.prefix.num_blocks:
            tokens = row.tokens[:num_known]
            for pool, table in zip(self.pools, row.tables, strict=True):
                table.prefix = pool.register(tokens, table.blocks, table.prefix)

    def free(self, row: Row) -> None:
        self.give_back(row.tables)
        row.tables = [BlockTable(prefix=pool.root(row.root)) for pool in self.pools]

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _windowed(pools: Sequence[BlockPool]) -> list[WindowPool]:
    return [pool for pool in pools if isinstance(pool, WindowPool)]


def slide(row: Row, table: BlockTable, pool: WindowPool) -> int:
    """Give back the blocks that the row's next tokens do not see; returns how many."""
    first = min(pool.first_kept(row.num_computed), len(table.blocks))
    count = max(0, first - table.first)
    if count:
        pool.release(table.blocks[table.first : first], is_spent=True)
        for index in range(table.first, first):
            table.blocks[index] = 0
        table.first = first
    return count
