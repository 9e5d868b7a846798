"""The plan's memory against what an engine really takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from turnwise.cli import main
from turnwise.config.config import Config
from turnwise.config.files import load_config
from turnwise.engine.budget import (
    GIB,
    machine_bytes,
    recomputed_pass_bytes,
    split_memory,
    split_pass_bytes,
    training_pass_bytes,
)
from turnwise.engine.config import EngineConfig
from turnwise.engine.device_info import DeviceInfo, find_device
from turnwise.engine.engine import Engine
from turnwise.engine.training.pack import pack, split_batches
from turnwise.errors import ConfigError
from turnwise.models.facts import ModelSizes, read_facts
from turnwise.rollout.limits import RolloutLimits
from turnwise.training.memory import Memory, estimate_memory, pass_tokens
from turnwise.types import Datum, LoraConfig, ModelInput, SampleRequest, SamplingParams, TensorData

pytestmark = pytest.mark.model

FACTOR = 1.3
"""How far an estimate may be from what was measured, either way."""
CPU = DeviceInfo(kind="cpu", dtype="float32")
QWEN = ModelSizes(
    num_layers=28, hidden_size=1024, inner_size=3072, num_heads=16, num_kv_heads=8, head_size=128, vocab_size=151936
)
ADAPTED = 596_000_000
LIMITS = RolloutLimits(max_turns=4, max_tokens_per_turn=16, max_trajectory_tokens=1024)


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of SmolLM2-135M's shape, with its whole vocabulary."""
    directory = tmp_path_factory.mktemp("wide")
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        num_hidden_layers=3,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def directory(request: pytest.FixtureRequest, tiny_dir: Path) -> Path:
    return tiny_dir if request.param == "tiny" else request.getfixturevalue("wide_dir")


def _datums(lengths: Sequence[int], vocab_size: int) -> list[Datum]:
    """Random ids that share nothing, every position trained."""
    rng = np.random.default_rng(0)
    datums: list[Datum] = []
    for length in lengths:
        ids = rng.integers(3, vocab_size, length + 1)
        ones = TensorData.from_numpy(np.ones(length, dtype=np.float32))
        inputs = {"target_tokens": TensorData.from_numpy(ids[1:]), "logprobs": ones, "advantages": ones, "mask": ones}
        datums.append(Datum(model_input=ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs=inputs))
    return datums


