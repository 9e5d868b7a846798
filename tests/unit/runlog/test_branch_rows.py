"""Where an attempt branched is kept, and a run that was begun before that was kept goes on."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import DATABASE, SCHEMA_VERSION, AttemptRecord
from turnwise.runlog.writer import RunWriter
from turnwise.trajectory import Branch, Trajectory, trajectory_from_json, trajectory_to_json

MakeTrajectory = Callable[..., Trajectory]


def test_a_branched_attempt_comes_back_with_its_branch(tmp_path: Path, make_trajectory: MakeTrajectory) -> None:
    writer = RunWriter.create(tmp_path, "", max_size_mb=8)
    branched = replace(make_trajectory(), branch=Branch(turn=1, seed=2**31 - 1, reseeds_env=True))
    writer.attempts(1, "train", [AttemptRecord(trajectory=branched, outcome="trained")])
    writer.commit(1)
    with RunReader(tmp_path) as run:
        assert run.attempt(1).trajectory == branched
        assert run.attempts()[0].num_sampled_tokens == branched.num_sampled_tokens
    writer.close()
    own = sum(len(turn.sampled_ids) for turn in branched.turns[1:])
    assert branched.num_sampled_tokens == own < replace(branched, branch=None).num_sampled_tokens


def test_a_run_of_the_first_schema_is_read_and_gone_on_with(tmp_path: Path, make_trajectory: MakeTrajectory) -> None:
    writer = RunWriter.create(tmp_path, "", max_size_mb=8)
    writer.attempts(1, "train", [AttemptRecord(trajectory=make_trajectory(), outcome="trained")])
    writer.commit(1)
    writer.close()
    database = sqlite3.connect(tmp_path / DATABASE)
    for table, column in (
        ("trajectories", "branch"),
        ("trajectories", "is_as_played"),
        ("trajectories", "traceback"),
        ("trajectories", "labels"),
        ("trajectories", "failure_facts"),
        *(("turns", name) for name in ("potential", "next_potential", "credited_parts", "critic_values")),
        ("turns", "is_unparsable"),
        ("turns", "token_versions"),
        ("turns", "is_action"),
    ):
        database.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    database.execute("ALTER TABLE checkpoints DROP COLUMN state")
    database.execute("DROP TABLE pool")
    database.execute("UPDATE meta SET value = '1' WHERE key = 'schema_version'")
    database.commit()
    database.close()
    with RunReader(tmp_path) as run:
        assert run.attempt(1).trajectory == make_trajectory()
        assert run.attempt(1).credited_parts == run.attempt(1).critic_values == (None,) * 3
        assert not run.attempts()[0].is_as_played
        assert (run.checkpoints(), run.pool(0)) == ([], [])
    writer = RunWriter.reopen(tmp_path, max_size_mb=8)
    branched = replace(make_trajectory(), branch=Branch(turn=1, seed=5))
    writer.attempts(2, "train", [AttemptRecord(trajectory=branched, outcome="trained")])
    writer.commit(2)
    writer.close()
    with RunReader(tmp_path) as run:
        assert run.meta("schema_version") == str(SCHEMA_VERSION)
        assert [run.attempt(i).trajectory.branch for i in (1, 2)] == [None, Branch(turn=1, seed=5)]
        assert [row.is_as_played for row in run.attempts()] == [False, True]


def test_a_critics_values_come_back_token_by_token(tmp_path: Path, make_trajectory: MakeTrajectory) -> None:
    trajectory = make_trajectory()
    values = tuple(np.linspace(0.0, 1.0, len(turn.sampled_ids)) for turn in trajectory.turns)
    writer = RunWriter.create(tmp_path, "", max_size_mb=8)
    record = AttemptRecord(trajectory=trajectory, outcome="trained", critic_values=values)
    writer.attempts(1, "train", [record])
    writer.commit(1)
    writer.close()
    with RunReader(tmp_path) as run:
        for stored, given in zip(run.attempt(1).critic_values, values, strict=True):
            assert stored is not None
            assert stored == pytest.approx(given, abs=1e-6)


def test_the_versions_of_a_turn_that_was_drawn_across_an_update_come_back_token_by_token(
    tmp_path: Path, make_trajectory: MakeTrajectory
) -> None:
    played = make_trajectory()
    across = tuple([4] + [5] * (len(played.turns[0].sampled_ids) - 1))
    mixed = replace(played.turns[0], policy_version=4, token_versions=across)
    trajectory = replace(played, turns=(mixed, *played.turns[1:]))
    assert trajectory_from_json(json.loads(json.dumps(trajectory_to_json(trajectory)))) == trajectory
    writer = RunWriter.create(tmp_path, "", max_size_mb=8)
    writer.attempts(1, "train", [AttemptRecord(trajectory=trajectory, outcome="trained")])
    writer.commit(1)
    writer.close()
    with RunReader(tmp_path) as run:
        stored = run.attempt(1).trajectory
    assert stored == trajectory
    second = stored.turns[1]
    assert stored.turns[0].versions == across
    assert second.versions == (second.policy_version,) * len(second.sampled_ids)
