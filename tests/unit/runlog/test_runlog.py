"""What is written to a run directory can be read from it, at once and later, within its bound."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from turnwise.errors import ConfigError, DataError
from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import DATABASE, AttemptRecord, CheckpointRow, EvaluationRow
from turnwise.runlog.writer import RunWriter
from turnwise.trajectory import Trajectory

MakeTrajectory = Callable[..., Trajectory]


@pytest.fixture
def writer(tmp_path: Path) -> RunWriter:
    return RunWriter.create(tmp_path / "run", "model: {}\n", max_size_mb=64)


def _evaluation(step: int, success: float = 0.5) -> EvaluationRow:
    return EvaluationRow(
        step=step,
        label="step",
        num_tasks=4,
        num_attempts=4,
        num_failed=0,
        success=success,
        success_low=0.1,
        success_high=0.9,
        reward=1.0,
        reward_low=0.5,
        reward_high=1.5,
    )


def test_a_trajectory_comes_back_as_it_was_played(writer: RunWriter, make_trajectory: MakeTrajectory) -> None:
    first, *others = make_trajectory().turns
    trajectory = replace(make_trajectory(), turns=(replace(first, is_action=True), *others))
    trained = (np.array([-0.5, -1.5], np.float32), None, np.array([-2.0, -3.0], np.float32))
    attempt = AttemptRecord(
        trajectory=trajectory, outcome="trained", advantages=(0.5, 0.25, -1.0), trainer_logprobs=trained
    )
    writer.attempts(1, "train", [attempt])
    writer.commit(1)
    stored = RunReader(writer.directory).attempt(1)
    assert stored.trajectory == trajectory
    assert [mask.tolist() for mask in stored.masks] == [[True, True], [False], [True, True]]
    assert [column.tolist() for column in stored.advantages] == [[0.5, 0.5], [0.0], [-1.0, -1.0]]
    assert stored.trainer_logprobs[1] is None
    np.testing.assert_array_equal(stored.trainer_logprobs[0], trained[0])
    assert (stored.row.step, stored.row.phase, stored.row.outcome) == (1, "train", "trained")


def test_what_a_method_made_of_an_attempt_is_kept_beside_what_was_played(
    writer: RunWriter, make_trajectory: MakeTrajectory
) -> None:
    played = make_trajectory()
    turns = [replace(turn, potential=0.1 * index, next_potential=0.5) for index, turn in enumerate(played.turns)]
    played = replace(played, turns=tuple(turns))
    seen = [
        replace(turn, is_trained=index == 2, reward_parts={"outcome": 7.0, "penalty": -1.0})
        for index, turn in enumerate(turns)
    ]
    attempt = AttemptRecord(
        trajectory=played, credited=replace(played, turns=tuple(seen)), outcome="trained", advantages=(1.0,) * 3
    )
    writer.attempts(1, "train", [attempt, AttemptRecord(trajectory=played, outcome="stale")])
    writer.commit(1)
    with RunReader(writer.directory) as run:
        stored, stale = run.attempt(1), run.attempt(2)
        assert [row.reward for row in run.attempts()] == [played.total_reward] * 2
    assert stored.trajectory == stale.trajectory == played
    assert [mask.tolist() for mask in stored.masks] == [[False, False], [False], [True, True]]
    assert stored.credited_parts == ({"outcome": 7.0, "penalty": -1.0},) * 3
    assert stale.credited_parts == (None,) * 3


def test_a_failed_attempt_keeps_the_party_to_blame(writer: RunWriter, make_trajectory: MakeTrajectory) -> None:
    trajectory = make_trajectory(failed=True)
    assert trajectory.failure is not None
    failure = replace(trajectory.failure, facts={"place": "my_env.py:12", "needed_tokens": 31})
    record = AttemptRecord(trajectory=replace(trajectory, failure=failure), outcome="failed")
    writer.attempts(1, "train", [record])
    writer.commit(1)
    stored = RunReader(writer.directory).attempt(1)
    assert stored.trajectory.failure == failure
    assert failure.detail == "died"
    assert not any(mask.any() for mask in stored.masks)


def test_shared_prompts_are_stored_once(writer: RunWriter, make_trajectory: MakeTrajectory) -> None:
    writer.attempts(1, "train", [AttemptRecord(trajectory=make_trajectory(), outcome="trained")])
    writer.commit(1)
    rows = sqlite3.connect(writer.directory / DATABASE).execute("SELECT num_shared FROM turns ORDER BY turn").fetchall()
    assert rows == [(0,), (5,), (2,)]


def test_a_run_can_be_read_while_it_is_written_and_shows_whole_steps_only(writer: RunWriter) -> None:
    reader = RunReader(writer.directory)
    writer.metrics(1, {"rollout/reward_mean": 0.5})
    assert reader.metric("rollout/reward_mean") == []
    writer.commit(1)
    assert reader.metric("rollout/reward_mean") == [(1, 0.5)]


def test_metrics_that_were_not_measured_are_nan(writer: RunWriter) -> None:
    writer.metrics(1, {"rollout/reward_mean": math.nan})
    writer.commit(1)
    assert math.isnan(RunReader(writer.directory).metric("rollout/reward_mean")[0][1])


def test_everything_else_comes_back(writer: RunWriter) -> None:
    writer.task("t1", "train", {"secret": 7})
    writer.evaluation(_evaluation(3, success=math.nan))
    writer.checkpoint(CheckpointRow(step=3, warmup_steps=2, path="tinker://a/weights/b"))
    writer.event(3, "resumed", path="x")
    writer.commit(3)
    run = RunReader(writer.directory / DATABASE)
    assert run.task("t1") == {"secret": 7}
    (row,) = run.evaluations()
    assert math.isnan(row.success)
    assert (row.step, row.reward) == (3, 1.0)
    assert run.checkpoints() == [CheckpointRow(step=3, warmup_steps=2, path="tinker://a/weights/b")]
    assert [(event.kind, event.detail) for event in run.events()] == [("resumed", {"path": "x"})]
    assert run.config_yaml == "model: {}\n"


def test_the_first_the_latest_and_the_first_bad_certificate_are_kept(writer: RunWriter) -> None:
    for step, is_exact in ((1, True), (2, True), (3, False), (4, False), (5, True), (6, True)):
        writer.certificate(step, "{}", is_exact=is_exact)
    writer.commit(6)
    assert [row.step for row in RunReader(writer.directory).certificates()] == [1, 3, 6]


def test_only_the_first_and_the_latest_certificate_are_kept_when_all_are_good(writer: RunWriter) -> None:
    for step in range(1, 6):
        writer.certificate(step, "{}", is_exact=True)
    writer.commit(5)
    assert [row.step for row in RunReader(writer.directory).certificates()] == [1, 5]


def test_later_steps_are_forgotten_when_a_run_goes_on(writer: RunWriter, make_trajectory: MakeTrajectory) -> None:
    for step in (1, 2, 3):
        writer.metrics(
            step, {name: float(step) for name in ("rollout/reward_mean", "warmup/loss", "critic/sampled_tokens")}
        )
        writer.attempts(step, "train", [AttemptRecord(trajectory=make_trajectory(), outcome="trained")])
        writer.evaluation(_evaluation(step))
    writer.commit(3)
    writer.forget_after(1, warmup_steps=2, critic_batches=1)
    writer.commit(1)
    run = RunReader(writer.directory)
    assert run.metric("rollout/reward_mean") == run.metric("critic/sampled_tokens") == [(1, 1.0)]
    assert run.metric("warmup/loss") == [(1, 1.0), (2, 2.0)], "it is counted on its own"
    assert [row.step for row in run.attempts()] == [1]
    assert [row.step for row in run.evaluations()] == [1]


def test_the_oldest_train_tokens_go_first_and_are_counted(tmp_path: Path, make_trajectory: MakeTrajectory) -> None:
    writer = RunWriter.create(tmp_path / "run", "", max_size_mb=1)
    rng = np.random.default_rng(0)

    def noisy(step: int) -> AttemptRecord:
        trajectory = make_trajectory(num_tokens=4000)
        logprobs = tuple(float(x) for x in rng.normal(size=4000).astype(np.float32))
        turn = type(trajectory.turns[0])(
            **{
                name: getattr(trajectory.turns[0], name)
                for name in trajectory.turns[0].__dataclass_fields__
                if name != "sampler_logprobs"
            },
            sampler_logprobs=logprobs,
        )
        return AttemptRecord(
            trajectory=Trajectory(task_id="t", attempt=step, seed=0, turns=(turn,), end_reason=trajectory.end_reason),
            outcome="trained",
        )

    writer.attempts(0, "eval", [noisy(0)])
    for step in range(1, 121):
        writer.metrics(step, {"rollout/reward_mean": 1.0})
        writer.attempts(step, "train", [noisy(step)])
        writer.commit(step)
    run = RunReader(writer.directory)
    rows = run.attempts(phase="train")
    assert len(rows) == 120
    kept = [row.step for row in rows if row.has_tokens]
    assert kept == list(range(kept[0], 121)), "the oldest go first"
    assert all(row.has_tokens for row in run.attempts(phase="eval"))
    assert len(run.metric("rollout/reward_mean")) == 120
    events = run.events("dropped")
    assert sum(event.detail["num_trajectories"] for event in events) == 120 - len(kept)
    assert all(event.detail["why"] == "run.max_size_mb=1" for event in events)
    assert (writer.directory / DATABASE).stat().st_size < 1_300_000
    with pytest.raises(DataError, match="max_size_mb"):
        run.attempt(rows[0].id)
    assert len(run.dialogue(rows[0].id)) == 2, "the words are still there"


def test_a_second_run_does_not_start_over_a_first(writer: RunWriter) -> None:
    with pytest.raises(ConfigError, match="--resume"):
        RunWriter.create(writer.directory, "", max_size_mb=1)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run\.db"):
        RunReader(tmp_path)
    (tmp_path / DATABASE).write_text("not a database, but long enough to be looked at " * 100)
    with pytest.raises(ConfigError, match="cannot be read"):
        RunReader(tmp_path)


def test_a_newer_schema_is_refused(writer: RunWriter) -> None:
    writer.set_meta("schema_version", "99")
    writer.commit(0)
    with pytest.raises(ConfigError, match="schema version 99"):
        RunReader(writer.directory)


def test_unknown_attempts_and_tasks_are_named(writer: RunWriter) -> None:
    run = RunReader(writer.directory)
    with pytest.raises(DataError, match="no attempt 5"):
        run.attempt(5)
    with pytest.raises(DataError, match="no task 'x'"):
        run.task("x")
