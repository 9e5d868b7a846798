"""Datums -> packed prefix-tree batches, and results back to datums.

Datums that share leading tokens run the shared part once: a radix tree over their input ids, laid out in preorder as
one packed sequence without padding. Position ids continue along each path; attention sees ancestors only
(`attention.TreePlan`). A position that several datums use for their targets is computed once and read by each.

Shape legend: N packed tokens, R rows of hidden states that the head reads, E entries (one per datum and target).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from turnwise.engine.attention.plans import Pair, TreePlan
from turnwise.engine.budget import PassLimit
from turnwise.engine.ops import for_device

MIN_SHARED = 16
"""A shared beginning needs at least this many tokens to get its own node."""
NO_SHARING = 1 << 30
"""The `min_shared` that keeps every datum on its own."""

Array = np.ndarray


@dataclass(slots=True)
class _Node:
    start: int
    """Offset of its first token in the packed sequence."""
    depth: int
    """Position id of its first token."""
    tokens: Array
    children: list[_Node] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def subtree_stop(self) -> int:
        return self.children[-1].subtree_stop() if self.children else self.stop


class _Forest:
    """Builds the preorder layout of sorted sequences."""

    def __init__(self, sequences: Sequence[Array], shared: Sequence[int], min_shared: int) -> None:
        self.sequences = sequences
        self.shared = shared
        """[i] number of leading tokens that sequences i - 1 and i have in common."""
        self.min_shared = min_shared
        self.size = 0
        self.nodes: list[_Node] = []
        self.paths: list[list[_Node]] = [[] for _ in sequences]
        self.roots = self._build(0, len(sequences), 0, [])

    def _joins(self, i: int, depth: int) -> bool:
        """Whether sequences i - 1 and i share enough tokens beyond `depth`, or one is a prefix of the other."""
        return self.shared[i] > depth and is_worth_sharing(
            self.sequences[i - 1], self.sequences[i], self.shared[i], depth + self.min_shared
        )

    def _build(self, low: int, high: int, depth: int, path: list[_Node]) -> list[_Node]:
        """Build the nodes of sequences [low, high), which share their first `depth` tokens along `path`."""
        cuts = [i for i in range(low + 1, high) if not self._joins(i, depth)]
        nodes: list[_Node] = []
        for a, b in zip([low, *cuts], [*cuts, high], strict=True):
            common = len(self.sequences[a]) if b - a == 1 else min(self.shared[a + 1 : b])
            node = None
            if common > depth:
                node = _Node(start=self.size, depth=depth, tokens=self.sequences[a][depth:common])
                self.size += common - depth
                self.nodes.append(node)
                nodes.append(node)
            here = path if node is None else [*path, node]
            if b - a == 1:
                self.paths[a] = here
            else:
                ends = sum(len(self.sequences[i]) == common for i in range(a, b))
                for i in range(a, a + ends):
                    self.paths[i] = here  # the first in order: it ends where the others continue
                if a + ends < b:
                    children = self._build(a + ends, b, common, here)
                    (node.children if node is not None else nodes).extend(children)
        return nodes


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The tokens of one forward pass, laid out as a forest."""

    input_ids: Array
    """[N]"""
    position_ids: Array
    """[N] the position of each token, as a row of the model's table of angles."""
    plan: TreePlan
    members: list[int]
    """The indices of the caller's sequences in this pass."""
    packed_index: list[Array]
    """Per member: [its length], the packed token that holds each of its positions."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @classmethod
    def join(cls, batches: Sequence[PackedBatch]) -> PackedBatch:
        """Join several forests; none attends to another's tokens."""
        if len(batches) == 1:
            return batches[0]
        starts = np.cumsum([0, *(b.num_tokens for b in batches)]).tolist()
        levels = [
            [pair.shifted(start) for b, start in zip(batches, starts, strict=False) for pair in _level(b, depth)]
            for depth in range(max(len(b.plan.levels) for b in batches))
        ]
        bounds = [start + bound for b, start in zip(batches, starts, strict=False) for bound in b.plan.bounds[:-1]]
        return cls(
            input_ids=np.concatenate([b.input_ids for b in batches]),
            position_ids=np.concatenate([b.position_ids for b in batches]),
            plan=TreePlan([*bounds, starts[-1]], levels),
            members=[],
            packed_index=[],
        )


