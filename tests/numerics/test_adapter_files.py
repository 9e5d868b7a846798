"""Adapters on disk: ours in PEFT, PEFT's in ours, and a run that goes on from a file as if it had not stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from naive import assert_close, displaced_adapter, random_ids, relative_error, rl_datum, run
from turnwise.engine.engine import Engine
from turnwise.engine.training.adapter_files import read_lora_config
from turnwise.errors import CheckpointError
from turnwise.types import AdamParams, LoraConfig

MakeEngine = Callable[..., Engine]
IDS = random_ids(30, 1)
DATUM = rl_datum(IDS, start=0)


def peft_logprobs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([IDS[:-1]])).logits[0]
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # PEFT, of an adapter on a tied head
@pytest.mark.parametrize("targets", [{}, {"train_mlp": False}, {"train_attn": False, "train_unembed": False}])
def test_peft_reads_our_adapter_and_gets_the_same_logprobs(
    arch_dir: Path, make_engine: MakeEngine, tmp_path: Path, targets: dict[str, bool]
) -> None:
    engine = make_engine(arch_dir)
    adapter = displaced_adapter(engine, rank=5, **targets)
    engine.save_adapter(adapter, tmp_path / "ours", with_optimizer=False)
    base = AutoModelForCausalLM.from_pretrained(arch_dir, dtype=torch.float32)
    theirs = peft_logprobs(PeftModel.from_pretrained(base, tmp_path / "ours"))
    ours = run(engine.forward(adapter, [DATUM], "importance_sampling", None)).loss_fn_outputs[0]["logprobs"]
    assert_close(ours.to_numpy(), theirs.numpy(), 1e-4)


@pytest.mark.parametrize("options", [{"lora_alpha": 32}, {"lora_alpha": 7}, {"lora_alpha": 12, "use_rslora": True}])
def test_we_read_pefts_adapter_and_get_the_same_logprobs(
    arch_dir: Path, make_engine: MakeEngine, tmp_path: Path, options: dict[str, Any]
) -> None:
    torch.manual_seed(2)
    base = AutoModelForCausalLM.from_pretrained(arch_dir, dtype=torch.float32)
    model = get_peft_model(base, PeftLoraConfig(r=6, target_modules=["q_proj", "v_proj", "down_proj"], **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    model.save_pretrained(str(tmp_path / "theirs"))
    engine = make_engine(arch_dir)
    lora = read_lora_config(tmp_path / "theirs")
    assert (lora.rank, lora.train_attn, lora.train_mlp, lora.train_unembed) == (6, True, True, False)
    adapter = engine.create_adapter(lora)
    engine.load_adapter(adapter, tmp_path / "theirs", with_optimizer=False)
    ours = run(engine.forward(adapter, [DATUM], "importance_sampling", None)).loss_fn_outputs[0]["logprobs"]
    assert_close(ours.to_numpy(), peft_logprobs(model).numpy(), 1e-4)


def train(engine: Engine, adapter, steps: range) -> None:
    for step in steps:
        datums = [rl_datum(random_ids(20, 100 + step), start=4, seed=step)]
        run(engine.forward_backward(adapter, datums, "importance_sampling", None))
        engine.optim_step(adapter, AdamParams(learning_rate=1e-2))


def test_a_run_resumed_from_disk_equals_the_uninterrupted_one(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    straight = displaced_adapter(engine)
    train(engine, straight, range(6))
    first = displaced_adapter(engine)
    train(engine, first, range(3))
    engine.save_adapter(first, tmp_path / "state", with_optimizer=True)
    second_engine = make_engine()
    second = second_engine.create_adapter(LoraConfig(rank=4, seed=99))
    second_engine.load_adapter(second, tmp_path / "state", with_optimizer=True)
    train(second_engine, second, range(3, 6))
    assert torch.equal(second.flat, straight.flat)
    assert second.num_steps == 6


def test_without_its_optimizer_a_loaded_adapter_starts_fresh_moments(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    adapter = displaced_adapter(engine)
    train(engine, adapter, range(2))
    engine.save_adapter(adapter, tmp_path / "state", with_optimizer=True)
    other = engine.create_adapter(LoraConfig(rank=4))
    engine.load_adapter(other, tmp_path / "state", with_optimizer=False)
    assert torch.equal(other.flat, adapter.flat)
    assert other.num_steps == 0
    assert not other.exp_avg.any()


def test_a_loaded_policy_equals_the_one_that_was_saved(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    policy = engine.publish(displaced_adapter(engine))
    engine.save_policy(policy, tmp_path / "policy")
    loaded = engine.load_policy(tmp_path / "policy")
    assert relative_error(loaded.flat, policy.flat) == 0
    assert loaded.version != policy.version


def test_damage_and_mismatch_are_named(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    adapter = displaced_adapter(engine)
    state = tmp_path / "state"
    with pytest.raises(CheckpointError, match="not an adapter"):
        engine.load_adapter(adapter, tmp_path / "nowhere", with_optimizer=False)
    engine.save_adapter(adapter, state, with_optimizer=False)
    with pytest.raises(CheckpointError, match="without optimizer state"):
        engine.load_adapter(adapter, state, with_optimizer=True)
    other = engine.create_adapter(LoraConfig(rank=9))
    with pytest.raises(CheckpointError, match="rank 4; this adapter has rank 9"):
        engine.load_adapter(other, state, with_optimizer=False)
    config = json.loads((state / "adapter_config.json").read_text())
    (state / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(CheckpointError, match="use_dora"):
        engine.load_adapter(adapter, state, with_optimizer=False)
    (state / "adapter_config.json").write_text(json.dumps(config))
    weights = state / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="damaged"):
        engine.load_adapter(adapter, state, with_optimizer=False)


def test_a_failed_load_changes_nothing(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    adapter = displaced_adapter(engine)
    train(engine, adapter, range(1))
    engine.save_adapter(adapter, tmp_path / "state", with_optimizer=True)
    optimizer = tmp_path / "state" / "optimizer.safetensors"
    optimizer.write_bytes(optimizer.read_bytes()[:-8])
    target = displaced_adapter(engine, seed=8)
    before = target.flat.clone()
    with pytest.raises(CheckpointError):
        engine.load_adapter(target, tmp_path / "state", with_optimizer=True)
    assert torch.equal(target.flat, before)
    assert target.num_steps == 0


def test_saving_over_a_checkpoint_replaces_it_whole(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    adapter = displaced_adapter(engine)
    engine.save_adapter(adapter, tmp_path / "state", with_optimizer=True)
    train(engine, adapter, range(1))
    engine.save_adapter(adapter, tmp_path / "state", with_optimizer=False)
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
