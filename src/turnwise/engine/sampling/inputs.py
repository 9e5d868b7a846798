"""A step as the arrays that a forward pass takes; built for all rows at once, and uploaded in one copy."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from turnwise.engine.attention.plans import Chunk, PagedPlan, make_spans, span_slots
from turnwise.engine.ops import for_device
from turnwise.engine.sampling.kvcache import KvCache
from turnwise.engine.sampling.scheduler import Step


def step_inputs(step: Step, cache: KvCache, last_tokens: Tensor) -> tuple[Tensor, Tensor, PagedPlan]:
    """Token ids and positions of the packed pass, and its attention; decode rows read their tokens from their lanes."""
    rows = [*step.decode, *(piece.row for piece in step.prefill)]
    num_decode = len(step.decode)
    last = [row.length - 1 for row in step.decode]
    firsts = np.array(last + [piece.start for piece in step.prefill])
    lengths = np.array([1] * num_decode + [piece.stop - piece.start for piece in step.prefill])
    num_blocks = [len(row.blocks) for row in rows]
    blocks = join([row.blocks for row in rows]).astype(np.int64)
    table = block_table([row.blocks for row in step.decode], max(num_blocks[:num_decode], default=0))
    tokens = join([piece.row.tokens[piece.start : piece.stop] for piece in step.prefill])
    arrays = [
        make_spans(firsts, lengths, num_blocks),
        blocks,
        table,
        np.array(last, dtype=np.int32) + np.int32(1),
        np.array([row.lane for row in step.decode], dtype=np.int64),
        tokens.astype(np.int64),
    ]
    spans, held, tables, contexts, lanes, input_ids = for_device(last_tokens.device).transfer.upload_all(arrays)
    positions, slots = span_slots(spans, held, int(lengths.sum()), cache.block_size)
    plan = PagedPlan(
        cache=cache,
        slots=slots,
        num_decode=num_decode,
        block_table=tables,
        context_lens=contexts,
        max_context=max(last, default=-1) + 1,
        chunks=_chunks(firsts, lengths, num_blocks, blocks)[num_decode:],
    )
    if num_decode:
        input_ids = torch.cat([last_tokens[lanes], input_ids])
    return input_ids, positions, plan


def join(arrays: Sequence[array[int]]) -> np.ndarray:
    """int32 arrays end to end."""
    return np.frombuffer(b"".join(arrays), dtype=np.int32)


def block_table(blocks: Sequence[array[int]], width: int) -> np.ndarray:
    """[rows, width] int32: each row's blocks, then zeros."""
    table = np.zeros((len(blocks), width), dtype=np.int32)
    table[np.arange(width) < np.array([len(held) for held in blocks])[:, None]] = join(blocks)
    return table


def _chunks(firsts: np.ndarray, lengths: np.ndarray, num_blocks: Sequence[int], blocks: np.ndarray) -> list[Chunk]:
    stops, ends = np.cumsum(lengths).tolist(), np.cumsum(num_blocks).tolist()
    spans = zip(stops, lengths.tolist(), firsts.tolist(), ends, num_blocks, strict=True)
    return [Chunk(stop - length, stop, first, blocks[end - count : end]) for stop, length, first, end, count in spans]
