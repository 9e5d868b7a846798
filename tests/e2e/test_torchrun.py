"""`torchrun -m turnwise.cli train`: its processes are the run's learners."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import turnwise as tw
from command_line import run_here, run_module
from turnwise.client.checkpoints import CheckpointStore
from turnwise.errors import ConfigError
from turnwise.runlog.reader import RunReader

ECHO = f"{Path(__file__).with_name('echo_world.py')}:EchoWorld"
SMALL = (
    *(ECHO, "model=tiny", "train.tasks_per_step=2", "rollout.group_size=4", "train.learning_rate=1e-3"),
    *("train.steps=2", "eval.tasks=0", "run.dialogues=0", "rollout.deterministic=true"),
)
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "turnwise.cli", "train")


def _saved(directory: Path) -> dict[str, np.ndarray]:
    with RunReader(directory) as run:
        place = CheckpointStore(directory).directory(run.checkpoints()[-1].path)
    return load_file(place / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_dir")
def test_two_ranks_of_torchrun_train_what_one_process_trains(tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    run_here("train", *SMALL, f"run.dir={alone}")
    said = run_module(*TORCHRUN, *SMALL, "cluster.shard=true", f"run.dir={together}")
    assert said.count("done in") == 1, "rank 0 alone leads a run"
    assert "2 processes on this machine, each with 1/2 of the weights" in said
    expected = _saved(alone)
    for name, values in _saved(together).items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.usefixtures("tiny_dir")
def test_what_torchrun_decides_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    said = run_here("train", *SMALL, "cluster.learners=3", code=2)
    assert "cluster.learners=3, and torchrun has started 2 processes" in said
    for option in ("cluster.max_restarts=3", "cluster.min_learners=1"):
        assert f"{option.partition('=')[0]} is not read under torchrun" in run_here("train", *SMALL, option, code=2)
    said = run_here("train", *SMALL, "cluster.env_workers=2", "cluster.address=auto", code=2)
    assert "cluster.address=auto under torchrun" in said
    assert "cluster.samplers=2 under torchrun" in run_here("train", *SMALL, "cluster.samplers=2", code=2)


def test_only_train_uses_the_processes_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    world = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    assert "turnwise compare under torchrun" in run_here("compare", "guess_number", "grpo,ppo", code=2)
    assert "turnwise flywheel under torchrun" in run_here("flywheel", "wheel.yaml", code=2)
    with pytest.raises(ConfigError, match=r"a Python program starts under torchrun.*set cluster\.learners=2"):
        tw.train("guess_number", model="tiny", observer=tw.Observer())
