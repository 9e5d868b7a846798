"""Training ahead through the real command: learning, speed, steering, stopping, and what it says while it goes on."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from command_line import start_cli
from turnwise.bench import async_train
from turnwise.cli import main
from turnwise.runlog.reader import RunReader
from turnwise.watch.status import is_training, read_status

WORLD = "turnwise.bench.slow_world:SlowWorld"
ECHO = f"{Path(__file__).with_name('echo_world.py')}:EchoWorld"
SMALL = (
    "model=tiny",
    "train.tasks_per_step=2",
    "rollout.group_size=4",
    "eval.tasks=2",
    "eval.every=0",
    "train.max_empty_steps=1000",
    "run.dialogues=0",
)
DELAYS = ("env.options.median_s=0.02", "env.options.p99_s=0.2")


@pytest.mark.usefixtures("tiny_dir")
@pytest.mark.parametrize(
    "options",
    [
        ("method=grpo",),
        ("method=grpo", "rollout.kv_across_updates=keep", "train.min_batch=1"),
        ("method=la_grpo",),
        ("method=ppo", "critic.pretrain_steps=1", "rollout.group_size=1", "train.min_batch=1"),
        ("method=grpo", "method.loss_fn=ppo", "method.old_policy=true", "method.correction=token_tis"),
        ("method=grpo", "method.loss_fn=ppo", "method.old_policy=true", "method.old_policy_from=loglinear"),
        ("method=grpo", "train.max_wait=4", "train.substeps=2"),
    ],
    ids=" ".join,
)
def test_every_kind_of_method_trains_ahead(options: tuple[str, ...], tmp_path: Path) -> None:
    directory = tmp_path / "run"
    command = ["train", ECHO, *SMALL, *options, "train.steps=5", "train.max_staleness=2", f"run.dir={directory}"]
    assert main(command) == 0
    with RunReader(directory) as run:
        assert len(run.metric("train/grad_norm")) == 5
        staleness = [value for _, value in run.metric("pool/staleness_max")]
        assert max(staleness) <= 2
        assert max(staleness) >= 1, "something was learned from that was older than the weights"
        assert all(row.is_exact for row in run.certificates())
        assert len(run.metric("pool/length_bias")) == 5
        assert len(run.metric("train/ess_fraction")) == 5
        names = run.metric_names()
        assert "train/geo_outside_fraction" in names


@pytest.mark.usefixtures("tiny_dir")
def test_the_benchmark_of_playing_ahead_plays_both_ways_and_keeps_to_the_lag() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model")
    async_train.add_options(parser)
    short = ["--seeds", "1", "--steps", "6", "--median-s", "0.02", "--p99-s", "0.8", "--held-out", "4"]
    figure = async_train.run(parser.parse_args(short))
    assert figure["speedup"] > 0  # how much is a matter of what else the machine does
    assert 0 < figure["staleness_max"] <= 2


@contextmanager
def _training(directory: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A run in a process of its own."""
    command = ["train", WORLD, *SMALL, "eval.tasks=0", *options, f"run.dir={directory}"]
    process = start_cli(*command)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    ends_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends_s, "it did not come about"
        time.sleep(0.05)


def _step(directory: Path) -> int:
    status = read_status(directory)
    return -1 if status is None else status.step


@pytest.mark.usefixtures("tiny_dir")
def test_a_run_can_be_looked_at_steered_and_stopped_and_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    with _training(directory, *DELAYS, "train.max_staleness=2", "train.steps=1000") as process:
        _wait_until(lambda: _step(directory) >= 1)
        assert main(["status", str(directory)]) == 0
        shown = capsys.readouterr().out
        for expected in (f"training, process {process.pid}", "of 1000", "queued", "attempts playing", "reward"):
            assert expected in shown
        assert main(["status", str(directory), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["is_training"]
        assert main(["steer", str(directory), "train.learning_rate=0.002", "train.steps=2000"]) == 0
        now = _step(directory)
        _wait_until(lambda: _step(directory) >= now + 3)
        assert main(["stop", str(directory)]) == 0
        assert process.wait(timeout=120) == 130
    assert "stopped; go on with" in capsys.readouterr().out
    assert not is_training(directory)
    with RunReader(directory) as run:
        assert {event.detail["setting"] for event in run.events("steered")} == {"train.learning_rate", "train.steps"}
        assert "learning_rate: 0.002" in run.config_yaml
        done = run.checkpoints()[-1].step
        assert run.pool(done), "what was under way is kept"
    assert main(["status", str(directory)]) == 0
    assert "state    stopped" in capsys.readouterr().out
    assert main(["train", "--resume", str(directory), f"train.steps={done + 2}"]) == 0
    assert f"resume       after {done} steps, with" in capsys.readouterr().out
    with RunReader(directory) as run:
        assert [step for step, _ in run.metric("time/step_s")] == list(range(1, done + 3))
        tasks = [row.task_id for row in run.attempts(phase="train")]
        assert {tasks.count(task) for task in tasks} == {4}, "each group once"


def _is_waiting_for_env(directory: Path) -> bool:
    status = read_status(directory)
    return status is not None and any(call.party == "env" for call in status.pending_calls)


@pytest.mark.usefixtures("tiny_dir")
def test_a_hard_stop_ends_at_once_and_an_interrupt_saves_first(tmp_path: Path) -> None:
    slow = ("env.options.median_s=30", "env.options.p99_s=60", "train.steps=5")
    with _training(tmp_path / "a", *slow) as one, _training(tmp_path / "b", *slow) as two:
        for name in ("a", "b"):
            _wait_until(lambda name=name: _is_waiting_for_env(tmp_path / name))
        assert main(["stop", str(tmp_path / "a"), "--now"]) == 0
        two.send_signal(signal.SIGINT)
        assert one.wait(timeout=120) == 130
        assert two.wait(timeout=120) == 130
    with RunReader(tmp_path / "a") as hard, RunReader(tmp_path / "b") as graceful:
        assert hard.checkpoints() == []
        assert [row.step for row in graceful.checkpoints()] == [0], "playing is cut short, and the run is saved"
