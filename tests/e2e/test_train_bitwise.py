"""`turnwise train` with `engine.bitwise`: the drift is zero, and what cannot have that is refused by the plan."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig, MistralConfig

from naive import make_model
from turnwise.cli import main
from turnwise.models.store import resolve_model
from turnwise.runlog.reader import RunReader

SMALL = ("train.steps=2", "train.tasks_per_step=8", "eval.tasks=0", "warmup.steps=60")


def test_the_drift_of_a_run_is_exactly_zero(tmp_path: Path) -> None:
    usual, exact = tmp_path / "usual", tmp_path / "exact"
    assert main(["train", "guess_number_tiny", *SMALL, f"run.dir={usual}"]) == 0
    assert main(["train", "guess_number_tiny", *SMALL, f"run.dir={exact}", "engine.bitwise=true"]) == 0
    found = {}
    for place in (usual, exact):
        run = RunReader(place)
        found[place] = [value for _, value in run.metric("drift/abs_max")]
        assert sum(value for _, value in run.metric("drift/tokens")) > 0
        run.close()
    assert found[exact] == [0.0] * len(found[usual])
    assert max(found[usual]) > 0


def test_what_cannot_agree_is_refused_by_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = resolve_model("tiny").directory
    shape = {"vocab_size": AutoConfig.from_pretrained(tiny).vocab_size, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MistralConfig(**shape, **heads, max_position_embeddings=4096, sliding_window=64)
    windows = make_model(config, tmp_path / "windows")
    for file in tiny.iterdir():
        if "token" in file.name or "template" in file.name:
            shutil.copy(file, windows / file.name)
    for options, told in (
        ([f"model={windows}"], "sliding window"),
        (["model=tiny", "rollout.backend=vllm"], "rollout.backend=vllm"),
        (["model=tiny", "engine.merge_adapter=always"], "merge_adapter"),
        (["model=tiny", "cluster.learners=2", "cluster.shard=true"], "cluster.shard=true"),
    ):
        place = f"run.dir={tmp_path / 'run'}"
        assert main(["train", "guess_number", *options, "engine.bitwise=true", place, "--plan", "--no-time"]) != 0
        assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
