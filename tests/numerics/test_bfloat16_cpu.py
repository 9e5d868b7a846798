"""bfloat16 weights on a CPU: sampler and trainer round alike, and gradients stay near those of float32.

Where the processor has no such dot products, the kernels emulate them here: the same roundings, only slower.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from naive import displaced_adapter, random_ids, relative_error, rl_datum, run, sample, sample_many
from turnwise.engine import device_info
from turnwise.engine.config import EngineConfig
from turnwise.engine.device_info import choose_device, dtype_in_use, find_device
from turnwise.engine.engine import Engine
from turnwise.engine.ops import cpu
from turnwise.engine.ops.processor import lacking_for_bfloat16
from turnwise.types import AdamParams, Datum, ModelInput

MakeEngine = Callable[..., Engine]
CPU_BFLOAT16 = EngineConfig(device="cpu", dtype="bfloat16")
DATUMS = [rl_datum(random_ids(40, 1) + random_ids(12 + i, 10 + i), start=39, seed=i) for i in range(3)]


@pytest.fixture
def narrow(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """Makes engines with bfloat16 weights on the CPU, on any machine."""
    kernels = cpu.load()
    assert kernels is not None, "these tests need a C compiler"
    monkeypatch.setattr(device_info, "lacking_for_bfloat16", lambda: "")
    monkeypatch.setattr(kernels, "has_pair_dots", True)

    def build(directory: Path | None = None, **settings: object) -> Engine:
        engine = make_engine(directory, **{"device": "cpu", "dtype": "bfloat16", **settings})
        assert engine.dtype is torch.bfloat16
        return engine

    return build


def gaps(engine: Engine) -> np.ndarray:
    """Sampler minus trainer, over prompts that are sampled together and once more alone."""
    adapter = displaced_adapter(engine)
    policy = engine.publish(adapter)
    prompts = [random_ids(9 + 5 * i, i) for i in range(8)]
    replies = sample_many(engine, [(prompt, policy) for prompt in prompts], max_tokens=24, temperature=1.0, seed=1)
    replies.append(sample(engine, prompts[0], policy, max_tokens=24, temperature=1.0, seed=9))
    found = []
    for prompt, reply in zip([*prompts, prompts[0]], replies, strict=True):
        (sequence,) = reply.sequences
        ids = prompt + list(sequence.tokens)
        datum = Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:]})
        output = run(engine.forward(adapter, [datum], "cross_entropy", None))
        found.append(np.array(sequence.logprobs) - output.loss_fn_outputs[0]["logprobs"].to_numpy()[len(prompt) - 1 :])
    return np.concatenate(found)


def test_sampler_and_trainer_agree_far_better_than_bfloat16_is_exact(arch_dir: Path, narrow: MakeEngine) -> None:
    """Beside the weights an adapter is float32 in both; merged, its sum with a weight is rounded once more."""
    beside = gaps(narrow(arch_dir, merge_adapter="never"))
    assert np.mean(beside**2) / 2 < 3e-6
    assert np.abs(beside).max() < 0.02
    merged = gaps(narrow(arch_dir, merge_adapter="always"))
    assert np.mean(merged**2) / 2 < 3e-4
    assert np.mean(merged**2) > np.mean(beside**2)


def test_gradients_point_where_those_of_float32_point(
    arch_dir: Path, make_engine: MakeEngine, narrow: MakeEngine
) -> None:
    grads = []
    for engine in (make_engine(arch_dir, device="cpu"), narrow(arch_dir)):
        adapter = displaced_adapter(engine)
        run(engine.forward_backward(adapter, DATUMS, "importance_sampling", None))
        assert adapter.grad.dtype is torch.float32
        grads.append(adapter.grad.clone())
    assert relative_error(grads[1], grads[0]) < 0.03
    assert not torch.equal(grads[0], grads[1]), "the bfloat16 engine must not have run in float32"


def test_cut_and_packed_batches_give_the_same_gradient(narrow: MakeEngine) -> None:
    grads = []
    for settings in ({}, {"share_prefixes": False}, {"micro_batch_tokens": 16}):
        engine = narrow(**settings)
        adapter = displaced_adapter(engine)
        run(engine.forward_backward(adapter, DATUMS, "importance_sampling", None))
        grads.append(adapter.grad.clone())
    for other in grads[1:]:
        assert relative_error(other, grads[0]) < 3e-3


def test_matrices_are_bfloat16_and_everything_else_is_float32(narrow: MakeEngine, model_dirs: dict[str, Path]) -> None:
    engine = narrow(model_dirs["qwen2"])
    types = {name: parameter.dtype for name, parameter in engine.model.layout.parameters.items()}
    assert {types[name] for name in types if "norm" in name or name.endswith("bias")} == {torch.float32}
    matrices = {types[name] for name in types if "norm" not in name and not name.endswith("bias")}
    assert matrices == {torch.bfloat16}
    assert engine.sampler.cache.read(0, np.array([0]), 0, 1)[0].dtype is torch.float32
    assert engine.publish(displaced_adapter(engine)).pairs.popitem()[1][0].dtype is torch.float32


def test_all_weights_train_and_sample_in_bfloat16(narrow: MakeEngine) -> None:
    engine = narrow(full_weights=True)
    full = engine.create_full()
    before = run(engine.forward_backward(full, DATUMS, "cross_entropy", None)).metrics["loss:sum"]
    engine.optim_step(full, AdamParams(learning_rate=1e-3))
    after = run(engine.forward(full, DATUMS, "cross_entropy", None)).metrics["loss:sum"]
    assert after < before
    (sequence,) = sample(engine, random_ids(9, 1), engine.publish(full), max_tokens=4, temperature=0.0).sequences
    assert np.isfinite(np.array(sequence.logprobs)).all()


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("flags\t\t: fpu sse2 avx512f avx512_bf16\n", ""),
        ("flags\t\t: fpu sse2 avx2 avx512f\n", "the processor has no avx512_bf16"),
        (None, "no avx512_bf16 is known of this"),
    ],
)
def test_the_processor_is_asked_for_dot_products(cpuinfo: str | None, expected: str, tmp_path: Path) -> None:
    if cpuinfo is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc" / "cpuinfo").write_text(cpuinfo)
    lacking = lacking_for_bfloat16(tmp_path)
    assert lacking.startswith(expected)
    assert bool(lacking) == bool(expected)


def test_without_dot_products_the_engine_uses_float32_and_says_so(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_info, "lacking_for_bfloat16", lambda: "the processor has none of this test")
    found = find_device(CPU_BFLOAT16)
    assert (found.dtype, found.activation_bytes) == ("float32", 4)
    assert found.why == "float32 in place of bfloat16, because the processor has none of this test"
    with caplog.at_level(logging.WARNING):
        engine = make_engine(device="cpu", dtype="bfloat16")
    assert engine.dtype is torch.float32
    assert found.why in caplog.text


def test_kernels_that_could_not_be_built_for_the_processor_leave_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_info, "lacking_for_bfloat16", lambda: "")
    monkeypatch.setattr(cpu.load(), "has_pair_dots", False)
    assert choose_device(CPU_BFLOAT16)[1] is torch.float32
    assert "because the compiler cannot build its kernels" in dtype_in_use("cpu", "bfloat16")[1]
