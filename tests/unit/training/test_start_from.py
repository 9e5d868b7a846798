from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import turnwise as tw
from turnwise.client.checkpoints import CheckpointStore
from turnwise.errors import ConfigError

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("tiny_dir")]
QUIET = {"observer": tw.Observer(), "eval": {"tasks": 8}, "rollout": {"group_size": 2}}
SMALL = {"warmup.steps": 2, "train.tasks_per_step": 1}
OVERRIDES = [f"{key}={value}" for key, value in SMALL.items()]


def _weights(run: tw.Run, step: int) -> dict[str, np.ndarray]:
    row = next(row for row in run.checkpoints if row.step == step)
    return load_file(CheckpointStore(run.directory).directory(row.path) / "adapter_model.safetensors")


def test_a_run_starts_with_the_weights_of_another_also_in_another_world(tmp_path: Path) -> None:
    first = tw.train("guess_number", model="tiny", steps=1, directory=tmp_path / "a", overrides=OVERRIDES, **QUIET)
    model = {"name": "tiny", "from": str(tmp_path / "a")}
    quiet = {**QUIET, "warmup": {"steps": 0}}
    second = tw.train("key_door", model=model, steps=0, directory=tmp_path / "b", **quiet)
    ours, theirs = _weights(second, 0), _weights(first, first.best.step)
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)
    assert any(value.any() for name, value in ours.items() if "lora_B" in name), "the other run has learned something"
    pinned = second.config.model.start_from
    assert Path(pinned).is_dir(), "one checkpoint is written down, not a run that may go on"
    assert Path(pinned).is_relative_to((tmp_path / "a").resolve())


def test_weights_that_do_not_fit_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    tw.train("guess_number", model="tiny", steps=0, directory=tmp_path / "a", overrides=OVERRIDES, **QUIET)
    checkpoint = tw.Run.open(tmp_path / "a").best.files
    for start in (tmp_path / "a", checkpoint):
        with pytest.raises(ConfigError, match="rank"):
            tw.train("guess_number", overrides=["model=tiny", "model.rank=8", f"model.from={start}"], **QUIET)
    with pytest.raises(ConfigError, match="neither a run nor a checkpoint"):
        tw.train("guess_number", overrides=["model=tiny", f"model.from={tmp_path}"], **QUIET)
