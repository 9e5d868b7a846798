"""The KV blocks of layers that see a window: given back when no token sees them any more, and found again by content.

A sequence reads on with the blocks of its last window alone, so a prefix is found here if the blocks that its next
token sees are there; those before them may be gone. A block is therefore named by all tokens up to its end, whatever
became of the blocks before it. What is not there is computed again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from turnwise.engine.sampling.kvcache import TOKEN_BYTES, BlockPool, Prefix, block_key
from turnwise.engine.sampling.requests import BlockTable

BLOCKS_BEHIND = 2
"""Blocks that are kept before a window, so that a sequence can be continued from the last full block, or the one
before it."""


class WindowPool(BlockPool):
    """The blocks of a group of layers with a window."""

    def __init__(self, num_blocks: int, block_size: int, window: int) -> None:
        super().__init__(num_blocks, block_size)
        self.window = window
        self._times_cleared = 0

    def first_needed(self, num_tokens: int) -> int:
        """The first block that a token at position `num_tokens` sees."""
        return max(0, num_tokens - self.window + 1) // self.block_size

    def first_kept(self, num_tokens: int) -> int:
        """The first block that a sequence of `num_tokens` computed tokens still holds."""
        return self.first_needed(max(0, (num_tokens // self.block_size + 1 - BLOCKS_BEHIND) * self.block_size))

    def most_held(self, chunk: int) -> int:
        """Blocks that a sequence holds at most while it reads `chunk` tokens at a time."""
        return -(-(self.window + chunk) // self.block_size) + BLOCKS_BEHIND + 2

    def names(self, version: int, tokens: Sequence[int], num_blocks: int, known: list[int]) -> list[int]:
        """Names of the prefixes of 0, 1, .. `num_blocks` blocks; goes on from those in `known`, and adds to them."""
        if not known:
            known.append(self._root(version))
        data, size = block_key(tokens[: num_blocks * self.block_size]), self.block_size * TOKEN_BYTES
        for start in range((len(known) - 1) * size, num_blocks * size, size):
            known.append(_name(known[-1], data[start : start + size]))
        return known

    def find(self, names: Sequence[int], num_blocks: int) -> int:
        """The most blocks, up to `num_blocks`, after which a sequence can go on."""
        top, index = num_blocks, num_blocks
        while top and index > self.first_needed(top * self.block_size):
            index -= 1
            if names[index + 1] not in self._block_of:
                top = index
        return top

    def take(self, names: Sequence[int], num_blocks: int) -> BlockTable:
        """Share the blocks that `find` found."""
        first = self.first_needed(num_blocks * self.block_size)
        blocks = [self._block_of[names[index + 1]] for index in range(first, num_blocks)]
        self.share(blocks)
        return BlockTable(array("i", [0] * first + blocks), first, prefix=Prefix(num_blocks, names[num_blocks]))

    def register(self, tokens: Sequence[int], blocks: Sequence[int], known: Prefix) -> Prefix:
        """Does what `BlockPool` does, and leaves out blocks that were given back."""
        first, name = known
        num_full = len(tokens) // self.block_size
        data = block_key(tokens[first * self.block_size : num_full * self.block_size])
        size = self.block_size * TOKEN_BYTES
        for index in range(first, num_full):
            start = (index - first) * size
            name = _name(name, data[start : start + size])
            block = blocks[index]
            if name not in self._block_of and not self._node_of[block]:
                self._block_of[name] = block
                self._key_of[block] = name
                self._node_of[block] = 1
        return Prefix(max(num_full, first), name)

    def root(self, version: int) -> Prefix:
        return Prefix(0, self._root(version))

    def clear(self) -> None:
        """Forget every prefix, also those that running sequences are about to lengthen."""
        super().clear()
        self._times_cleared += 1

    def _root(self, version: int) -> int:
        return _name(self._times_cleared, str(version).encode())


def _name(parent: int, content: bytes) -> int:
    digest = hashlib.blake2b(content, digest_size=16, key=parent.to_bytes(16, "little")).digest()
    return int.from_bytes(digest, "little")
