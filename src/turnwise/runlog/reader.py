"""Reads a run directory, finished or still being written, without changing it.

run = RunReader("runs/guess_number-tiny")
run.metric("rollout/reward")          # [(1, 0.12), (2, 0.2), ...]
run.attempt(17).trajectory            # exact ids, logprobs, rewards, as they were played
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.errors import ConfigError, DataError, Party
from turnwise.runlog.arrays import unpack_array, unpack_messages
from turnwise.runlog.schema import (
    AS_PLAYED_SINCE,
    DATABASE,
    POOL_SINCE,
    SCHEMA_VERSION,
    AttemptRow,
    CertificateRow,
    CheckpointRow,
    EvaluationRow,
    Event,
    Phase,
    PoolRow,
    StoredAttempt,
    StoredDialogue,
    StoredTurn,
)
from turnwise.runtime.closing import ClosedOnExit
from turnwise.trajectory import Branch, EndReason, Failure, Message, Trajectory, Turn

Z2_95 = 1.959964**2
"""For the end of Wilson's 95 % interval where no task succeeded: z^2 / (n + z^2)."""

_ATTEMPT_COLUMNS = (
    "id, step, phase, outcome, task_id, attempt, stop_reason, is_success, reward, num_turns, num_sampled_tokens, "
    "has_tokens"
)


def is_run(path: Path) -> bool:
    """Whether `path` is a run directory."""
    return (path / DATABASE).is_file()


