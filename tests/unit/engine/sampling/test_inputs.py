"""A step's arrays: every token's slot, position, keys and random number, against the plain definition."""

from __future__ import annotations

from array import array

import numpy as np
import torch

from turnwise.engine.attention.plans import Chunk, PagedPlan
from turnwise.engine.model.lora import base_policy
from turnwise.engine.ops.transfer import PackedTransfer
from turnwise.engine.sampling.inputs import block_table, step_inputs, uniforms
from turnwise.engine.sampling.kvcache import KvCache, KvShape
from turnwise.engine.sampling.requests import BlockTable, OpenRequest, Piece, Row, Step
from turnwise.models.layer_keys import LayerKeys
from turnwise.types import SampleRequest

SIZE = 4
CPU = torch.device("cpu")


def make_cache(num_blocks: int = 64) -> KvCache:
    return KvCache(KvShape((LayerKeys(1, 8, 0),)), [num_blocks], SIZE, torch.float32, CPU)


def make_row(tokens: list[int], blocks: list[int], lane: int) -> Row:
    asked = SampleRequest(tokens)
    request = OpenRequest(
        id=lane,
        asked=asked,
        params=asked.sampling_params,
        prompt=array("i", tokens),
        policy=base_policy(),
        seed=0,
        max_tokens=9,
        stop_ids=frozenset(),
        stop_strings=[],
        on_done=lambda _: None,
    )
    return Row(request, 0, array("i", tokens), tables=[BlockTable(array("i", blocks))], lane=lane)


def slots_of(blocks: list[int], first: int, stop: int) -> list[int]:
    return [blocks[p // SIZE] * SIZE + p % SIZE for p in range(first, stop)]


def test_decode_rows_and_pieces_get_their_own_tokens_positions_and_slots() -> None:
    decode = [make_row([1] * 6, [9, 4], 2), make_row([2] * 9, [3, 8, 7], 0)]
    decode[1].num_pending = 1
    pieces = [Piece(make_row(list(range(20, 31)), [5, 6, 11], 5), 4, 11), Piece(make_row([40, 41], [1], 4), 0, 2)]
    last_tokens = torch.tensor([50, 51, 52, 53])
    ids, positions, plan = step_inputs(Step(decode, pieces), make_cache(), last_tokens)
    assert isinstance(plan, PagedPlan)
    assert ids.tolist() == [52, 50, *range(24, 31), 40, 41]
    assert positions.tolist() == [5, 9, *range(4, 11), 0, 1]
    assert plan.slots.tolist() == [
        *slots_of([9, 4], 5, 6),
        *slots_of([3, 8, 7], 9, 10),
        *slots_of([5, 6, 11], 4, 11),
        *slots_of([1], 0, 2),
    ]
    assert plan.block_table.tolist() == [[9, 4, 0], [3, 8, 7]]
    assert (plan.context_lens.tolist(), plan.max_context) == ([6, 10], 10)
    assert [(c.start, c.stop, c.num_cached, c.blocks.tolist()) for c in plan.chunks] == [
        (2, 9, 4, [5, 6, 11]),
        (9, 11, 0, [1]),
    ]


def test_a_step_without_prompts_and_one_without_rows_are_steps_too() -> None:
    row = make_row([1] * 6, [9, 4], 1)
    ids, positions, plan = step_inputs(Step([row], []), make_cache(), torch.tensor([7, 8]))
    assert isinstance(plan, PagedPlan)
    assert (ids.tolist(), positions.tolist(), plan.slots.tolist(), list(plan.chunks)) == ([8], [5], [17], [])
    ids, _, plan = step_inputs(Step([], [Piece(row, 0, 6)]), make_cache(), torch.tensor([7, 8]))
    assert isinstance(plan, PagedPlan)
    assert (ids.tolist(), plan.num_decode, plan.slots.tolist()) == ([1] * 6, 0, slots_of([9, 4], 0, 6))


def test_keys_of_a_continued_sequence_are_all_its_positions_in_order() -> None:
    rng = np.random.default_rng(0)
    chunks, want, start = [], [], 3
    for cached, new, spare in ((8, 5, 0), (0, 3, 2), (4, 1, 1)):
        blocks = rng.permutation(60)[: -(-(cached + new) // SIZE) + spare]
        chunks.append(Chunk(start, start + new, cached, blocks))
        want += slots_of(blocks.tolist(), 0, cached + new)
        start += new
    varlen = make_plan(chunks).prefill_varlen()
    assert varlen.k_index is not None
    assert varlen.k_index.tolist() == want
    assert varlen.q_bounds.tolist() == [0, 5, 8, 9]
    assert varlen.k_bounds.tolist() == [0, 13, 16, 21]
    assert (varlen.max_q, varlen.max_k) == (5, 13)
    fresh = make_plan([Chunk(0, 3, 0, np.array([1])), Chunk(3, 5, 0, np.array([2]))]).prefill_varlen()
    assert (fresh.q_bounds.tolist(), fresh.k_index, fresh.max_k) == ([0, 3, 5], None, 3)


def make_plan(chunks: list[Chunk]) -> PagedPlan:
    none = torch.zeros(0, dtype=torch.int32)
    slots = torch.zeros(1, dtype=torch.int64)
    return PagedPlan(make_cache(), slots, 0, none.view(0, 0), none, max_context=0, chunks=chunks)


def test_one_copy_brings_every_array_as_it_was() -> None:
    arrays = [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.zeros((0, 4), dtype=np.int32),
        np.array([0.5, -1.0], dtype=np.float32),
        np.arange(10, dtype=np.int64)[::3],
    ]
    for array_, tensor in zip(arrays, PackedTransfer(CPU).upload_all(arrays), strict=True):
        assert torch.equal(tensor, torch.from_numpy(array_.copy()))
        assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0, "kernels are compiled for the pointers' alignment"


def test_a_block_table_pads_with_zeros() -> None:
    table = block_table([array("i", [3, 1]), array("i", []), array("i", [7])], 4)
    assert table.tolist() == [[3, 1, 0, 0], [0, 0, 0, 0], [7, 0, 0, 0]]


def test_uniforms_depend_on_seed_sample_and_position_alone() -> None:
    together = uniforms([5, 5, 5, 6], [0, 1, 0, 0], [0, 0, 1, 0])
    assert len(set(together.tolist())) == 4
    assert uniforms([5], [0], [1])[0] == together[2]


def test_uniforms_are_uniform() -> None:
    n = 20_000
    values = uniforms([3] * n, [0] * n, list(range(n)))
    assert values.min() >= 0
    assert values.max() < 1
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert abs(counts - n / 20).max() < 6 * np.sqrt(n / 20)
