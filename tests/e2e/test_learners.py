"""`cluster.learners=2` from the command line: same weights as one process, resumed on either count, and ends that are
told."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from campaigns.train_kills import start
from processes import processes_below
from turnwise.cli import main
from turnwise.client.checkpoints import CheckpointStore
from turnwise.runlog.reader import RunReader, is_run

ECHO = f"{Path(__file__).with_name('echo_world.py')}:EchoWorld"
SLOW = "turnwise.bench.slow_world:SlowWorld"
SMALL = (
    *("model=tiny", "train.tasks_per_step=2", "rollout.group_size=4", "train.learning_rate=1e-3", "eval.tasks=0"),
    *("train.save_every=1", "train.max_empty_steps=1000", "run.dialogues=0", "rollout.deterministic=true"),
)
TWO = ("cluster.learners=2", "cluster.deadline_s=60")


def _saved(directory: Path) -> dict[str, np.ndarray]:
    with RunReader(directory) as run:
        place = CheckpointStore(directory).directory(run.checkpoints()[-1].path)
    return load_file(place / "adapter_model.safetensors")


@pytest.mark.usefixtures("tiny_dir")
def test_a_run_goes_on_with_another_count_of_learners_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole, up, down = (tmp_path / name for name in ("whole", "up", "down"))
    ppo = (ECHO, *SMALL, "method=ppo", "critic.pretrain_steps=0")
    assert main(["train", *ppo, "train.steps=4", f"run.dir={whole}"]) == 0
    assert main(["train", *ppo, "train.steps=2", f"run.dir={up}"]) == 0
    assert main(["train", "--resume", str(up), "train.steps=4", *TWO]) == 0
    assert main(["train", *ppo, *TWO, "train.steps=2", f"run.dir={down}"]) == 0
    one = ("cluster.learners=1", "cluster.deadline_s=600")
    assert main(["train", "--resume", str(down), "train.steps=4", *one]) == 0
    expected = _saved(whole)
    with RunReader(whole) as run:
        losses = run.metric("train/loss")
    for other in (up, down):
        for name, values in _saved(other).items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=1e-6, err_msg=f"{other.name}: {name}")
        with RunReader(other) as run:
            np.testing.assert_allclose(run.metric("train/loss"), losses, rtol=1e-4, atol=1e-6)


def _wait_for_steps(directory: Path, count: int) -> None:
    ends_s = time.monotonic() + 120
    while time.monotonic() < ends_s:
        if is_run(directory):
            with RunReader(directory) as run:
                if len(run.metric("time/step_s")) >= count:
                    return
        time.sleep(0.05)
    raise AssertionError(f"{directory} did not make {count} steps")


def _learner_of(pid: int) -> int:
    commands = {one: Path(f"/proc/{one}/cmdline").read_bytes() for one in processes_below(pid)}
    (learner,) = [one for one, command in commands.items() if b"turnwise.engine.learners.process" in command]
    return learner


@pytest.mark.usefixtures("tiny_dir")
def test_a_killed_learner_ends_the_run_with_its_name_and_a_killed_run_leaves_no_learner(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    delays = ("env.options.median_s=0.01", "env.options.p99_s=0.02")
    process = start(SLOW, *SMALL, *delays, *TWO, "cluster.max_restarts=0", "train.steps=1000", f"run.dir={directory}")
    _wait_for_steps(directory, 2)
    learner = _learner_of(process.pid)
    os.kill(learner, signal.SIGKILL)
    said = process.communicate(timeout=120)[0]
    assert process.returncode != 0
    assert f"learner 1 (process {learner})" in str(said)
    assert "ended with exit code -9. The last checkpoint is kept" in str(said)
    with RunReader(directory) as run:
        assert len(run.events("failed")) == 1
        num_steps = len(run.metric("time/step_s"))
    resumed = start("--resume", str(directory))
    _wait_for_steps(directory, num_steps + 1)
    learner = _learner_of(resumed.pid)
    resumed.kill()
    resumed.communicate()
    ends_s = time.monotonic() + 20
    while Path(f"/proc/{learner}").exists() and time.monotonic() < ends_s:
        time.sleep(0.05)
    assert not Path(f"/proc/{learner}").exists()