class RunReader(ClosedOnExit):
    """A run directory, or its `run.db`, opened for reading."""

    def __init__(self, path: str | Path) -> None:
        place = Path(path).expanduser()
        self.directory = place.parent if place.name == DATABASE else place
        file = self.directory / DATABASE
        if not file.is_file():
            what = f"it holds no {DATABASE}" if self.directory.exists() else "it is not there"
            raise ConfigError(f"{place} is no run directory: {what}")
        try:
            self._db = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=30.0)
            self._db.row_factory = sqlite3.Row
            version = int(self.meta("schema_version") or 0)
        except sqlite3.Error as cause:
            raise ConfigError(f"{file} cannot be read as a run: {cause}") from cause
        is_new = version >= AS_PLAYED_SINCE
        self._attempt_columns = f"{_ATTEMPT_COLUMNS}, {'' if is_new else 'NULL AS '}is_as_played"
        if version > SCHEMA_VERSION:
            raise ConfigError(f"{file} has schema version {version}; this turnwise reads up to {SCHEMA_VERSION}")

    def close(self) -> None:
        self._db.close()

    def meta(self, key: str) -> str | None:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    @property
    def config_yaml(self) -> str:
        return self.meta("config") or ""

    def metric_names(self) -> list[str]:
        return [str(row[0]) for row in self._db.execute("SELECT DISTINCT key FROM metrics ORDER BY key")]

    def metric(self, key: str) -> list[tuple[int, float]]:
        """The (step, value) pairs of a metric, in order. nan if a value could not be measured."""
        rows = self._db.execute("SELECT step, value FROM metrics WHERE key = ? ORDER BY step", (key,))
        return [(int(step), float(_or_nan(value))) for step, value in rows]

    def attempts(self, *, phase: Phase | None = None, step: int | None = None) -> list[AttemptRow]:
        """The stored trajectories, oldest first."""
        rows = self._db.execute(
            f"SELECT {self._attempt_columns} FROM trajectories "
            "WHERE (:phase IS NULL OR phase = :phase) AND (:step IS NULL OR step = :step) ORDER BY id",
            {"phase": phase, "step": step},
        )
        return [_attempt_row(row) for row in rows]

    def attempt(self, attempt_id: int) -> StoredAttempt:
        """One trajectory as it was played, with the results of method and trainer."""
        row = self._row(attempt_id)
        if not row["has_tokens"]:
            raise DataError(f"attempt {attempt_id}: its token arrays were dropped to keep run.max_size_mb")
        turns = self._turns(attempt_id)
        return StoredAttempt(
            row=_attempt_row(row),
            trajectory=_trajectory(row, turns),
            masks=tuple(unpack_array(turn["mask"]) for turn in turns),
            advantages=tuple(unpack_array(turn["advantages"]) for turn in turns),
            trainer_logprobs=tuple(
                None if turn["trainer_logprobs"] is None else unpack_array(turn["trainer_logprobs"]).astype(np.float32)
                for turn in turns
            ),
            credited_parts=tuple(
                None if (parts := _column(turn, "credited_parts")) is None else json.loads(parts) for turn in turns
            ),
            critic_values=tuple(
                None if (values := _column(turn, "critic_values")) is None else unpack_array(values) for turn in turns
            ),
        )

    def stored_dialogue(self, attempt_id: int) -> StoredDialogue:
        """One trajectory without its token arrays. It stays when these are dropped."""
        row = self._row(attempt_id)
        if row["start"] is None:
            raise DataError(f"attempt {attempt_id}: its dialogue was dropped to keep run.max_size_mb")
        return StoredDialogue(
            row=_attempt_row(row),
            start=unpack_messages(row["start"]),
            turns=tuple(_dialogue_turn(turn) for turn in self._turns(attempt_id)),
            seed=row["seed"],
            duration_s=row["duration_s"],
            metrics=json.loads(row["metrics"]),
            labels=json.loads(_column(row, "labels") or "{}"),
            branch=_branch(row),
            failure=_failure(row),
        )

    def dialogue(self, attempt_id: int) -> list[tuple[Message, float | None]]:
        """The messages of one attempt, each reply with its reward. They stay when token arrays are dropped."""
        stored = self.stored_dialogue(attempt_id)
        messages: list[tuple[Message, float | None]] = [(message, None) for message in stored.start]
        for turn in stored.turns:
            messages.append((turn.reply, float(sum(turn.reward_parts.values()))))
            messages += [(message, None) for message in turn.observation]
        return messages

    def failure(self, attempt_id: int) -> Failure | None:
        """Which party failed an attempt, and how; there also when the token arrays are gone."""
        return _failure(self._row(attempt_id))

    def task(self, task_id: str) -> Mapping[str, Any]:
        row = self._db.execute("SELECT data FROM tasks WHERE id = ?", (task_id,)).fetchone()
        if row is None:
            raise DataError(f"no task {task_id!r} in {self.directory}")
        return json.loads(row[0])

    def evaluations(self) -> list[EvaluationRow]:
        """All evaluations, oldest first.

        One in which a limit cut every attempt short could not know that the world judges success. Where another one of
        the run shows it, nobody succeeded there: else a policy that never comes to an end would have no success rate,
        and would be left out of every mean.
        """
        names = [field.name for field in fields(EvaluationRow)]
        found = self._db.execute(f"SELECT {', '.join(names)} FROM evaluations ORDER BY id").fetchall()
        rows = [EvaluationRow(**{name: _or_nan(row[name]) for name in names}) for row in found]
        if all(math.isnan(row.success) for row in rows):
            return rows
        return [self._without_success(row) if self._is_cut_short(row) else row for row in rows]

    def _is_cut_short(self, row: EvaluationRow) -> bool:
        """Whether attempts were played, none was judged, and none came to an end without a verdict."""
        if not math.isnan(row.success) or math.isnan(row.reward):
            return False
        query = (
            "SELECT 1 FROM trajectories WHERE phase = 'eval' AND step = ? AND is_success IS NULL AND stop_reason = ?"
        )
        return self._db.execute(query, (row.step, EndReason.TERMINATED)).fetchone() is None

    @staticmethod
    def _without_success(row: EvaluationRow) -> EvaluationRow:
        return replace(row, success=0.0, success_low=0.0, success_high=Z2_95 / (row.num_tasks + Z2_95))

    def certificates(self) -> list[CertificateRow]:
        rows = self._db.execute("SELECT step, is_exact, content FROM certificates ORDER BY step")
        return [CertificateRow(step=row[0], is_exact=bool(row[1]), content=row[2]) for row in rows]

    def checkpoints(self) -> list[CheckpointRow]:
        """All checkpoints, oldest first."""
        rows = self._db.execute("SELECT * FROM checkpoints ORDER BY step").fetchall()
        return [
            CheckpointRow(
                step=row["step"],
                warmup_steps=row["warmup_steps"],
                path=row["path"],
                state=_column(row, "state"),
            )
            for row in rows
        ]

    def pool(self, step: int) -> list[PoolRow]:
        """The groups that were not yet trained on at the checkpoint of `step`, in the order of drawing."""
        if int(self.meta("schema_version") or 0) < POOL_SINCE:
            return []
        rows = self._db.execute(
            "SELECT number, task_id, admitted, outcome, trajectories, failed FROM pool WHERE step = ? ORDER BY number",
            (step,),
        )
        return [PoolRow(**dict(row)) for row in rows]

    def events(self, kind: str | None = None) -> list[Event]:
        rows = self._db.execute(
            "SELECT time, step, kind, detail FROM events WHERE (:kind IS NULL OR kind = :kind) ORDER BY id",
            {"kind": kind},
        )
        return [Event(time=row[0], step=row[1], kind=row[2], detail=json.loads(row[3])) for row in rows]

    def _row(self, attempt_id: int) -> sqlite3.Row:
        row = self._db.execute("SELECT * FROM trajectories WHERE id = ?", (attempt_id,)).fetchone()
        if row is None:
            (last,) = self._db.execute("SELECT max(id) FROM trajectories").fetchone()
            raise DataError(f"no attempt {attempt_id} in {self.directory}; they are numbered 1 to {last or 0}")
        return row

    def _turns(self, attempt_id: int) -> list[sqlite3.Row]:
        return self._db.execute("SELECT * FROM turns WHERE trajectory_id = ? ORDER BY turn", (attempt_id,)).fetchall()


