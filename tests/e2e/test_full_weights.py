"""`model.train=full` from the command line: it learns, survives kills, exports, and says what it takes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

import turnwise as tw
from campaigns.train_kills import Killer
from turnwise.cli import main
from turnwise.client.checkpoints import CheckpointStore
from turnwise.runlog.reader import RunReader

SLOW = "turnwise.bench.slow_world:SlowWorld"
ECHO = f"{Path(__file__).with_name('echo_world.py')}:EchoWorld"
SMALL = (
    *("model=tiny", "model.train=full", "train.tasks_per_step=2", "train.learning_rate=3e-3", "train.save_every=1"),
    *("train.max_empty_steps=1000", "eval.tasks=0", "run.dialogues=0", "rollout.deterministic=true"),
)


def _saved(directory: Path) -> dict[str, np.ndarray]:
    """Weights and optimizer state of a run's last checkpoint."""
    with RunReader(directory) as run:
        place = CheckpointStore(directory).directory(run.checkpoints()[-1].path)
    return load_file(place / "model.safetensors") | load_file(place / "optimizer.safetensors")


@pytest.mark.usefixtures("tiny_dir")
def test_a_run_that_is_killed_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    delays = ("env.options.median_s=0.01", "env.options.p99_s=0.02")
    common = (SLOW, *SMALL, *delays, "rollout.group_size=3", "rollout.min_group_size=3", "train.steps=5")
    assert main(["train", *common, f"run.dir={tmp_path / 'whole'}"]) == 0
    arguments = (*common, f"run.dir={tmp_path / 'killed'}")
    killer = Killer(arguments, tmp_path / "killed", random.Random(1))
    killer.kill_at_step(2, within_s=0.05)
    assert killer.problems == []
    assert killer.killed.total()
    assert main(["train", "--resume", str(tmp_path / "killed")]) == 0
    ours, theirs = _saved(tmp_path / "whole"), _saved(tmp_path / "killed")
    assert set(ours) == set(theirs)
    for name, values in ours.items():
        np.testing.assert_array_equal(values, theirs[name], err_msg=name)


@pytest.mark.usefixtures("tiny_dir")
def test_ppo_trains_all_weights_beside_a_critic_and_the_export_is_what_was_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, out = tmp_path / "run", tmp_path / "model"
    options = ("method=ppo", "rollout.group_size=4", "critic.pretrain_steps=2", "train.steps=2")
    assert main(["train", ECHO, *SMALL, *options, f"run.dir={directory}"]) == 0
    assert main(["export", str(directory), "--peft", str(out)]) == 2
    assert "trained all weights, so there is no adapter; add --merged" in capsys.readouterr().err
    assert main(["export", str(directory), "--merged", str(out)]) == 0
    with RunReader(directory) as run:
        path = run.checkpoints()[-1].path
    ids = [5, 17, 40, 41, 9, 77, 300, 12]
    with tw.ServiceClient(data_dir=directory) as service:
        found = service.create_sampling_client(model_path=path).compute_logprobs(tw.types.ModelInput.from_ints(ids))
        base = service.create_sampling_client(base_model="tiny").compute_logprobs(tw.types.ModelInput.from_ints(ids))
        sampled, untrained = np.array(found.result()[1:], float), np.array(base.result()[1:], float)
    logprobs = AutoModelForCausalLM.from_pretrained(out)(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    np.testing.assert_allclose(sampled, expected, atol=1e-5)
    assert np.abs(sampled - untrained).max() > 1e-3
    _check_export_by_path(CheckpointStore(directory).directory(path), tmp_path / "by_path", capsys)


def _check_export_by_path(checkpoint: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The directory of a checkpoint is exported as its run is."""
    assert main(["export", str(checkpoint), "--peft", str(out)]) == 2
    assert "trained all weights, so there is no adapter; add --merged" in capsys.readouterr().err
    assert main(["export", str(checkpoint), "--merged", str(out)]) == 0
    saved, exported = (load_file(place / "model.safetensors") for place in (checkpoint, out))
    assert set(saved) == set(exported)
    for name, values in saved.items():
        np.testing.assert_array_equal(exported[name], values, err_msg=name)


@pytest.mark.usefixtures("tiny_dir")
def test_the_plan_says_what_all_weights_take_and_refuses_what_cannot_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["train", ECHO, "model=tiny", "model.train=full", "--plan", "--no-time"]) == 0
    plan = capsys.readouterr().out
    assert "all weights, 131k trained" in plan
    assert "learning rate 1e-05" in plan
    assert "frozen base 0.5 MiB, trained weights and optimizer 3.0 MiB" in plan  # 131 k x 4, and x 6 float32 numbers
    monkeypatch.setattr("turnwise.training.memory.machine_bytes", lambda: 3 << 20)
    assert main(["train", ECHO, "model=tiny", "model.train=full", "--plan"]) == 2
    assert "weights and what is trained need 3.5 MiB, and this machine has 3.0 MiB" in capsys.readouterr().err


@pytest.mark.usefixtures("tiny_dir")
def test_options_that_full_weights_do_not_read_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    refused = {
        "model.rank=8": "rank is for a LoRA adapter",
        "model.base_url=http://127.0.0.1:1": "a service trains LoRA adapters only",
    }
    for option, message in refused.items():
        assert main(["train", ECHO, "model=tiny", "model.train=full", option, "--plan"]) == 2
        assert message in capsys.readouterr().err
    assert main(["train", "guess_number_tiny", "model.train=full", "--plan", "--no-time"]) == 0
    assert "model.rank=32 of guess_number_tiny is for a LoRA adapter and is left out" in capsys.readouterr().out