def _level(batch: PackedBatch, depth: int) -> Sequence[Pair]:
    return batch.plan.levels[depth] if depth < len(batch.plan.levels) else ()


def sort_key(sequence: Array) -> bytes:
    """Bytes that sort in the same order as the token ids."""
    return sequence.astype(">u4").tobytes()


def num_shared(a: Array, b: Array) -> int:
    """Number of leading tokens that two sequences have in common."""
    length = min(len(a), len(b))
    differ = np.nonzero(a[:length] != b[:length])[0]
    return int(differ[0]) if len(differ) else length


def is_worth_sharing(a: Array, b: Array, shared: int, min_shared: int) -> bool:
    """Whether two sequences share enough tokens for a node, or one is a prefix of the other."""
    return shared >= min_shared or (min_shared < NO_SHARING and shared == min(len(a), len(b)))


def split_batches(
    sequences: Sequence[Array], limit: PassLimit, *, min_shared: int = MIN_SHARED, switch: int | None = None
) -> Iterator[list[int]]:
    """Sort the indices of `sequences` and cut them into few passes of about `limit` tokens and of similar size.

    Sizes are similar because launching a pass takes time: a last pass of a few tokens costs almost as much as a full
    one. `switch` is that of `pack`.
    """
    order = sorted(range(len(sequences)), key=lambda i: sort_key(sequences[i]))
    shared = [0] * len(order)
    for place, (previous, index) in enumerate(itertools.pairwise(order), start=1):
        common = num_shared(sequences[previous], sequences[index])
        if is_worth_sharing(sequences[previous], sequences[index], common, min_shared):
            shared[place] = common
    lengths = [len(sequences[index]) for index in order]
    if switch is not None:
        shared, lengths = _count_twice(shared, lengths, switch)
    cuts, largest = cut_passes(lengths, shared, limit)
    low, high = 0, limit.alone if len(cuts) > 1 else 0
    while high - low > max(1, limit.alone // 64):
        middle = (low + high) // 2
        others, other_largest = cut_passes(lengths, shared, PassLimit(alone=middle, sharing=limit.sharing))
        if len(others) > len(cuts):
            low = middle
            continue
        high = middle
        if other_largest <= largest:
            cuts, largest = others, other_largest
    for start, stop in itertools.pairwise([*cuts, len(order)]):
        yield order[start:stop]


def _count_twice(shared: Sequence[int], lengths: Sequence[int], switch: int) -> tuple[list[int], list[int]]:
    """What sequences share and how long they are, if those beyond `switch` run once more up to it."""
    is_long = [length > switch for length in lengths]
    both = [False, *(a and b for a, b in itertools.pairwise(is_long))]
    shared = [min(common, switch) + (common if twice else 0) for common, twice in zip(shared, both, strict=True)]
    return shared, [length + (switch if long else 0) for length, long in zip(lengths, is_long, strict=True)]


def cut_passes(lengths: Sequence[int], shared: Sequence[int], limit: PassLimit) -> tuple[list[int], int]:
    """The starts of passes if each takes as many sequences as it can, and the tokens of the largest pass.

    Tokens that a sequence shares with the one before it cost nothing.
    """
    cuts: list[int] = []
    used = largest = 0
    for place, (length, common) in enumerate(zip(lengths, shared, strict=True)):
        if not cuts or used + length - common > (limit.sharing if common else limit.alone):
            cuts.append(place)
            used, common = 0, 0
        used += length - common
        largest = max(largest, used)
    return cuts, largest


def pack(
    sequences: Sequence[Array], members: Sequence[int], *, min_shared: int = MIN_SHARED, switch: int | None = None
) -> PackedBatch:
    """Lay out `sequences[i] for i in members` as one packed forest.

    With `switch`, sequences of more tokens have other angles (`model/rotation.py`): they run once up to `switch`, for
    the tokens that are predicted there, and once as a whole, for the tokens behind it.
    """
    long = [i for i in members if switch is not None and len(sequences[i]) > switch]
    if switch is None or not long:
        return _pack_once(sequences, members, min_shared)
    starts = _pack_once({i: sequences[i][:switch] for i in members}, members, min_shared)
    whole = _pack_once(sequences, long, min_shared)
    joined = PackedBatch.join([starts, replace(whole, position_ids=whole.position_ids + switch)])
    behind = dict(zip(whole.members, whole.packed_index, strict=True))
    index = [
        np.append(own, behind[member][switch:] + starts.num_tokens) if member in behind else own
        for member, own in zip(starts.members, starts.packed_index, strict=True)
    ]
    return replace(joined, members=starts.members, packed_index=index)


def _pack_once(
    sequences: Sequence[Array] | Mapping[int, Array], members: Sequence[int], min_shared: int
) -> PackedBatch:
    order = sorted(members, key=lambda i: sort_key(sequences[i]))
    chosen = [sequences[i] for i in order]
    shared = [0, *(num_shared(a, b) for a, b in itertools.pairwise(chosen))]
    forest = _Forest(chosen, shared, min_shared)
    input_ids = np.empty(forest.size, dtype=np.int64)
    position_ids = np.empty(forest.size, dtype=np.int64)
    for node in forest.nodes:
        input_ids[node.start : node.stop] = node.tokens
        position_ids[node.start : node.stop] = np.arange(node.depth, node.depth + len(node.tokens))
    index = [
        np.concatenate([np.arange(node.start, node.stop) for node in path])[: len(sequence)]
        for path, sequence in zip(forest.paths, chosen, strict=True)
    ]
    levels: list[list[Pair]] = []
    _collect_pairs(forest.roots, 0, levels)
    bounds = [*(node.start for node in forest.nodes), forest.size]
    return PackedBatch(input_ids, position_ids, TreePlan(bounds, levels), order, index)


def _collect_pairs(nodes: Sequence[_Node], depth: int, levels: list[list[Pair]]) -> None:
    for node in nodes:
        if node.children:
            while len(levels) <= depth:
                levels.append([])
            levels[depth].append(Pair(node.stop, node.subtree_stop(), node.start, node.stop))
            _collect_pairs(node.children, depth + 1, levels)


@dataclass(frozen=True, slots=True)
class Entries:
    """The hidden states that the head reads, and the targets that each of them serves; sorted by row."""

    host_tokens: Array
    """[R] packed token of each row, ascending; a token appears once per temperature asked of it."""
    host_rows: Array
    """[E] the row of each entry, ascending."""
    row_tokens: torch.Tensor
    """[R] `host_tokens` on the device."""
    row_temperatures: torch.Tensor
    """[R]"""
    rows: torch.Tensor
    """[E]"""
    targets: torch.Tensor
    """[E]"""
    columns: torch.Tensor
    """[E] where the entry stands in its job's loss columns."""

    @classmethod
    def join(cls, parts: Sequence[Entries]) -> Entries:
        """Entries of several forests, in the order of their packed tokens."""
        if len(parts) == 1:
            return parts[0]
        starts = np.cumsum([0, *(len(p.row_tokens) for p in parts)]).tolist()
        return cls(
            host_tokens=np.concatenate([p.host_tokens for p in parts]),
            host_rows=np.concatenate([p.host_rows + start for p, start in zip(parts, starts, strict=False)]),
            row_tokens=torch.cat([p.row_tokens for p in parts]),
            row_temperatures=torch.cat([p.row_temperatures for p in parts]),
            rows=torch.cat([p.rows + start for p, start in zip(parts, starts, strict=False)]),
            targets=torch.cat([p.targets for p in parts]),
            columns=torch.cat([p.columns for p in parts]),
        )


def make_entries(tokens: Array, temperatures: Array, targets: Array, columns: Array, device: torch.device) -> Entries:
    """Join entries that read the same hidden state at the same temperature into one row."""
    levels, level = _levels(temperatures)
    keys = tokens * len(levels) + level
    # Tokens are almost sorted, datum by datum, and a stable sort is much faster on sorted runs.
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    is_first = np.diff(ordered, prepend=-1) != 0
    unique, host_rows = ordered[is_first], np.cumsum(is_first) - 1
    host_tokens = unique // len(levels)
    row_temperatures = levels[unique % len(levels)].astype(np.float32)
    own = targets[order].astype(np.int64), columns[order].astype(np.int64)
    uploaded = for_device(device).transfer.upload_all([host_tokens, row_temperatures, host_rows, *own])
    return Entries(host_tokens, host_rows, *uploaded)


def _levels(temperatures: Array) -> tuple[Array, Array | int]:
    """The different temperatures, and the index of each entry's temperature."""
    if len(temperatures) and (temperatures == temperatures[0]).all():
        return temperatures[:1], 0
    return np.unique(temperatures, return_inverse=True)