def _or_nan(value: Any) -> Any:
    """Turn NULL into nan, because SQLite cannot store nan."""
    return math.nan if value is None else value


def _column(row: sqlite3.Row, name: str) -> Any:
    """The value of a column. None if the run is older than the column."""
    return row[name] if name in row.keys() else None  # noqa: SIM118 - a Row is not a mapping


def _attempt_row(row: sqlite3.Row) -> AttemptRow:
    is_success = row["is_success"]
    return AttemptRow(
        id=row["id"],
        step=row["step"],
        phase=row["phase"],
        outcome=row["outcome"],
        task_id=row["task_id"],
        attempt=row["attempt"],
        end_reason=row["stop_reason"],
        is_success=None if is_success is None else bool(is_success),
        reward=row["reward"],
        num_turns=row["num_turns"],
        num_sampled_tokens=row["num_sampled_tokens"],
        has_tokens=bool(row["has_tokens"]),
        is_as_played=bool(_column(row, "is_as_played")),
    )


def _dialogue_turn(row: sqlite3.Row) -> StoredTurn:
    credited = _column(row, "credited_parts")
    return StoredTurn(
        reply=unpack_messages(row["reply"])[0],
        observation=unpack_messages(row["observation"]),
        policy_version=row["policy_version"],
        temperature=row["temperature"],
        reward_parts=json.loads(row["reward_parts"]),
        credited_parts=None if credited is None else json.loads(credited),
        is_trained=bool(row["is_trained"]),
        is_cut=bool(row["is_cut"]),
        is_unparsable=bool(_column(row, "is_unparsable")),
        env_state=row["env_state"],
    )


def _trajectory(row: sqlite3.Row, rows: list[sqlite3.Row]) -> Trajectory:
    turns: list[Turn] = []
    known: tuple[int, ...] = ()
    for stored in rows:
        versions = _column(stored, "token_versions")
        prompt = (*known[: stored["num_shared"]], *unpack_array(stored["prompt"]).tolist())
        turn = Turn(
            prompt_ids=prompt,
            sampled_ids=tuple(unpack_array(stored["sampled"]).tolist()),
            sampler_logprobs=tuple(unpack_array(stored["logprobs"]).tolist()),
            policy_version=stored["policy_version"],
            token_versions=None if versions is None else tuple(json.loads(versions)),
            temperature=stored["temperature"],
            reply=unpack_messages(stored["reply"])[0],
            observation=unpack_messages(stored["observation"]),
            reward_parts=json.loads(stored["reward_parts"]),
            is_trained=bool(stored["is_trained"]),
            is_cut=bool(stored["is_cut"]),
            is_unparsable=bool(_column(stored, "is_unparsable")),
            is_action=bool(_column(stored, "is_action")),
            env_state=stored["env_state"],
            potential=_column(stored, "potential"),
            next_potential=_column(stored, "next_potential"),
        )
        known = (*turn.prompt_ids, *turn.sampled_ids)
        turns.append(turn)
    is_success = row["is_success"]
    return Trajectory(
        task_id=row["task_id"],
        attempt=row["attempt"],
        seed=row["seed"],
        start=unpack_messages(row["start"]),
        turns=tuple(turns),
        end_reason=EndReason(row["stop_reason"]),
        failure=_failure(row),
        is_success=None if is_success is None else bool(is_success),
        metrics=json.loads(row["metrics"]),
        duration_s=row["duration_s"],
        branch=_branch(row),
        labels=json.loads(_column(row, "labels") or "{}"),
    )


def _branch(row: sqlite3.Row) -> Branch | None:
    branch = _column(row, "branch")
    return Branch(**json.loads(branch)) if branch else None


def _failure(row: sqlite3.Row) -> Failure | None:
    if row["party"] is None:
        return None
    traceback, facts = _column(row, "traceback") or "", json.loads(_column(row, "failure_facts") or "{}")
    return Failure(party=Party(row["party"]), detail=row["detail"], traceback=traceback, facts=facts)
