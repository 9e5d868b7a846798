"""The split of a card's memory: nothing is promised twice, and what does not fit is known before it is tried."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.engine.budget import (
    GIB,
    MAX_PASS_TOKENS,
    MIN_PASS_TOKENS,
    PassLimit,
    split_memory,
    training_pass_bytes,
)
from turnwise.engine.config import EngineConfig
from turnwise.engine.device_info import DeviceInfo
from turnwise.engine.model.fused_parts import is_fused
from turnwise.engine.model.kept import PLAIN_STRETCH, KeptRoom, PassSizes
from turnwise.models.blocks import BlockSpec
from turnwise.models.facts import ModelSizes

SMALL = ModelSizes(
    num_layers=28, hidden_size=1024, inner_size=3072, num_heads=16, num_kv_heads=8, head_size=128, vocab_size=151936
)
SMALL_LINEARS = 596_000_000
LARGE = ModelSizes(
    num_layers=36, hidden_size=4096, inner_size=12288, num_heads=32, num_kv_heads=8, head_size=128, vocab_size=151936
)
LARGE_LINEARS = 7_568_000_000


def card(total_gib: float, used_gib: float) -> DeviceInfo:
    free = int((total_gib - used_gib) * GIB)
    return DeviceInfo(kind="cuda", dtype="bfloat16", free_bytes=free, total_bytes=int(total_gib * GIB))


def split(device: DeviceInfo, sizes: ModelSizes = SMALL, adapted: int = SMALL_LINEARS, **settings):
    config = EngineConfig(**settings)
    return split_memory(config, device, sizes, adapted_parameters=adapted, context_length=40960)


def test_a_large_card_takes_the_longest_passes_and_shares_the_rest_with_the_cache() -> None:
    found = split(card(140, 1.2))
    assert found.may_merge
    assert found.limit.alone == MAX_PASS_TOKENS
    assert found.limit.alone < found.limit.sharing <= 4 * MAX_PASS_TOKENS
    assert found.kv_bytes == pytest.approx(found.training_bytes, rel=0.01)
    assert "passes of 32,768 tokens" in found.line()


def test_weights_that_fill_the_card_are_not_copied_once_more() -> None:
    """8 billion parameters on 24 GiB: adapters stay beside the base, and passes are as long as fits."""
    found = split(card(24, 15.3), LARGE, LARGE_LINEARS)
    assert not found.may_merge
    assert found.merged_bytes == 0
    assert MIN_PASS_TOKENS <= found.limit.alone < 2048
    assert "no merged weights" in found.line()
    assert split(card(24, 15.3), LARGE, LARGE_LINEARS, merge_adapter="always").may_merge
    assert not split(card(140, 1.2), merge_adapter="never").may_merge


def test_what_the_user_sets_stands() -> None:
    found = split(card(140, 1.2), micro_batch_tokens=2048, kv_cache_gib=10.0)
    assert found.limit == PassLimit(2048, 8192)
    assert found.kv_bytes == pytest.approx(10 * GIB, rel=1e-3)
    assert found.training_bytes > 100 * GIB, "what the cache leaves"


def test_a_cpu_has_short_passes() -> None:
    found = split(DeviceInfo(kind="cpu", dtype="float32"))
    assert found.limit == PassLimit(2048, 4096)
    assert found.kv_bytes == pytest.approx(GIB, rel=1e-3)


@given(total=st.floats(8, 200), used=st.floats(0.5, 0.9), utilization=st.floats(0.5, 1.0), is_large=st.booleans())
def test_nothing_is_promised_twice(total: float, used: float, utilization: float, is_large: bool) -> None:
    device = card(total, total * used)
    sizes, adapted = (LARGE, LARGE_LINEARS) if is_large else (SMALL, SMALL_LINEARS)
    found = split(device, sizes, adapted, gpu_memory_utilization=utilization)
    planned = found.merged_bytes + found.kv_bytes + found.training_bytes
    assert planned <= max(0, device.free_bytes - (1 - utilization) * device.total_bytes) + 1
    for tokens in {found.limit.alone, found.limit.sharing} - {MIN_PASS_TOKENS}:
        assert training_pass_bytes(sizes, device, tokens, rank=64, train_unembed=True) <= found.training_bytes


@pytest.mark.parametrize("block", [BlockSpec(), None], ids=["our layers", "those of transformers"])
def test_passes_of_the_chosen_length_keep_their_activations(block: BlockSpec | None) -> None:
    """Otherwise every full pass would compute them twice."""
    device, sizes = card(48, 15.3), replace(LARGE, block=block)
    assert is_fused(sizes) == (block is not None)
    found = split(device, sizes, LARGE_LINEARS)
    assert found.limit.alone > MIN_PASS_TOKENS
    counted = found.limit.alone if block is not None else int(found.limit.alone * PLAIN_STRETCH)
    room = KeptRoom(found.training_bytes, "auto", found.limit.alone)
    one = PassSizes(sizes, device.dtype_bytes, 64, device.facts)
    assert room.choose(one, counted, can_split=False).keeps_all
    assert not room.choose(one, 2 * counted, can_split=False).keeps_all


def test_longer_contexts_and_more_sequences_bound_the_cache() -> None:
    few = split_memory(
        EngineConfig(max_num_seqs=4), card(140, 1.2), SMALL, adapted_parameters=SMALL_LINEARS, context_length=1000
    )
    assert few.kv_tokens == 4000
    assert few.training_bytes > 100 * GIB
    wider = replace(SMALL, num_kv_heads=16)
    assert split(card(140, 1.2), wider).kv_tokens < split(card(140, 1.2)).kv_tokens
