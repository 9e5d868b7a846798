"""bfloat16 on a GPU: the sampler and the trainer stay within a small KL of each other, merged or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from transformers import LlamaConfig

from naive import displaced_adapter, make_model, random_ids, relative_error, rl_datum, run, sample_many
from turnwise.engine.config import EngineConfig
from turnwise.engine.engine import Engine
from turnwise.engine.ops import cuda_support, for_device
from turnwise.types import Datum, ModelInput

pytestmark = pytest.mark.gpu

MAX_K2 = 1e-3
Merge = Literal["always", "never"]


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers wide enough for bfloat16 rounding to add up."""
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    return make_model(config, tmp_path_factory.mktemp("wide"), spread=0.02)


def k2_after_turns(engine: Engine, num_dialogues: int, num_turns: int) -> float:
    """Mean of (sampler - trainer)^2 / 2 over the tokens sampled in the last turn."""
    adapter = displaced_adapter(engine, rank=16, size=0.01)
    policy = engine.publish(adapter)
    histories = [random_ids(40, i) for i in range(num_dialogues)]
    gaps: list[float] = []
    for turn in range(num_turns):
        replies = sample_many(engine, [(h, policy) for h in histories], max_tokens=24, seed=turn)
        datums, logprobs = [], []
        for index, reply in enumerate(replies):
            (sequence,) = reply.sequences
            full = histories[index] + list(sequence.tokens)
            mask = [0.0] * (len(histories[index]) - 1) + [1.0] * len(sequence.tokens)
            datums.append(Datum(ModelInput.from_ints(full[:-1]), {"target_tokens": full[1:], "weights": mask}))
            logprobs.append(np.asarray(sequence.logprobs))
            histories[index] = full + random_ids(16, 1000 * turn + index)
        if turn == num_turns - 1:
            output = run(engine.forward(adapter, datums, "cross_entropy", None))
            for out, known in zip(output.loss_fn_outputs, logprobs, strict=True):
                gaps += (0.5 * (out["logprobs"].to_numpy()[-len(known) :] - known) ** 2).tolist()
    return float(np.mean(gaps))


@pytest.mark.parametrize("merge", ["always", "never"])
@pytest.mark.parametrize(("num_dialogues", "num_turns"), [(1, 1), (32, 1), (8, 6)])
def test_bfloat16_sampler_and_trainer_agree(wide_dir: Path, merge: Merge, num_dialogues: int, num_turns: int) -> None:
    config = EngineConfig(device="cuda", dtype="bfloat16", merge_adapter=merge, kv_cache_gib=1.0, seed=1)
    engine = Engine(wide_dir, config, name="wide")
    k2 = k2_after_turns(engine, num_dialogues, num_turns)
    print(f"k2 {k2:.2e} merge={merge} dialogues={num_dialogues} turns={num_turns}")
    assert k2 < MAX_K2


def test_turns_that_captured_graphs_read_agree_with_the_trainer(wide_dir: Path) -> None:
    config = EngineConfig(device="cuda", dtype="bfloat16", merge_adapter="always", kv_cache_gib=1.0, seed=1)
    engine = Engine(wide_dir, config, name="wide")
    prompts = engine.sampler.prompt_graphs
    assert prompts is not None
    k2 = [k2_after_turns(engine, 12, 5) for _ in range(2)]
    assert prompts.captures, "shapes came again"
    print(f"k2 {k2} with {len(prompts.captures)} graphs")
    assert max(k2) < MAX_K2


def test_a_bfloat16_tree_has_the_gradient_of_unshared_rows(wide_dir: Path) -> None:
    prefix = random_ids(200, 1)
    datums = [rl_datum(prefix + random_ids(40 + i, 10 + i), start=199, seed=i) for i in range(6)]
    grads = []
    bfloat16 = EngineConfig(device="cuda", dtype="bfloat16", kv_cache_gib=0.1)
    alone = bfloat16.model_copy(update={"share_prefixes": False})
    float32 = bfloat16.model_copy(update={"dtype": "float32"})
    for config in (bfloat16, alone, float32):
        engine = Engine(wide_dir, config, name="wide")
        adapter = displaced_adapter(engine, rank=8, size=0.01)
        run(engine.forward_backward(adapter, datums, "cross_entropy", None))
        grads.append(adapter.grad.float().clone())
    shared, unshared, exact = grads
    assert relative_error(unshared, exact) < 0.05
    assert relative_error(shared, exact) < 1.5 * relative_error(unshared, exact) + 0.005


