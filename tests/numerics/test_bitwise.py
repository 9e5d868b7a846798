"""`engine.bitwise`: the sampler's logprobs have the bits of the trainer's, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from naive import displaced_adapter, random_ids, relative_error, rl_datum, run, sample, sample_many
from same_bits import bits, play, prompts_of, trained
from turnwise.engine import device_info
from turnwise.engine.engine import Engine
from turnwise.engine.ops import cpu
from turnwise.types import Datum, ModelInput

MakeEngine = Callable[..., Engine]


@pytest.fixture
def bitwise(make_engine: MakeEngine) -> MakeEngine:
    def build(directory: Path | None = None, **settings: object) -> Engine:
        return make_engine(directory, **{"bitwise": True, **settings})

    return build


@pytest.mark.parametrize("count", [1, 3, 8])
def test_sampled_logprobs_have_the_trainers_bits(arch_dir: Path, bitwise: MakeEngine, count: int) -> None:
    """Several turns over the prefix cache, sampled together; the trainer packs each turn, and all of them, as trees."""
    engine = bitwise(arch_dir)
    adapter, turns = play(engine, count, turns=3)
    for sampled in [*turns, [pair for turn in turns for pair in turn]]:
        assert bits(sampled) == trained(engine, adapter, sampled)


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_at_every_temperature(bitwise: MakeEngine, temperature: float) -> None:
    engine = bitwise()
    adapter, (sampled,) = play(engine, 5, turns=1, temperature=temperature)
    assert bits(sampled) == trained(engine, adapter, sampled, temperature)


def test_the_usual_engine_does_not_have_the_same_bits(make_engine: MakeEngine) -> None:
    """So these tests can fail."""
    engine = make_engine()
    adapter, turns = play(engine, 8, turns=3)
    sampled = [pair for turn in turns for pair in turn]
    assert bits(sampled) != trained(engine, adapter, sampled)


@pytest.mark.parametrize(
    "settings",
    [
        {"prefix_cache": False},
        {"prefill_tokens": 7},
        {"block_size": 5},
        {"share_prefixes": False},
        {"micro_batch_tokens": 64},
        {"activations": "split", "micro_batch_tokens": 48},
    ],
    ids=["no prefix cache", "prompts in pieces", "other blocks", "rows alone", "short passes", "passes in parts"],
)
def test_whatever_the_engine_is_told(bitwise: MakeEngine, settings: dict[str, object]) -> None:
    engine = bitwise(**settings)
    adapter, turns = play(engine, 6, turns=2)
    sampled = [pair for turn in turns for pair in turn]
    assert bits(sampled) == trained(engine, adapter, sampled)


def test_a_sequence_has_the_same_bits_alone_and_among_others(bitwise: MakeEngine) -> None:
    engine = bitwise()
    adapter, (together,) = play(engine, 8, turns=1)
    policy = engine.publish(adapter)
    for prompt, sequence in (together[0], together[7]):
        alone = sample(engine, prompt, policy, max_tokens=9, temperature=1.0, seed=0).sequences[0]
        assert alone.tokens == sequence.tokens
        assert alone.logprobs == sequence.logprobs


def test_many_adapters_of_one_batch_have_their_trainers_bits(bitwise: MakeEngine) -> None:
    engine = bitwise()
    adapters = [displaced_adapter(engine, rank=r, seed=r, train_mlp=r != 3) for r in (2, 3, 9)]
    policies = [engine.publish(adapter) for adapter in adapters]
    prompts = prompts_of(9)
    asked = [(prompt, policies[i % 3]) for i, prompt in enumerate(prompts)]
    replies = sample_many(engine, asked, max_tokens=12, temperature=1.0, seed=1)
    for i, adapter in enumerate(adapters):
        sampled = [(prompts[j], replies[j].sequences[0]) for j in range(i, 9, 3)]
        assert bits(sampled) == trained(engine, adapter, sampled)


def test_a_pass_that_learns_reads_the_same_logprobs(bitwise: MakeEngine) -> None:
    engine = bitwise()
    adapter, (sampled,) = play(engine, 4, turns=1)
    datums = []
    for prompt, sequence in sampled:
        ids = [*prompt, *sequence.tokens]
        weights = [0.0] * (len(prompt) - 1) + [1.0] * len(sequence.tokens)
        datums.append(Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:], "weights": weights}))
    outputs = run(engine.forward_backward(adapter, datums, "cross_entropy", None)).loss_fn_outputs
    known = [out["logprobs"].to_numpy()[-9:].astype(np.float32).tobytes() for out in outputs]
    assert known == bits(sampled)


def test_gradients_are_the_usual_ones(arch_dir: Path, bitwise: MakeEngine, make_engine: MakeEngine) -> None:
    datums = [rl_datum(random_ids(40, 1) + random_ids(12 + i, 10 + i), start=39, seed=i) for i in range(3)]
    grads = []
    for engine in (make_engine(arch_dir), bitwise(arch_dir)):
        adapter = displaced_adapter(engine)
        run(engine.forward_backward(adapter, datums, "importance_sampling", None))
        grads.append(adapter.grad)
    assert relative_error(grads[1], grads[0]) < 1e-5


def test_bfloat16_weights_on_a_cpu(arch_dir: Path, bitwise: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the processor has no such dot products, the kernels emulate them here."""
    kernels = cpu.load()
    assert kernels is not None, "this test needs a C compiler"
    monkeypatch.setattr(device_info, "lacking_for_bfloat16", lambda: "")
    monkeypatch.setattr(kernels, "has_pair_dots", True)
    engine = bitwise(arch_dir, device="cpu", dtype="bfloat16")
    assert engine.dtype is torch.bfloat16
    adapter, turns = play(engine, 6, turns=2)
    sampled = [pair for turn in turns for pair in turn]
    assert bits(sampled) == trained(engine, adapter, sampled)
