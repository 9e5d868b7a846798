"""`cluster.learners=2` from the command line: same weights as one process, resumed on either count, and ends that are
told."""

from __future__ import annotations

import os
import signal
import threading
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
    names = [path for path in place.glob("*.safetensors") if path.name != "optimizer.safetensors"]
    return {name: values for path in names for name, values in load_file(path).items()}


def _assert_equal_weights(directory: Path, expected: Path) -> None:
    saved, wanted = _saved(directory), _saved(expected)
    assert saved.keys() == wanted.keys()
    for name, values in saved.items():
        np.testing.assert_allclose(values, wanted[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.usefixtures("tiny_dir")
@pytest.mark.parametrize("trained", [("method=ppo", "critic.pretrain_steps=0"), ("model.train=full",)])
def test_a_run_goes_on_with_two_learners_and_with_one_again_and_ends_with_the_same_weights(
    trained: tuple[str, ...], tmp_path: Path
) -> None:
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    options = (ECHO, *SMALL, *trained)
    assert main(["train", *options, "train.steps=4", f"run.dir={whole}"]) == 0
    assert main(["train", *options, "train.steps=1", f"run.dir={changed}"]) == 0
    assert main(["train", "--resume", str(changed), "train.steps=3", *TWO]) == 0
    one = ("cluster.learners=1", "cluster.deadline_s=600")
    assert main(["train", "--resume", str(changed), "train.steps=4", *one]) == 0
    _assert_equal_weights(changed, whole)
    with RunReader(whole) as run, RunReader(changed) as other:
        np.testing.assert_allclose(other.metric("train/loss"), run.metric("train/loss"), rtol=1e-4, atol=1e-6)


def _wait_for_steps(directory: Path, count: int) -> None:
    ends_s = time.monotonic() + 120
    while time.monotonic() < ends_s:
        if is_run(directory):
            with RunReader(directory) as run:
                if len(run.metric("time/step_s")) >= count:
                    return
        time.sleep(0.05)
    raise AssertionError(f"{directory} did not make {count} steps")


def _processes_of(pid: int, module: str) -> list[int]:
    commands = {one: Path(f"/proc/{one}/cmdline").read_bytes() for one in processes_below(pid)}
    return [one for one, command in commands.items() if module.encode() in command]


def _learner_of(pid: int) -> int:
    (learner,) = _processes_of(pid, "turnwise.engine.learners.process")
    return learner


@pytest.mark.usefixtures("tiny_dir")
def test_a_killed_learner_ends_the_run_with_its_name_and_a_killed_run_leaves_no_learner_and_no_env_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, killed = tmp_path / "run", list[int]()

    def kill() -> None:
        _wait_for_steps(directory, 2)
        killed.append(_learner_of(os.getpid()))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    delays = ("env.options.median_s=0.01", "env.options.p99_s=0.02")
    endless = ("cluster.max_restarts=0", "train.steps=1000", f"run.dir={directory}")
    assert main(["train", SLOW, *SMALL, *delays, *TWO, *endless]) != 0
    killer.join()
    said = capsys.readouterr().err
    assert f"learner 1 (process {killed[0]})" in said
    assert "ended with exit code -9. The last checkpoint is kept" in said
    with RunReader(directory) as run:
        assert len(run.events("failed")) == 1
        num_steps = len(run.metric("time/step_s"))
    resumed = start("--resume", str(directory), "cluster.env_workers=2")
    _wait_for_steps(directory, num_steps + 1)
    left = {_learner_of(resumed.pid), *_processes_of(resumed.pid, "turnwise.env_service.process")}
    assert len(left) == 3
    resumed.kill()
    resumed.communicate()
    ends_s = time.monotonic() + 20
    while left and time.monotonic() < ends_s:
        left = {one for one in left if Path(f"/proc/{one}").exists()}
        time.sleep(0.05)
    assert not left


def _kill_learner(directory: Path, num_steps: int) -> threading.Thread:
    """Kill the other learner when so many steps are done."""

    def kill() -> None:
        _wait_for_steps(directory, num_steps)
        os.kill(_learner_of(os.getpid()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    return killer


@pytest.mark.usefixtures("tiny_dir")
def test_a_run_below_its_least_learners_stops_with_a_checkpoint_of_its_last_finished_step_and_goes_on_there(
    tmp_path: Path,
) -> None:
    """In the middle of a step with two optimizer steps of the policy and of the critic."""
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    options = (ECHO, *SMALL, "method=ppo", "critic.pretrain_steps=0", "train.substeps=2", "train.save_every=1000")
    killer = _kill_learner(stopped, 3)
    endless = ("cluster.max_restarts=0", "train.steps=1000", f"run.dir={stopped}")
    assert main(["train", *options, *TWO, *endless]) != 0
    killer.join()
    with RunReader(stopped) as run:
        num_steps = len(run.metric("time/step_s"))
        assert [row.step for row in run.checkpoints()] == [num_steps]
    steps = f"train.steps={num_steps + 2}"
    one = ("cluster.learners=1", "cluster.deadline_s=600", "cluster.max_restarts=3")
    assert main(["train", "--resume", str(stopped), steps, *one]) == 0
    assert main(["train", *options, steps, f"run.dir={whole}"]) == 0
    _assert_equal_weights(stopped, whole)
    played = []
    for directory in (stopped, whole):
        with RunReader(directory) as run:
            rows = run.attempts(phase="train")
            tokens = {
                row.id: tuple(tuple(turn.sampled_ids) for turn in run.attempt(row.id).trajectory.turns) for row in rows
            }
            played.append(sorted((row.step, row.task_id, row.attempt, tokens[row.id]) for row in rows))
    assert played[0] == played[1], "nothing is lost, and nothing is there twice"