def test_captured_passes_have_the_gradient_of_launched_ones(wide_dir: Path) -> None:
    prompts = [random_ids(150, i) for i in range(3)]
    alone = [rl_datum(random_ids(300 + 20 * i, i), start=100, seed=i) for i in range(5)]
    groups = [rl_datum(prompts[i % 3] + random_ids(40 + i, 10 + i), start=149, seed=i) for i in range(12)]
    turn = prompts[0] + random_ids(60, 99)
    deep = [*groups, *(rl_datum(turn + random_ids(30 + i, 50 + i), start=200, seed=i) for i in range(4))]
    exact = Engine(wide_dir, EngineConfig(device="cuda", dtype="float32", kv_cache_gib=0.1), name="wide")
    engine = Engine(wide_dir, EngineConfig(device="cuda", dtype="bfloat16", kv_cache_gib=0.1), name="wide")
    wanted, adapter = displaced_adapter(exact, rank=8, size=0.01), displaced_adapter(engine, rank=8, size=0.01)
    graphs = engine.trainer.graphs
    assert graphs is not None
    for datums in (alone, groups, deep):
        run(exact.forward_backward(wanted, datums, "importance_sampling", None))
        errors = []
        for _ in range(4):
            run(engine.forward_backward(adapter, datums, "importance_sampling", None))
            errors.append(relative_error(adapter.grad, wanted.grad))
            adapter.grad.zero_()
        print(f"relative errors {errors}: launched, then captured")
        assert errors[0] < 0.05
        assert max(errors[1:]) < 1.2 * errors[0] + 0.002
        wanted.grad.zero_()
    assert len(graphs) == 3


@pytest.fixture
def old_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A card on which neither Triton nor flash attention runs."""
    caches = (for_device, cuda_support.has_triton, cuda_support.fits_flash)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(cuda_support, "is_new_enough", lambda: False)
    yield
    for cache in caches:
        cache.cache_clear()


def test_an_old_card_is_slower_and_computes_the_same(
    wide_dir: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = random_ids(200, 1)
    datums = [rl_datum(prefix + random_ids(40 + i, 10 + i), start=199, seed=i) for i in range(3)]
    grads = []
    for is_old in (False, True):
        if is_old:
            request.getfixturevalue("old_card")
        engine = Engine(wide_dir, EngineConfig(device="cuda", dtype="bfloat16", kv_cache_gib=0.5, seed=1), name="wide")
        adapter = displaced_adapter(engine, rank=8, size=0.01)
        run(engine.forward_backward(adapter, datums, "cross_entropy", None))
        grads.append(adapter.grad.float().clone())
        assert k2_after_turns(engine, 4, 3) < MAX_K2
    assert relative_error(*grads) < 0.05
    assert len([record for record in caplog.records if "compute capability" in record.message]) == 2


def test_heads_of_an_odd_size_run_dense(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=120,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    cuda_support.fits_flash.cache_clear()
    directory = make_model(config, tmp_path / "odd", spread=0.02)
    found = {}
    for dtype in ("bfloat16", "float32"):
        engine = Engine(directory, EngineConfig(device="cuda", dtype=dtype, kv_cache_gib=0.1, seed=1), name="odd")
        adapter = displaced_adapter(engine, rank=4, size=0.01)
        run(engine.forward_backward(adapter, [rl_datum(random_ids(60, 1), start=30)], "cross_entropy", None))
        sample_many(engine, [(random_ids(20, 1), engine.publish(adapter))], max_tokens=4)
        found[dtype] = adapter.grad.float().clone()
    assert relative_error(found["bfloat16"], found["float32"]) < 0.1
    assert len([record for record in caplog.records if "heads of 30" in record.message]) == 1
