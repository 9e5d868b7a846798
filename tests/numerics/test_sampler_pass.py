"""A sampler's pass in few calls has the bits of the same kernels called one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from naive import displaced_adapter, draft_always, make_model, random_ids, sample_many
from turnwise.bench.family_samples import FamilySample
from turnwise.engine import device_info
from turnwise.engine.engine import Engine
from turnwise.engine.model.lora import Policy
from turnwise.engine.ops import cpu, cpu_pass, waiting
from turnwise.engine.ops.interface import Ops
from turnwise.types import SampleResponse

MakeEngine = Callable[..., Engine]
Said = list[tuple[Sequence[int], Sequence[float] | None]]


class Counted:
    """The pass of the CPU, and how often it ran."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []
        """(tokens, tokens that decode) of each pass that ran."""

    def run(self, h: Tensor, *rest: Any) -> Tensor | None:
        found = cpu_pass.run(h, *rest)
        if found is not None:
            self.sizes.append((len(h), rest[3].num_decode))
        return found


def use(engine: Engine, stack: Counted | None) -> Engine:
    assert engine.model.fused is not None
    ops: Ops = engine.model.fused.ops
    engine.model.fused.ops = replace(ops, stack=stack)
    return engine


def said(replies: Sequence[SampleResponse]) -> Said:
    return [(one.tokens, one.logprobs) for reply in replies for one in reply.sequences]


def play(engine: Engine, policy: Policy) -> Said:
    """Prompts of several lengths with siblings, then next turns, which are read beside rows that decode."""
    prompts = [random_ids(20 + 17 * i, i) for i in range(5)]
    first = sample_many(engine, [(prompt, policy) for prompt in prompts], 2, max_tokens=7, seed=1, temperature=1.0)
    turns = [[*p, *r.sequences[0].tokens, 5, 6] for p, r in zip(prompts, first, strict=True)]
    second = sample_many(engine, [(turn, policy) for turn in turns], max_tokens=30, seed=2, temperature=0.7)
    return said([*first, *second])


def compare(build: Callable[[], Engine], *, merges: bool = True) -> Counted:
    """Play with and without the pass in few calls; returns what ran."""
    counted, found = Counted(), []
    for stack in (counted, None):
        engine = use(build(), stack)
        policy = engine.publish(displaced_adapter(engine)) if merges else engine.base_policy
        found.append(play(engine, policy))
    assert found[0] == found[1]
    return counted


@pytest.mark.parametrize("num_threads", [1, 2])
def test_prompts_and_decoding_have_the_bits_of_single_calls(
    arch_dir: Path, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    monkeypatch.setattr(waiting, "num_threads", lambda: num_threads)
    settings = {"device": "cpu", "dtype": "float32", "merge_adapter": "always", "prefill_tokens": 48}
    counted = compare(lambda: make_engine(arch_dir, **settings))
    assert any(decoded == rows for rows, decoded in counted.sizes), "decoding alone"
    assert any(decoded == 0 for _, decoded in counted.sizes), "prompts alone"
    assert any(0 < decoded < rows for rows, decoded in counted.sizes), "both in one pass"


def test_passes_of_many_tokens_take_the_kernel_for_many_rows(arch_dir: Path, make_engine: MakeEngine) -> None:
    counted = compare(
        lambda: make_engine(arch_dir, device="cpu", dtype="float32", merge_adapter="always", max_num_seqs=8)
    )
    assert max(rows for rows, _ in counted.sizes) < 384
    found: list[Said] = []
    for stack in (counted, None):
        engine = use(make_engine(arch_dir, device="cpu", dtype="float32", prefill_tokens=1024), stack)
        asked = [(random_ids(110 + i, i), engine.base_policy) for i in range(5)]
        found.append(said(sample_many(engine, asked, max_tokens=3, seed=1)))
    assert found[0] == found[1]
    assert max(rows for rows, _ in counted.sizes) > 384


def test_bfloat16_weights(arch_dir: Path, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = cpu.load()
    assert kernels is not None, "this test needs a C compiler"
    monkeypatch.setattr(device_info, "lacking_for_bfloat16", lambda: "")
    monkeypatch.setattr(kernels, "has_pair_dots", True)
    settings = {"device": "cpu", "dtype": "bfloat16", "merge_adapter": "always"}
    assert compare(lambda: make_engine(arch_dir, **settings)).sizes


def test_blocks_are_cut_into_calls(arch_dir: Path, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_pass, "MOST_PRODUCTS", 1)
    assert compare(lambda: make_engine(arch_dir, device="cpu", dtype="float32", merge_adapter="always")).sizes


def test_a_window_of_all_layers(tmp_path: Path, make_engine: MakeEngine) -> None:
    config = FamilySample(name="", model_type="mistral", settings={"sliding_window": 21}).config()
    directory = make_model(config, tmp_path)
    assert compare(lambda: make_engine(directory, device="cpu", dtype="float32"), merges=False).sizes


def test_all_weights_of_a_policy_and_drafts(arch_dir: Path, make_engine: MakeEngine) -> None:
    found, counted = [], Counted()
    for stack in (counted, None):
        engine = use(make_engine(arch_dir, device="cpu", full_weights=True, speculation="suffix"), stack)
        found.append(play(draft_always(engine), engine.publish(engine.create_full())))
    assert found[0] == found[1]
    assert counted.sizes


def test_an_adapter_beside_the_weights_takes_single_calls(arch_dir: Path, make_engine: MakeEngine) -> None:
    assert compare(lambda: make_engine(arch_dir, device="cpu", merge_adapter="never")).sizes == []


def test_a_cache_slot_that_does_not_exist_is_refused(arch_dir: Path, make_engine: MakeEngine) -> None:
    """C code reads whatever it is told to."""
    engine = make_engine(arch_dir, device="cpu", dtype="float32")
    right = engine.sampler.cache.layer

    def few(layer: int) -> tuple[Tensor, Tensor]:
        keys, values = right(layer)
        return keys[:1], values[:1]

    engine.sampler.cache.layer = few
    with pytest.raises(Exception, match="within the 1 blocks of the KV cache"):
        sample_many(engine, [(random_ids(60, 1), engine.base_policy)], max_tokens=2)
