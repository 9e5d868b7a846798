"""Attention as tiles of queries over lists of keys, for kernels in which every query meets its keys from position 0 on
(`ops/triton_bitwise.py`): the same form for a decode step, for prompts and for a packed forest of the trainer.

A tile holds neighbouring queries of one sequence. Its keys are found through a table of blocks: block i of a sequence
holds its positions [i size, (i + 1) size). A forest has blocks of one token, so its table lists packed tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from turnwise.engine.ops.interface import TransferOps

if TYPE_CHECKING:
    from turnwise.engine.attention.plans import PagedPlan, TreePlan

Run = tuple[int, int, int, np.ndarray]
"""First query among the packed tokens, number of queries, the position of the first one, blocks of the sequence."""


@dataclass(frozen=True, slots=True)
class KeyTiles:
    """All tiles of one pass."""

    tiles: Tensor
    """[4, T] int32: first query, number of queries, position of the first one, where its blocks begin in `table`."""
    table: Tensor
    """[..] int32: the blocks of all sequences."""
    block_size: int


def decode_tiles(plan: PagedPlan) -> KeyTiles:
    """One query for each row of a decode step; the host does not look at the lengths."""
    known: dict[str, KeyTiles] = plan.__dict__
    if "_decode_tiles" not in known:
        table, lengths = plan.block_table, plan.context_lens
        rows = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
        tiles = torch.stack([rows, (lengths > 0).int(), lengths.int() - 1, rows * table.stride(0)])
        known["_decode_tiles"] = KeyTiles(tiles, table, plan.cache.block_size)
    return known["_decode_tiles"]


def prompt_tiles(plan: PagedPlan, num_queries: int, transfer: TransferOps) -> KeyTiles:
    """The chunks of a sampler step; all keys are read from the cache."""
    known: dict[str, KeyTiles] = plan.__dict__
    if "_prompt_tiles" not in known:
        runs = [(chunk.start, chunk.stop - chunk.start, chunk.num_cached, chunk.blocks) for chunk in plan.chunks]
        known["_prompt_tiles"] = _upload(runs, num_queries, plan.cache.block_size, transfer)
    return known["_prompt_tiles"]


def forest_tiles(plan: TreePlan, num_queries: int, transfer: TransferOps) -> KeyTiles:
    """The nodes of a packed forest, each over its whole path."""
    known: dict[str, KeyTiles] = plan.__dict__
    if "_forest_tiles" not in known:
        known["_forest_tiles"] = _upload(_node_runs(plan), num_queries, 1, transfer)
    return known["_forest_tiles"]


def _node_runs(plan: TreePlan) -> list[Run]:
    paths = plan.path_runs()
    if paths is None:
        return [(a, b - a, 0, np.arange(a, b)) for a, b in itertools.pairwise(plan.bounds)]
    runs = []
    for path in paths:
        keys = np.arange(path.keys.start, path.keys.stop) if isinstance(path.keys, slice) else path.keys.numpy()
        count = path.rows.stop - path.rows.start
        runs.append((path.rows.start, count, len(keys) - count, keys))
    return runs


def _upload(runs: Sequence[Run], num_queries: int, block_size: int, transfer: TransferOps) -> KeyTiles:
    starts = np.cumsum([0, *(len(blocks) for *_, blocks in runs)])
    parts = []
    for (first, count, position, _), start in zip(runs, starts, strict=False):
        steps = np.arange(0, count, num_queries)
        sizes = np.minimum(num_queries, count - steps)
        parts.append(np.stack([first + steps, sizes, position + steps, np.full_like(steps, start)]))
    # Long tiles first: a card that begins with them is not left with one at the end.
    tiles = np.concatenate(parts, axis=1)
    tiles = np.ascontiguousarray(tiles[:, np.argsort(-tiles[2], kind="stable")], dtype=np.int32)
    table = np.concatenate([blocks for *_, blocks in runs]).astype(np.int32)
    on_device, table_on_device = transfer.upload_all([tiles, table])
    return KeyTiles(on_device, table_on_device, block_size)
