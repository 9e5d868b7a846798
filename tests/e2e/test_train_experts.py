"""`turnwise train` on a tiny mixture of experts: exact certificates, and the sampler's experts in the trainer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from turnwise.cli import main
from turnwise.models.store import resolve_model
from turnwise.runlog.reader import RunReader


def write_experts(directory: Path) -> Path:
    """A random model with the tokenizer of `tiny`."""
    tiny = resolve_model("tiny").directory
    known = AutoConfig.from_pretrained(tiny)
    config = Qwen3MoeConfig(
        vocab_size=known.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,  # pyright: ignore[reportCallIssue] - it takes any keyword
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        eos_token_id=known.eos_token_id,
        pad_token_id=known.pad_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    for file in tiny.iterdir():
        if "token" in file.name or "template" in file.name:
            shutil.copy(file, directory / file.name)
    return directory


def test_a_run_on_experts_is_exact_and_replays_every_choice(tmp_path: Path) -> None:
    model, place = write_experts(tmp_path / "model"), tmp_path / "run"
    small = ["train.steps=2", "train.tasks_per_step=2", "eval.tasks=0", "warmup.steps=0", "model.train_router=true"]
    assert (
        main(["train", "guess_number", f"model={model}", "model.routing_replay=true", f"run.dir={place}", *small]) == 0
    )
    assert main(["certify", str(place)]) == 0
    run = RunReader(place)
    assert {share for _, share in run.metric("train/routing_replayed")} == {1.0}, "steps that train replay all"
    assert all(flips < 0.01 for _, flips in run.metric("train/routing_flips"))
    assert [row.is_exact for row in run.certificates()] == [True, True]
    run.close()


def test_replay_is_refused_where_nobody_knows_the_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = f"run.dir={tmp_path / 'run'}"
    for options, told in (
        (["model=tiny", "model.routing_replay=true"], "no routed experts"),
        (["model=tiny", "model.expert_rank=3"], "no routed experts"),
        (["model=tiny", "model.routing_replay=true", "cluster.learners=2"], "cluster.learners=2"),
        (["model=tiny", "model.routing_replay=true", "rollout.backend=vllm"], "rollout.backend=vllm"),
    ):
        assert main(["train", "guess_number", *options, place, "--plan"]) != 0
        assert told in capsys.readouterr().err
