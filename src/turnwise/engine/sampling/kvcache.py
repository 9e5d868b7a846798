"""Keys and values in blocks of fixed size, and which sequences may share them.

Layers that see the same (everything, or a window) are a group: they have blocks of their own, so that those before a
window can be given back while other layers keep theirs (`windows.py`).

A full block is known by its policy version and all token ids up to its end, so a conversation's next turn and the
samples of one prompt find each other's blocks, and no block outlives the weights it was computed with. Blocks that
nobody uses keep their content until they are needed: the least recently used goes first, children before parents.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from turnwise.models.layer_keys import LayerKeys


@dataclass(frozen=True, slots=True)
class KvShape:
    keys: tuple[LayerKeys, ...]
    """[layers] heads of each layer, and the layer whose keys and values it reads."""
    windows: tuple[int | None, ...] = (None,)
    """What each group of layers sees; None: everything."""
    group_of: tuple[int, ...] | None = None
    """[layers] the group of each layer; None: they are one group."""
    num_choices: tuple[int, int] = (0, 0)
    """Layers with routed experts, and experts of a token, where the cache keeps which were chosen."""


class KvCache:
    """The storage: per layer, keys and values [blocks, block size, KV heads, D].

    A layer that reads the keys and values of another one has no storage of its own, and writes nothing.
    """

    def __init__(
        self, shape: KvShape, num_blocks: Sequence[int], block_size: int, dtype: torch.dtype, device: torch.device
    ):
        """`num_blocks` has the blocks of each group."""
        self.block_size = block_size
        self.windows = shape.windows
        self.group_of = shape.group_of or (0,) * len(shape.keys)
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        """The tensors of each layer that has its own."""
        for layer, (keys, group) in enumerate(zip(shape.keys, self.group_of, strict=True)):
            if keys.source == layer:
                size = (num_blocks[group], block_size, keys.num_heads, keys.head_size)
                key, value = (torch.zeros(size, dtype=dtype, device=device) for _ in range(2))
                self._own[layer] = key, value
        self._layers = [self._own[keys.source] for keys in shape.keys]
        num_layers, num_chosen = shape.num_choices
        choices = torch.zeros((num_layers, num_blocks[0] * block_size, num_chosen), dtype=torch.int16, device=device)
        self.choices = choices if num_layers else None
        """[layers, slots of the first group, K] the experts that each token used (`engine/model/routing.py`)."""

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._layers[layer]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [N, KV heads, D] at `slots` [N]; those of another layer are there already."""
        for side, new in zip(self._own.get(layer, ()), (key, value), strict=False):
            side.flatten(0, 1).index_copy_(0, slots, new)

    def read(self, layer: int, blocks: np.ndarray, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Positions [first, stop) of a sequence, heads first: two of [1, KV heads, positions, D]."""
        keys, values = self._layers[layer]
        low = first // self.block_size
        index = torch.from_numpy(blocks[low : -(-stop // self.block_size)]).to(keys.device)
        inside = slice(first - low * self.block_size, stop - low * self.block_size)
        return (
            keys[index].flatten(0, 1)[inside].transpose(0, 1).unsqueeze(0),
            values[index].flatten(0, 1)[inside].transpose(0, 1).unsqueeze(0),
        )

    def copy_block(self, group: int, source: int, target: int) -> None:
        for layer, (keys, values) in self._own.items():
            if self.group_of[layer] == group:
                keys[target] = keys[source]
                values[target] = values[source]
        if self.choices is not None and group == 0:
            by_block = self.choices.unflatten(1, (-1, self.block_size))
            by_block[:, target] = by_block[:, source]

    def read_choices(self, blocks: Tensor, num_tokens: int) -> Tensor:
        """[tokens, layers, K] int16: the experts of the first tokens of a sequence, given its blocks."""
        assert self.choices is not None, "the cache keeps them"
        index = blocks[: -(-num_tokens // self.block_size)]
        by_block = self.choices.unflatten(1, (-1, self.block_size))
        return by_block[:, index].flatten(1, 2)[:, :num_tokens].transpose(0, 1)


class Prefix(NamedTuple):
    """How far a sequence's blocks are findable: its first `num_blocks`, ending in tree node `node`."""

    num_blocks: int
    node: int

    @classmethod
    def root(cls, version: int) -> Prefix:
        """The empty prefix under the weights of `version`; negative nodes stand for versions."""
        return cls(0, -version)


NO_PREFIX = Prefix(0, 0)
TOKEN_BYTES = 4


def block_key(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes, which are faster to cut, hash and compare than tuples."""
    return array("i", tokens).tobytes()


class BlockPool:
    """Which blocks are in use, which are free, and which hold a prefix that may be reused."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._users = [0] * num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Blocks with content but no user, least recently used first."""
        self._block_of: dict[Hashable, int] = {}
        """The block of each (parent node, key of the block's own tokens)."""
        self._node_of = [0] * num_blocks
        """The tree node of each findable block, 0 for the others; a node's number is never reused."""
        self._key_of: dict[int, Hashable] = {}
        self._nodes = itertools.count(1)

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._idle)

    def allocate(self) -> int | None:
        """Take a block for one user; None if every block is in use."""
        if self._free:
            block = self._free.pop()
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        else:
            return None
        self._users[block] = 1
        return block

    def allocate_many(self, count: int) -> list[int]:
        """Take `count` blocks for one user, who must have checked that they are available."""
        blocks = [block for block in (self.allocate() for _ in range(count)) if block is not None]
        assert len(blocks) == count, "availability was checked"
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one user to each block."""
        users, idle = self._users, self._idle
        for block in blocks:
            if users[block]:
                users[block] += 1
            else:
                del idle[block]
                users[block] = 1

    def release(self, blocks: Sequence[int], *, is_spent: bool = False) -> None:
        """Give back blocks in sequence order. Later blocks are forgotten first, because they need the earlier ones.

        Spent blocks, which their sequence has left behind, are forgotten before all others.
        """
        users, idle, free, node_of = self._users, self._idle, self._free, self._node_of
        for block in reversed(blocks):
            left = users[block] - 1
            assert left >= 0, f"block {block} has no user"
            users[block] = left
            if left == 0:
                if node_of[block]:
                    idle[block] = None
                    if is_spent:
                        idle.move_to_end(block, last=False)
                else:
                    free.append(block)

    def match(self, version: int, tokens: Sequence[int], limit: int) -> tuple[list[int], Prefix]:
        """Share the cached full blocks that hold the start of `tokens`, covering at most `limit` tokens."""
        blocks: list[int] = []
        root = Prefix.root(version)
        node, data, size = root.node, block_key(tokens), self.block_size * TOKEN_BYTES
        block_of, node_of = self._block_of, self._node_of
        for start in range(0, (limit // self.block_size) * size, size):
            block = block_of.get((node, data[start : start + size]))
            if block is None:
                break
            blocks.append(block)
            node = node_of[block]
        self.share(blocks)
        return blocks, Prefix(len(blocks), node) if blocks else root

    def root(self, version: int) -> Prefix:
        """The empty prefix under the weights of `version`."""
        return Prefix.root(version)

    def prefix_at(self, version: int, blocks: Sequence[int]) -> Prefix:
        """The prefix that findable `blocks` hold."""
        return Prefix(len(blocks), self._node_of[blocks[-1]]) if blocks else Prefix.root(version)

    def register(self, tokens: Sequence[int], blocks: Sequence[int], known: Prefix) -> Prefix:
        """Make the full blocks of `tokens` findable beyond the prefix that already is; returns the longer prefix.

        If another block with the same tokens and weights is findable, that one stays findable and gets our children.
        """
        parent, first = known.node, known.num_blocks
        num_full = len(tokens) // self.block_size
        data = block_key(tokens[first * self.block_size : num_full * self.block_size])
        size = self.block_size * TOKEN_BYTES
        block_of, node_of = self._block_of, self._node_of
        for index in range(first, num_full):
            start = (index - first) * size
            key = (parent, data[start : start + size])
            block = blocks[index]
            holder = block_of.get(key)
            if holder is None:
                if node_of[block]:
                    return Prefix(index, parent)
                holder = block_of[key] = block
                node_of[block] = next(self._nodes)
                self._key_of[block] = key
            parent = node_of[holder]
        return Prefix(max(num_full, first), parent)

    def clear(self) -> None:
        """Forget every prefix; blocks in use stay with their users."""
        for block in list(self._key_of):
            self._forget(block)
        self._free.extend(self._idle)
        self._idle.clear()

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
            self._node_of[block] = 0
