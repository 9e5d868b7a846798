"""Turns a step into the arrays that a forward pass and a draw take, for all rows at once.

A token's randomness is one uniform number, a hash of (request seed, sample, token index): the same request gives the
same tokens whatever else is in the batch, on every device. The reported logprob is of the whole vocabulary at the
sampling temperature (at 1 when greedy), before top-k, top-p and min-p cut the tail. The trainer computes the same
distribution, so the two agree.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from turnwise.engine.attention.plans import Chunk, GroupedPlan, PagedPlan, join_plans, make_spans, span_slots
from turnwise.engine.ops import for_device
from turnwise.engine.sampling.kvcache import KvCache
from turnwise.engine.sampling.requests import Ahead, Row, Step

ALTERNATIVES = np.uint64(1 << 32)
"""The number of the first alternative to a prompt token; samples are numbered below it."""


def step_inputs(step: Step, cache: KvCache, last_tokens: Tensor) -> tuple[Tensor, Tensor, PagedPlan | GroupedPlan]:
    """Token ids, rows of the table of angles, and attention of a packed pass; decode rows read tokens from lanes."""
    rows = [*step.decode, *(piece.row for piece in step.prefill)]
    groups = range(len(cache.windows))
    num_decode = len(step.decode)
    last = [row.length - 1 for row in step.decode]
    firsts = np.array(last + [piece.start for piece in step.prefill])
    lengths = np.array([1] * num_decode + [piece.stop - piece.start for piece in step.prefill])
    held = [[row.tables[group].blocks for row in rows] for group in groups]
    num_blocks = [[len(blocks) for blocks in one] for one in held]
    joined = [join(one).astype(np.int64) for one in held]
    tokens = join([piece.row.tokens[piece.start : piece.stop] for piece in step.prefill])
    arrays = [
        *(make_spans(firsts, lengths, num_blocks[group]) for group in groups),
        *joined,
        *(block_table(held[group][:num_decode], max(num_blocks[group][:num_decode], default=0)) for group in groups),
        np.array(last, dtype=np.int32) + np.int32(1),
        np.array([row.lane for row in step.decode], dtype=np.int64),
        tokens.astype(np.int64),
    ]
    uploaded = for_device(last_tokens.device).transfer.upload_all(arrays)
    *of_groups, contexts, lanes, input_ids = uploaded
    spans, blocks, tables = _thirds(of_groups)
    placed = [span_slots(spans[group], blocks[group], int(lengths.sum()), cache.block_size) for group in groups]
    plans = [
        PagedPlan(
            cache=cache,
            slots=placed[group][1],
            num_decode=num_decode,
            block_table=tables[group],
            context_lens=contexts,
            max_context=max(last, default=-1) + 1,
            chunks=_chunks(firsts, lengths, num_blocks[group], joined[group])[num_decode:],
            window=cache.windows[group],
            has_drafts=any(isinstance(row, Ahead) for row in step.decode),
        )
        for group in groups
    ]
    if num_decode:
        input_ids = torch.cat([last_tokens[lanes], input_ids])
    positions = placed[0][0]
    if any(row.first_angle for row in rows):
        shifts = np.repeat(np.array([row.first_angle for row in rows], dtype=np.int64), lengths)
        positions = positions + for_device(last_tokens.device).transfer.upload(shifts)
    return input_ids, positions, join_plans(plans, cache.group_of)


def _thirds(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    size = len(tensors) // 3
    return tensors[:size], tensors[size : 2 * size], tensors[2 * size :]


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


def draw_arrays(rows: Sequence[Row]) -> list[np.ndarray]:
    """Temperatures and uniform numbers of the next tokens; also top-k, top-p and min-p if a row uses one of them."""
    params = [row.request.params for row in rows]
    arrays = [np.array([p.temperature for p in params], dtype=np.float32), next_uniforms(rows)]
    if any(row.request.cuts_tail for row in rows):
        arrays.append(np.array([p.top_k for p in params], dtype=np.int64))
        arrays.append(np.array([p.top_p for p in params], dtype=np.float32))
        arrays.append(np.array([p.min_p for p in params], dtype=np.float32))
    return arrays


def next_uniforms(rows: Sequence[Row]) -> np.ndarray:
    """The random number of each row's next token."""
    num_sampled = [row.num_sampled + row.num_pending for row in rows]
    return uniforms([row.request.seed for row in rows], [row.index for row in rows], num_sampled)


def uniforms(
    seeds: Sequence[int] | np.ndarray, samples: Sequence[int] | np.ndarray, positions: Sequence[int] | np.ndarray
) -> np.ndarray:
    """[B] numbers in [0, 1): splitmix64 over (seed, sample, position), 24 bits each."""
    with np.errstate(over="ignore"):
        state = _mix(np.asarray(seeds, dtype=np.uint64))
        state = _mix(state ^ np.asarray(samples, dtype=np.uint64))
        state = _mix(state ^ np.asarray(positions, dtype=np.uint64))
    return ((state >> np.uint64(40)).astype(np.float64) / float(1 << 24)).astype(np.float32)


def alternative_uniforms(seed: int, positions: range, count: int) -> np.ndarray:
    """[positions, count] numbers for alternatives to prompt tokens; no sample of the request uses the same ones."""
    draws = ALTERNATIVES + np.arange(count, dtype=np.uint64)
    return uniforms(np.array(seed, dtype=np.uint64), draws[None, :], np.asarray(positions, dtype=np.uint64)[:, None])


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
