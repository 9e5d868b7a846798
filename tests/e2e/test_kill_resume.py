"""`kill -9` at random moments: every resume works, every deal is consumed exactly once, no more and no less.

`TURNWISE_KILLS=50 pytest tests/e2e/test_kill_resume.py` kills that many times; `make campaign NAME=train_kills` also
compares what a run that is killed has learned with what others have.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from campaigns.train_kills import expected_attempts, learned_attempts, run_killed
from turnwise.cli import main
from turnwise.runlog.reader import RunReader
from turnwise.train.checkpoint import checkpoint_directory

NUM_KILLS = int(os.environ.get("TURNWISE_KILLS", "3"))
WORLD = "turnwise.bench.slow_world:SlowWorld"
SMALL = (
    "model=tiny",
    "train.tasks_per_step=2",
    "generator.n_samples_per_prompt=3",
    "generator.min_group_size=3",
    "train.learning_rate=1e-2",
    "train.save_every=1",
    "train.keep_checkpoints=1",
    "train.max_empty_steps=1000",
    "eval.tasks=0",
    "run.dialogues=0",
)


def _weights(run: RunReader) -> dict[str, np.ndarray]:
    directory = checkpoint_directory(run.directory, run.checkpoints()[-1].path)
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
    common = (*delays, "generator.deterministic=true", "eval.tasks=2", "eval.every=2")
    assert main(["train", WORLD, *SMALL, *common, "train.steps=6", f"run.dir={tmp_path / 'whole'}"]) == 0
    assert _train_through_kills(tmp_path / "killed", max(2, NUM_KILLS // 5), 6, *common)
    with RunReader(tmp_path / "whole") as one, RunReader(tmp_path / "killed") as two:
        ours, theirs = _weights(one), _weights(two)
        for name, weights in ours.items():
            np.testing.assert_array_equal(weights, theirs[name], err_msg=name)
        for metric in ("rollout/reward_mean", "train/grad_norm", "train/loss"):
            assert one.metric(metric) == two.metric(metric)
        assert learned_attempts(one) == learned_attempts(two) == expected_attempts(one)


@pytest.mark.usefixtures("tiny_dir")
def test_a_damaged_checkpoint_is_refused_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "run"
    quick = ("env.options.median_s=1e-6", "env.options.p99_s=1e-5", "train.steps=1")
    assert main(["train", WORLD, *SMALL, *quick, f"run.dir={directory}"]) == 0
    with RunReader(directory) as run:
        file = checkpoint_directory(directory, run.checkpoints()[-1].path) / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    capsys.readouterr()
    assert main(["train", "--resume", str(directory), "train.steps=2"]) == 2
    assert "optimizer.safetensors is damaged: its SHA-256 is not the one" in capsys.readouterr().err


@pytest.mark.usefixtures("tiny_dir")
def test_a_run_is_trained_by_one_process_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from turnwise.train.status import run_lock

    directory = tmp_path / "run"
    quick = ("env.options.median_s=1e-6", "env.options.p99_s=1e-5", "train.steps=1")
    assert main(["train", WORLD, *SMALL, *quick, f"run.dir={directory}"]) == 0
    with run_lock(directory):
        assert main(["train", "--resume", str(directory), "train.steps=2"]) == 2
    assert "a process is training in" in capsys.readouterr().err
