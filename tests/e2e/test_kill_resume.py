"""`kill -9` at random moments: every resume works, every deal is consumed exactly once, no more and no less.

`TURNWISE_KILLS=50 pytest tests/e2e/test_kill_resume.py` kills that many times; `make campaign NAME=train_kills` also
compares what a run that is killed has learned with what others have.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from campaigns.train_kills import expected_attempts, learned_attempts, run_killed, start
from turnwise.cli import main
from turnwise.client.checkpoints import CheckpointStore
from turnwise.runlog.reader import RunReader, is_run
from turnwise.training.progress import num_drawn_tokens

NUM_KILLS = int(os.environ.get("TURNWISE_KILLS", "3"))
WORLD = "turnwise.bench.slow_world:SlowWorld"
ECHO = f"{Path(__file__).with_name('echo_world.py')}:EchoWorld"
SMALL = (
    "model=tiny",
    "train.tasks_per_step=2",
    "rollout.group_size=3",
    "rollout.min_group_size=3",
    "train.learning_rate=1e-2",
    "train.save_every=1",
    "train.keep_checkpoints=1",
    "train.max_empty_steps=1000",
    "eval.tasks=0",
    "run.dialogues=0",
)


def _weights(run: RunReader) -> dict[str, np.ndarray]:
    directory = CheckpointStore(run.directory).directory(run.checkpoints()[-1].path)
    return load_file(directory / "adapter_model.safetensors")


def _train_through_kills(directory: Path, num_kills: int, num_steps: int, *options: str) -> int:
    """Start, kill, resume, kill, ... and let the last one finish; how many were killed."""
    arguments = (WORLD, *SMALL, *options, f"train.steps={num_steps}", f"run.dir={directory}")
    killer = run_killed(arguments, directory, kills=num_kills, num_steps=num_steps, step_s=0.5, seed=num_kills)
    assert killer.problems == []
    return killer.killed.total()


@pytest.mark.timeout(300 + 20 * NUM_KILLS)
@pytest.mark.usefixtures("tiny_dir")
def test_an_async_run_that_is_killed_again_and_again_consumes_every_task_exactly_once(tmp_path: Path) -> None:
    steps = 6 * NUM_KILLS
    delays = ("env.options.median_s=0.05", "env.options.p99_s=0.5")
    options = (*delays, "train.max_staleness=2", f"train.num_tasks={2 * steps}")
    assert _train_through_kills(tmp_path / "run", NUM_KILLS, steps, *options)
    with RunReader(tmp_path / "run") as run:
        assert learned_attempts(run) == expected_attempts(run)
        assert [step for step, _ in run.metric("time/step_s")] == list(range(1, steps + 1))
        assert max(value for _, value in run.metric("pool/staleness_max")) <= 2
        assert {row.outcome for row in run.attempts()} <= {"trained", "constant"}
        versions = [[turn.policy_version for turn in run.attempt(row.id).trajectory.turns] for row in run.attempts()]
        assert all(own == sorted(own) for own in versions), "per-token versions only grow within an attempt"
        assert any(own[0] != own[-1] for own in versions), "some dialogues went on over an update"
        assert len(list((run.directory / "checkpoints").glob("*/weights/*"))) == 1, "nothing is left behind"


@pytest.mark.usefixtures("tiny_dir")
def test_a_synchronous_run_that_is_killed_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    # Six attempts at once, whose envs answer in another order each time.
    delays = ("env.options.median_s=0.01", "env.options.p99_s=0.02")
    common = (*delays, "rollout.deterministic=true", "eval.tasks=2", "eval.every=2")
    assert main(["train", WORLD, *SMALL, *common, "train.steps=6", f"run.dir={tmp_path / 'whole'}"]) == 0
    assert _train_through_kills(tmp_path / "killed", max(2, NUM_KILLS // 5), 6, *common)
    with RunReader(tmp_path / "whole") as one, RunReader(tmp_path / "killed") as two:
        ours, theirs = _weights(one), _weights(two)
        for name, weights in ours.items():
            np.testing.assert_array_equal(weights, theirs[name], err_msg=name)
        for metric in ("rollout/reward_mean", "train/grad_norm", "train/loss"):
            assert one.metric(metric) == two.metric(metric)
        assert learned_attempts(one) == learned_attempts(two) == expected_attempts(one)


PPO = (
    *("model=tiny", "method=ppo", "train.tasks_per_step=2", "rollout.group_size=4"),
    *("train.max_empty_steps=1000", "rollout.deterministic=true", "eval.tasks=0", "run.dialogues=0"),
)


def _kill_in_pretraining(directory: Path, num_batches: int, *options: str) -> list[float]:
    """Kill a run when its critic has learned so many batches; the tokens that each had sampled."""
    process = start(ECHO, *PPO, *options, f"run.dir={directory}")
    try:
        ends_s = time.monotonic() + 120
        while len(sampled := _critic_tokens(directory)) < num_batches and time.monotonic() < ends_s:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
    finally:
        process.kill()
        process.communicate()
    assert len(sampled) >= num_batches
    return _critic_tokens(directory)


def _critic_tokens(directory: Path) -> list[float]:
    if not is_run(directory):
        return []
    with RunReader(directory) as run:
        return [value for _, value in run.metric("critic/sampled_tokens")]


@pytest.mark.usefixtures("tiny_dir")
def test_tokens_of_a_pretraining_that_was_killed_are_not_counted_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, few = tmp_path / "run", ("critic.pretrain_steps=8", "critic.pretrain_patience=8", "train.save_every=0")
    sampled = _kill_in_pretraining(directory, 4, *few)
    per_batch = sum(sampled) / len(sampled)
    bound = round(10.5 * per_batch)  # the pre-training once and a step or two; not half of it twice
    again = ["train", "--resume", str(directory), "train.steps=50"]
    assert main([*again, f"train.max_sampled_tokens={bound}"]) == 0
    with RunReader(directory) as run:
        (event,) = run.events("tokens_spent")
        tokens = [value for name in ("critic/sampled_tokens", "rollout/tokens_drawn") for _, value in run.metric(name)]
        assert event.step == len(run.metric("time/step_s")) >= 1
        assert event.detail["sampled_tokens"] == num_drawn_tokens(run, event.step) == sum(tokens) >= bound
        assert len(run.metric("critic/sampled_tokens")) == 8
    assert f"ended early   after step {event.step} of 50: " in capsys.readouterr().out


@pytest.mark.usefixtures("tiny_dir")
def test_a_pretraining_that_was_killed_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    """Its plateau comes at the same batch: what had not helped before the end of the process counts."""
    flat = ("critic.pretrain_learning_rate=1e-9", "critic.pretrain_patience=6", "critic.pretrain_steps=60")
    options = (*flat, "train.save_every=1", "train.steps=1")
    assert main(["train", ECHO, *PPO, *options, f"run.dir={tmp_path / 'whole'}"]) == 0
    _kill_in_pretraining(tmp_path / "killed", 4, *options)
    assert main(["train", "--resume", str(tmp_path / "killed")]) == 0
    with RunReader(tmp_path / "whole") as whole, RunReader(tmp_path / "killed") as killed:
        assert killed.events("resumed")[0].detail["path"], "there was a checkpoint"
        assert 6 < len(whole.metric("critic/loss")) < 60, "it ended at a plateau"
        for name in ("critic/loss", "critic/explained_variance", "critic/sampled_tokens", "train/loss"):
            assert killed.metric(name) == whole.metric(name), name


@pytest.mark.usefixtures("tiny_dir")
def test_a_pretraining_that_leaves_no_token_for_a_step_is_an_error_and_can_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    options = ("critic.pretrain_steps=3", "train.steps=1", "train.max_sampled_tokens=10", f"run.dir={directory}")
    assert main(["train", ECHO, *PPO, *options]) == 2
    assert "no step of 1 was made: the critic's pre-training sampled" in capsys.readouterr().err
    assert len(_critic_tokens(directory)) == 1, "it does not go on once nothing can come of it"
    assert main(["train", "--resume", str(directory), "train.max_sampled_tokens=0"]) == 0
    assert len(_critic_tokens(directory)) == 3


@pytest.mark.usefixtures("tiny_dir")
def test_a_damaged_checkpoint_is_refused_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "run"
    quick = ("env.options.median_s=1e-6", "env.options.p99_s=1e-5", "train.steps=1")
    assert main(["train", WORLD, *SMALL, *quick, f"run.dir={directory}"]) == 0
    with RunReader(directory) as run:
        file = CheckpointStore(directory).directory(run.checkpoints()[-1].path) / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    capsys.readouterr()
    assert main(["train", "--resume", str(directory), "train.steps=2"]) == 2
    assert "optimizer.safetensors is damaged: its SHA-256 is not the one" in capsys.readouterr().err


@pytest.mark.usefixtures("tiny_dir")
def test_a_run_is_trained_by_one_process_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from turnwise.watch.status import run_lock

    directory = tmp_path / "run"
    quick = ("env.options.median_s=1e-6", "env.options.p99_s=1e-5", "train.steps=1")
    assert main(["train", WORLD, *SMALL, *quick, f"run.dir={directory}"]) == 0
    with run_lock(directory):
        assert main(["train", "--resume", str(directory), "train.steps=2"]) == 2
    assert "a process is training in" in capsys.readouterr().err
