"""Memory, from the command line: killed in the middle of a summary, certified, replayed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from campaigns.train_kills import expected_attempts, learned_attempts, start
from turnwise.cli import main
from turnwise.client.checkpoints import CheckpointStore
from turnwise.memory.dialogue import is_request
from turnwise.rollout.stats import num_splits
from turnwise.runlog.reader import RunReader

WORLD = f"{Path(__file__).with_name('killed_in_summary_world.py')}:KilledInSummary"
SMALL = (
    *("model=tiny", "memory.window=2", "memory.summary_tokens=6", "train.tasks_per_step=2", "train.steps=4"),
    *("rollout.group_size=4", "rollout.deterministic=true", "train.learning_rate=1e-2", "train.save_every=1"),
    *("train.max_empty_steps=1000", "eval.tasks=0", "run.dialogues=0"),
)


def weights(run: RunReader) -> dict[str, np.ndarray]:
    directory = CheckpointStore(run.directory).directory(run.checkpoints()[-1].path)
    return load_file(directory / "adapter_model.safetensors")


def exit_code(*arguments: str) -> int:
    """Of `turnwise train` in a process of its own, with one thread."""
    process = start(*arguments)
    try:
        process.communicate(timeout=240)
    finally:
        process.kill()
    return process.returncode


@pytest.mark.usefixtures("tiny_dir")
def test_a_run_that_is_killed_inside_a_summary_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole, killed, marker = tmp_path / "whole", tmp_path / "killed", tmp_path / "marker"
    assert exit_code(WORLD, *SMALL, f"run.dir={whole}") == 0
    assert exit_code(WORLD, *SMALL, f"env.options.marker={marker}", f"run.dir={killed}") == -9
    assert marker.exists()
    with RunReader(killed) as run:
        assert 1 <= len(run.metric("time/step_s")) < 4
    assert exit_code("--resume", str(killed)) == 0
    with RunReader(whole) as one, RunReader(killed) as two:
        ours, theirs = weights(one), weights(two)
        for name, values in ours.items():
            np.testing.assert_array_equal(values, theirs[name], err_msg=name)
        assert learned_attempts(one) == learned_attempts(two) == expected_attempts(one)
        assert one.metric("rollout/reward_mean") == two.metric("rollout/reward_mean")
        stored = two.attempt(two.attempts(phase="train")[-1].id).trajectory
        assert [is_request(turn.observation[-1]) for turn in stored.turns[:-1]].count(True) == 2
        assert num_splits(stored) == 2
        attempt = str(two.attempts(phase="train")[-1].id)
    assert main(["certify", str(killed)]) == 0
    assert main(["replay", str(killed), "--attempt", attempt]) == 0
    assert main(["train", "--resume", str(killed), "memory.window=4"]) == 2