def _peak_bytes(work: Callable[[], object], scratch: Path) -> int:
    """The most that `work` holds at once beyond what was there before, as torch's allocator reports it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    profiler.export_chrome_trace(str(scratch))
    events = json.loads(scratch.read_text(encoding="utf-8"))["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    held = np.cumsum([change["args"]["Bytes"] for change in sorted(changes, key=lambda change: change["ts"])])
    return int(held.max())


@pytest.mark.parametrize(
    ("directory", "dtype", "lengths", "rank", "train_unembed"),
    [
        ("tiny", "float32", [256] * 4, 16, True),
        ("tiny", "float32", [100], 4, False),
        ("wide", "float32", [128, 64], 16, True),
        ("wide", "float32", [540], 64, False),
        ("wide", "bfloat16", [128], 16, True),
    ],
    indirect=["directory"],
)
def test_a_training_pass_takes_what_was_estimated(
    directory: Path, dtype: Any, lengths: Sequence[int], rank: int, train_unembed: bool, tmp_path: Path
) -> None:
    engine = Engine(directory, EngineConfig(device="cpu", dtype=dtype, kv_cache_gib=0.05), name="x")
    adapter = engine.create_adapter(LoraConfig(rank=rank, seed=0, train_unembed=train_unembed))
    datums = _datums(lengths, engine.vocab_size)

    def step() -> None:
        for _ in engine.forward_backward(adapter, datums, "importance_sampling", None):
            pass

    step()  # kernels are built, angles are read
    measured = _peak_bytes(step, tmp_path / "trace.json")
    device = find_device(engine.config)
    facts = read_facts(directory)
    estimated = training_pass_bytes(facts, device, sum(lengths), rank=rank, train_unembed=train_unembed)
    estimated += adapter.flat.numel() * 4  # the copy of the gradient, which the plan counts with the adapter
    assert measured / FACTOR < estimated < measured * FACTOR, (measured / 2**20, estimated / 2**20)


def _estimate(config: Config, directory: Path, engine: EngineConfig, device: DeviceInfo = CPU) -> Memory:
    return estimate_memory(config, engine, device, read_facts(directory), LIMITS, num_attempts=64)


def _num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Of the storages behind them, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_their_merged_copy_adapter_and_cache_are_counted_as_they_lie_in_memory(
    tiny_dir: Path, dtype: Any
) -> None:
    settings = EngineConfig(device="cpu", dtype=dtype, max_num_seqs=8)
    engine = Engine(tiny_dir, settings, name="tiny")
    adapter = engine.create_adapter(LoraConfig(rank=4, seed=0))
    policy = engine.publish(adapter)
    done: list[object] = []
    engine.sampler.submit(SampleRequest([5, 6, 7], SamplingParams(max_tokens=2)), policy, on_done=done.append)
    while not done:
        engine.sampler.step()
    config = load_config("guess_number", ["model=tiny", "model.rank=4"])
    estimated = _estimate(config, tiny_dir, settings, find_device(settings))
    weights = [*engine.model.body.parameters(), engine.model.head.weight]
    # Beside bfloat16 matrices the norms are float32, which is too little for the plan to count.
    uncounted = sum(one.nbytes - one.numel() * engine.dtype.itemsize for one in weights)
    assert estimated.weights == _num_bytes(weights) - uncounted
    assert uncounted < 0.003 * estimated.weights
    assert estimated.merged == _num_bytes(list(engine.sampler.weights.merged.values()))
    layers = [engine.sampler.cache.layer(index) for index in range(2)]
    assert estimated.kv_cache == _num_bytes([side for layer in layers for side in layer])
    state = [adapter.flat, adapter.grad, adapter.exp_avg, adapter.exp_avg_sq, adapter.grad.clone(), policy.flat]
    assert estimated.adapter == _num_bytes(state)


def test_a_critic_comes_with_an_adapter_of_its_own(tiny_dir: Path) -> None:
    settings = EngineConfig(device="cpu")
    alone = _estimate(load_config("guess_number", ["model=tiny"]), tiny_dir, settings)
    both = _estimate(load_config("guess_number", ["model=tiny", "method=ppo"]), tiny_dir, settings)
    assert alone.adapter * 1.3 < both.adapter < alone.adapter * 2


def test_no_pass_holds_more_tokens_than_the_plan_says() -> None:
    """Dialogues that share a beginning are cut at four micro-batches, others at one."""
    rng = np.random.default_rng(0)
    beginning = rng.integers(3, 400, 40)
    sequences = [np.concatenate([beginning, rng.integers(3, 400, 100)]) for _ in range(64)]
    split = split_memory(
        EngineConfig(micro_batch_tokens=512), CPU, QWEN, adapted_parameters=ADAPTED, context_length=40960
    )
    sizes = [pack(sequences, batch).num_tokens for batch in split_batches(sequences, split.limit)]
    limit = pass_tokens(split, LIMITS, num_attempts=64)
    assert limit == 2048
    assert 0.9 * limit < max(sizes) <= limit
    assert pass_tokens(split, LIMITS, num_attempts=1) == 1024, "one dialogue"
    talkative = RolloutLimits(max_turns=100, max_tokens_per_turn=100, max_trajectory_tokens=8192)
    assert pass_tokens(split, talkative, num_attempts=64) == 8192


def test_a_dialogue_beyond_the_switch_of_angles_is_planned_with_its_second_run() -> None:
    split = split_memory(
        EngineConfig(micro_batch_tokens=512), CPU, QWEN, adapted_parameters=ADAPTED, context_length=40960
    )
    talkative = RolloutLimits(max_turns=100, max_tokens_per_turn=100, max_trajectory_tokens=8192)
    packed = pack([np.arange(8192)], [0], switch=3000).num_tokens
    assert pass_tokens(split, talkative, num_attempts=64, switch=3000) == packed == 8192 + 3000
    assert pass_tokens(split, talkative, num_attempts=64, switch=8192) == 8192, "not beyond it"
    assert pass_tokens(split, LIMITS, num_attempts=1, switch=500) == 1024 + 500, "one dialogue"


def test_dialogues_that_share_a_pass_count_where_one_long_dialogue_runs_in_parts(tiny_dir: Path) -> None:
    settings = EngineConfig(device="cpu", micro_batch_tokens=50_000, activations="split")
    limits = RolloutLimits(max_turns=1000, max_tokens_per_turn=512, max_trajectory_tokens=250_000)
    config = load_config("guess_number", ["model=tiny"])
    facts = read_facts(tiny_dir)
    memory = estimate_memory(config, settings, CPU, facts, limits, num_attempts=64)
    assert (memory.num_pass_tokens, memory.num_part_tokens) == (250_000, 50_000)
    rank = config.model.rank
    parts = split_pass_bytes(facts, CPU, 250_000, rank=rank, train_unembed=True, part_tokens=50_000)
    assert parts < memory.training_pass == recomputed_pass_bytes(facts, CPU, 200_000, rank=rank, train_unembed=True)
    replayed = load_config("guess_number", ["model=tiny", "model.routing_replay=true"])
    memory = estimate_memory(replayed, settings, CPU, facts, limits, num_attempts=64)
    assert (memory.is_recomputed, memory.num_part_tokens) == (True, 0), "as the engine does with replayed experts"


def test_a_gpu_is_planned_in_bfloat16_and_its_cache_takes_half_of_what_the_weights_leave(wide_dir: Path) -> None:
    card = DeviceInfo(kind="cuda", dtype="bfloat16", free_bytes=3 * GIB // 2, total_bytes=2 * GIB)
    settings = EngineConfig(gpu_memory_utilization=0.9)
    config = load_config("guess_number", ["model=x", "engine.micro_batch_tokens=1024"])
    on_card, on_cpu = (_estimate(config, wide_dir, settings, device) for device in (card, CPU))
    assert on_card.weights * 2 == on_cpu.weights
    left = card.free_bytes - on_card.weights - on_card.merged - 0.1 * card.total_bytes
    assert on_card.kv_cache == pytest.approx(left / 2, rel=1e-3)
    assert on_card.line().startswith(
        f"about {on_card.total / GIB:.2f} GiB of 2.00 GiB on the GPU in bfloat16: weights "
    )


def test_the_printed_plan_names_the_place_and_the_training_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "guess_number", "model=tiny", "engine.device=cpu", "--plan", "--no-time"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory")]
    assert "on the CPU in float32: weights 0.5 MiB, their merged copy 0.4 MiB, adapter and optimizer" in line
    assert "training pass of up to 4,096 tokens" in line


def test_a_pass_that_is_longer_than_memory_is_refused_and_never_counted_as_what_is_left(tiny_dir: Path) -> None:
    settings = EngineConfig(device="cpu", micro_batch_tokens=4_000_000)
    config = load_config("guess_number", ["model=tiny"])
    limits = RolloutLimits(max_turns=8, max_tokens_per_turn=512, max_trajectory_tokens=1_000_000)
    facts = read_facts(tiny_dir)
    short, long = (estimate_memory(config, settings, CPU, facts, limits, num_attempts=n) for n in (1, 10_000))
    assert short.num_pass_tokens == 1_000_000, "no more than the dialogues of a step"
    assert long.num_pass_tokens == 16_000_000
    assert long.is_recomputed
    kept = training_pass_bytes(facts, CPU, long.num_pass_tokens, rank=config.model.rank, train_unembed=True)
    assert kept / 4 < long.training_pass < kept
    huge = replace(long, training_pass=2 * machine_bytes())
    with pytest.raises(ConfigError, match=r"hold 16,000,000 tokens, which need .* use engine.micro_batch_tokens=\d"):
        huge.check_fits()
    with pytest.raises(ConfigError, match="even in parts of 256;"):
        replace(huge, is_recomputed=False, num_part_tokens=256).check_fits()
    replace(huge, is_pass_chosen=False).check_fits()
