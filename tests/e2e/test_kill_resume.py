"""`kill -9` at random moments: every resume works, every deal is consumed exactly once, no more and no less.

`TURNWISE_KILLS=50 pytest tests/e2e/test_kill_resume.py` kills that many times.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from turnwise.cli import main
from turnwise.model_store import resolve_model
from turnwise.rollout.seeds import derive_seed
from turnwise.runlog.reader import RunReader
from turnwise.train.assemble import assemble
from turnwise.train.checkpoint import checkpoint_directory
from turnwise.train.config_files import config_from_yaml
from turnwise.train.facts import read_facts

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


def _start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "turnwise.cli", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _kill_after(process: subprocess.Popen[str], seconds: float) -> bool:
    """Whether the process was still there to be killed."""
    try:
        out, _ = process.communicate(timeout=seconds)
        assert process.returncode == 0, out
        return False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return True


def _expected_attempts(run: RunReader) -> Counter[tuple[str, int, int]]:
    """(task, attempt, seed) of everything that the deck deals in `train.steps` steps, from the config alone."""
    config = config_from_yaml(run.config_yaml, "run")
    parts = assemble(config, read_facts(resolve_model("tiny").directory))
    found: Counter[tuple[str, int, int]] = Counter()
    for step in range(config.train.steps):
        times: Counter[str] = Counter()
        for task in parts.tasks.batch(step):
            step_seed = derive_seed(config.train.seed, "train", step)
            seed = derive_seed(step_seed, task.id, times[task.id])
            times[task.id] += 1
            for index in range(parts.rollout.group_size):
                found[task.id, index, derive_seed(seed, index, 0)] += 1
    return found


def _attempts(run: RunReader) -> Counter[tuple[str, int, int]]:
    trajectories = [run.attempt(row.id).trajectory for row in run.attempts(phase="train")]
    return Counter((one.task_id, one.attempt, one.seed) for one in trajectories)


def _weights(run: RunReader) -> dict[str, np.ndarray]:
    directory = checkpoint_directory(run.directory, run.checkpoints()[-1].path)
    return load_file(directory / "adapter_model.safetensors")


def _train_through_kills(directory: Path, num_kills: int, shortest_s: float, longest_s: float, *options: str) -> int:
    """Start, kill, resume, kill, ... and let the last one finish; how many were killed."""
    moments = random.Random(num_kills)
    killed = 0
    arguments = (WORLD, *SMALL, *options, f"run.dir={directory}")
    for _ in range(num_kills):
        killed += _kill_after(_start(*arguments), moments.uniform(shortest_s, longest_s))
        if (directory / "run.db").is_file():
            arguments = ("--resume", str(directory))
    out, _ = (process := _start(*arguments)).communicate(timeout=100 + 10 * num_kills)
    assert process.returncode == 0, out
    return killed


@pytest.mark.timeout(120 + 20 * NUM_KILLS)
@pytest.mark.usefixtures("tiny_dir")
def test_an_async_run_that_is_killed_again_and_again_consumes_every_task_exactly_once(tmp_path: Path) -> None:
    steps = 6 * NUM_KILLS
    delays = ("env.options.median_s=0.05", "env.options.p99_s=0.5")
    options = (*delays, "train.max_staleness=2", f"train.steps={steps}", f"train.num_tasks={2 * steps}")
    killed = _train_through_kills(tmp_path / "run", NUM_KILLS, 1.0, 7.0, *options)
    assert killed
    with RunReader(tmp_path / "run") as run:
        assert _attempts(run) == _expected_attempts(run)
        assert [step for step, _ in run.metric("time/step_s")] == list(range(1, steps + 1))
        assert max(value for _, value in run.metric("pool/staleness_max")) <= 2
        assert {row.outcome for row in run.attempts()} <= {"trained", "constant"}
        versions = [[turn.policy_version for turn in run.attempt(row.id).trajectory.turns] for row in run.attempts()]
        assert all(own == sorted(own) for own in versions), "per-token versions only grow within an attempt"
        assert any(own[0] != own[-1] for own in versions), "some dialogues went on over an update"
        assert len(list((run.directory / "checkpoints").glob("*/weights/*"))) == 1, "nothing is left behind"


@pytest.mark.usefixtures("tiny_dir")
def test_a_synchronous_run_that_is_killed_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    # One attempt at a time: the sampler's batches, and with them the rounding of its logprobs, are the same.
    common = ("env.options.median_s=0.01", "env.options.p99_s=0.02", "generator.max_concurrency=1", "train.steps=6")
    assert main(["train", WORLD, *SMALL, *common, f"run.dir={tmp_path / 'whole'}"]) == 0
    assert _train_through_kills(tmp_path / "killed", max(2, NUM_KILLS // 5), 2.0, 4.5, *common)
    with RunReader(tmp_path / "whole") as one, RunReader(tmp_path / "killed") as two:
        ours, theirs = _weights(one), _weights(two)
        for name, weights in ours.items():
            np.testing.assert_array_equal(weights, theirs[name], err_msg=name)
        for metric in ("rollout/reward_mean", "train/grad_norm", "train/loss"):
            assert one.metric(metric) == two.metric(metric)
        assert _attempts(one) == _attempts(two) == _expected_attempts(one)


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
