"""Writes `run.db` during a run. There is one writer and any number of readers (SQLite's write-ahead log).

Rows become visible at `commit`, once per step, so a reader never sees half a step. After each commit the size rule is
applied: if the file is larger than its limit, the oldest token arrays of train trajectories are dropped first, then
their dialogues, then those of evaluations. Metrics, events and evaluation results always stay. An event of kind
`dropped` counts what was dropped.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np

from turnwise.errors import ConfigError
from turnwise.runlog.arrays import pack_flags, pack_floats, pack_ids, pack_messages
from turnwise.runlog.schema import (
    DATABASE,
    MIGRATIONS,
    OWN_COUNT,
    SCHEMA_VERSION,
    TABLES,
    TABLES_WITH_STEPS,
    AttemptRecord,
    CheckpointRow,
    EvaluationRow,
    Phase,
    PoolRow,
)
from turnwise.trajectory import Trajectory, Turn

KEEP_SHARE = 0.8
"""Rows are dropped until the file has this share of its limit, so that it does not happen at every step."""
DROP_BATCH = 32
"""Number of trajectories to drop between two checks of the size."""

_DROP_TOKENS = """
UPDATE turns SET prompt = NULL, sampled = NULL, logprobs = NULL, trainer_logprobs = NULL, mask = NULL,
    advantages = NULL, critic_values = NULL WHERE trajectory_id = ?
"""
_DROP_RULES = (
    ("token arrays", "train", "has_tokens", (_DROP_TOKENS, "UPDATE trajectories SET has_tokens = 0 WHERE id = ?")),
    (
        "dialogues",
        "train",
        "start IS NOT NULL",
        ("DELETE FROM turns WHERE trajectory_id = ?", "UPDATE trajectories SET start = NULL WHERE id = ?"),
    ),
    ("token arrays", "eval", "has_tokens", (_DROP_TOKENS, "UPDATE trajectories SET has_tokens = 0 WHERE id = ?")),
    (
        "dialogues",
        "eval",
        "start IS NOT NULL",
        ("DELETE FROM turns WHERE trajectory_id = ?", "UPDATE trajectories SET start = NULL WHERE id = ?"),
    ),
)
"""What to drop, in this order, oldest step first: its name, the phase, the rows, and the statements."""


class RunWriter:
    """The one writer of a run directory."""

    def __init__(self, directory: Path, database: sqlite3.Connection, max_bytes: int) -> None:
        """Use `create` or `reopen` instead."""
        self.directory = directory
        self._db = database
        self._max_bytes = max_bytes

    @classmethod
    def create(cls, directory: Path, config_yaml: str, *, max_size_mb: int) -> Self:
        """Start a run: the directory, its tables and, before anything else, its config."""
        path = directory / DATABASE
        if path.exists():
            raise ConfigError(
                f"{directory} holds a run already; go on with it: turnwise train --resume {directory}, "
                "or choose another run.dir"
            )
        try:
            directory.mkdir(parents=True, exist_ok=True)
            _make_database(directory, config_yaml)
            database = _connect(path)
            database.execute("PRAGMA journal_mode = WAL")
        except (OSError, sqlite3.Error) as cause:
            raise ConfigError(f"{directory} cannot hold a run: {cause}; choose another run.dir") from cause
        return cls(directory, database, max_size_mb * 1_000_000)

    @classmethod
    def reopen(cls, directory: Path, *, max_size_mb: int) -> Self:
        """Continue to write an existing run."""
        path = directory / DATABASE
        if not path.is_file():
            raise ConfigError(f"{directory} holds no run ({DATABASE} is missing)")
        writer = cls(directory, _connect(path), max_size_mb * 1_000_000)
        writer._migrate()
        return writer

    def set_meta(self, key: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        now = time.time()
        rows = [(key, step, None if math.isnan(value) else float(value), now) for key, value in values.items()]
        self._db.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?)", rows)

    def task(self, task_id: str, split: str, data: Mapping[str, Any]) -> None:
        self._db.execute("INSERT OR IGNORE INTO tasks VALUES (?, ?, ?)", (task_id, split, json.dumps(dict(data))))

    def attempts(self, step: int, phase: Phase, attempts: Iterable[AttemptRecord]) -> None:
        for attempt in attempts:
            self._attempt(step, phase, attempt)

    def evaluation(self, row: EvaluationRow) -> None:
        numbers = (row.success, row.success_low, row.success_high, row.reward, row.reward_low, row.reward_high)
        self._db.execute(
            "INSERT INTO evaluations VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(row.step, row.label, row.num_tasks, row.num_attempts, row.num_failed),
                *(None if math.isnan(number) else number for number in numbers),
                time.time(),
            ),
        )

    def certificate(self, step: int, content: str, *, is_exact: bool) -> None:
        """Write a certificate. The first, the latest and the first bad one of a run are kept."""
        self._db.execute("INSERT OR REPLACE INTO certificates VALUES (?, ?, ?)", (step, is_exact, content))
        self._db.execute(
            "DELETE FROM certificates WHERE step NOT IN (SELECT min(step) FROM certificates UNION "
            "SELECT max(step) FROM certificates UNION "
            "SELECT min(step) FROM certificates WHERE NOT is_exact HAVING count(*) > 0)"
        )

    def checkpoint(self, row: CheckpointRow) -> None:
        values = (row.step, row.warmup_steps, row.path, time.time(), row.state)
        self._db.execute(
            "INSERT OR REPLACE INTO checkpoints (step, warmup_steps, path, time, state) VALUES (?, ?, ?, ?, ?)", values
        )

    def pool(self, step: int, rows: Iterable[PoolRow]) -> None:
        """Write the groups that are not yet trained on at the checkpoint of `step`, and delete its earlier ones."""
        self._db.execute("DELETE FROM pool WHERE step = ?", (step,))
        self._db.executemany(
            "INSERT INTO pool VALUES (?, ?, ?, ?, ?, ?, ?)",
            [(step, row.number, row.task_id, row.admitted, row.outcome, row.trajectories, row.failed) for row in rows],
        )

    def forget_checkpoint(self, step: int) -> None:
        """Delete the row of a checkpoint whose files were removed."""
        self._db.execute("DELETE FROM checkpoints WHERE step = ?", (step,))
        self._db.execute("DELETE FROM pool WHERE step = ?", (step,))

    def event(self, step: int, kind: str, **detail: Any) -> None:
        self._db.execute(
            "INSERT INTO events VALUES (NULL, ?, ?, ?, ?)", (time.time(), step, kind, json.dumps(detail, default=str))
        )

    def commit(self, step: int) -> None:
        """Make the written rows visible to readers, and keep the file within its limit."""
        self._db.execute("COMMIT") if self._db.in_transaction else None
        if self._used_bytes() > self._max_bytes:
            self._shrink(step)

    def forget_after(self, step: int, *, warmup_steps: int, critic_batches: int) -> None:
        """Delete the rows of later steps. The run continues from `step` and will write them again.

        Phases before the first step have their own counts (`OWN_COUNT`); their rows up to these counts stay.

        Args:
            warmup_steps: Steps of the warm-up that are done at the state from which the run continues.
            critic_batches: Batches of the critic's pre-training that are done at that state.
        """
        for room, count in zip(OWN_COUNT, (warmup_steps, critic_batches), strict=True):
            self._db.execute("DELETE FROM metrics WHERE step > ? AND key LIKE ?", (count, f"{room}/%"))
        self._db.execute(
            "DELETE FROM turns WHERE trajectory_id IN (SELECT id FROM trajectories WHERE step > ?)", (step,)
        )
        for table in TABLES_WITH_STEPS:
            is_other = "".join(f" AND key NOT LIKE '{room}/%'" for room in OWN_COUNT) if table == "metrics" else ""
            self._db.execute(f"DELETE FROM {table} WHERE step > ?{is_other}", (step,))

    def close(self) -> None:
        if self._db.in_transaction:
            self._db.execute("COMMIT")
        self._db.close()

    def _attempt(self, step: int, phase: Phase, attempt: AttemptRecord) -> None:
        trajectory, failure = attempt.trajectory, attempt.trajectory.failure
        row = self._db.execute(
            f"INSERT INTO trajectories VALUES (NULL, {', '.join('?' * 16)}, 1, ?, ?, 1, ?, ?, ?)",
            (
                *(step, phase, attempt.outcome, trajectory.task_id, trajectory.attempt, trajectory.seed),
                str(trajectory.end_reason),
                *((None, None) if failure is None else (str(failure.party), failure.detail)),
                *(trajectory.is_success, trajectory.total_reward, len(trajectory.turns)),
                *(trajectory.num_sampled_tokens, trajectory.duration_s, json.dumps(dict(trajectory.metrics))),
                *(pack_messages(trajectory.start), time.time()),
                None if trajectory.branch is None else json.dumps(asdict(trajectory.branch)),
                (failure.traceback or None) if failure is not None else None,
                json.dumps(dict(trajectory.labels)),
                None if failure is None else json.dumps(dict(failure.facts)),
            ),
        )
        assert row.lastrowid is not None
        self._db.executemany(
            f"INSERT INTO turns VALUES ({', '.join('?' * 25)})",
            [(row.lastrowid, *_turn_row(attempt, index)) for index in range(len(trajectory.turns))],
        )

    def _migrate(self) -> None:
        (text,) = self._db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone() or ("0",)
        for version in range(int(text), SCHEMA_VERSION):
            self._db.execute("BEGIN IMMEDIATE")  # half a migration would keep the next process from continuing
            for statement in MIGRATIONS[version]:
                self._db.execute(statement)
            self.set_meta("schema_version", str(version + 1))
            self._db.execute("COMMIT")

    def _used_bytes(self) -> int:
        pages, free, size = (
            self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    def _shrink(self, step: int) -> None:
        for what, phase, condition, statements in _DROP_RULES:
            dropped: list[tuple[int, int]] = []
            while self._used_bytes() > KEEP_SHARE * self._max_bytes:
                rows = self._db.execute(
                    f"SELECT id, step FROM trajectories WHERE phase = ? AND {condition} ORDER BY step, id LIMIT ?",
                    (phase, DROP_BATCH),
                ).fetchall()
                if not rows:
                    break
                for statement in statements:
                    self._db.executemany(statement, [(row[0],) for row in rows])
                dropped += rows
            if dropped:
                self.event(
                    step,
                    "dropped",
                    what=what,
                    phase=phase,
                    num_trajectories=len(dropped),
                    first_step=dropped[0][1],
                    last_step=dropped[-1][1],
                    why=f"run.max_size_mb={self._max_bytes // 1_000_000}",
                )
        if self._db.in_transaction:
            self._db.execute("COMMIT")
        self._db.execute("PRAGMA incremental_vacuum").fetchall()


def _make_database(directory: Path, config_yaml: str) -> None:
    """Create the database with its tables and the config. The file appears complete or not at all."""
    unfinished = directory / f".{DATABASE}.new"
    unfinished.unlink(missing_ok=True)
    database = _connect(unfinished)
    database.execute("PRAGMA auto_vacuum = INCREMENTAL")  # has to come before the first table
    database.executescript(TABLES)
    rows = [("schema_version", str(SCHEMA_VERSION)), ("config", config_yaml)]
    database.executemany("INSERT INTO meta VALUES (?, ?)", rows)
    database.execute("COMMIT")
    database.close()
    unfinished.rename(directory / DATABASE)


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=30.0, isolation_level="IMMEDIATE")
    database.execute("PRAGMA synchronous = NORMAL")
    return database


def _turn_row(attempt: AttemptRecord, index: int) -> Sequence[Any]:
    trajectory = attempt.trajectory
    turn = trajectory.turns[index]
    num_shared = _num_shared(trajectory, index)
    trainer = None if attempt.trainer_logprobs is None else attempt.trainer_logprobs[index]
    advantage = 0.0 if attempt.advantages is None else attempt.advantages[index]
    by_token = np.broadcast_to(np.asarray(advantage, np.float64), (len(turn.sampled_ids),))
    credited = None if attempt.credited is None else attempt.credited.turns[index]
    is_trained = (credited or turn).is_trained and attempt.advantages is not None
    length = len(turn.sampled_ids)
    return (
        *(index, turn.policy_version, turn.temperature, turn.reward, json.dumps(dict(turn.reward_parts))),
        *(turn.is_trained, turn.is_cut, turn.env_state),
        *(pack_messages([turn.reply]), pack_messages(turn.observation)),
        *(num_shared, pack_ids(turn.prompt_ids[num_shared:]), pack_ids(turn.sampled_ids)),
        pack_floats(turn.sampler_logprobs),
        None if trainer is None else pack_floats(trainer.tolist()),
        *(pack_flags([is_trained] * length), pack_floats(by_token.tolist() if is_trained else [0.0] * length)),
        *(turn.potential, turn.next_potential),
        None if credited is None else json.dumps(dict(credited.reward_parts)),
        None
        if attempt.critic_values is None
        else pack_floats(np.asarray(attempt.critic_values[index], np.float32).tolist()),
        turn.is_unparsable,
        None if turn.token_versions is None else json.dumps(turn.token_versions),
        turn.is_action,
    )


def _num_shared(trajectory: Trajectory, index: int) -> int:
    """The number of leading prompt ids that repeat the turn before."""
    if index == 0:
        return 0
    before: Turn = trajectory.turns[index - 1]
    known = (*before.prompt_ids, *before.sampled_ids)
    prompt = trajectory.turns[index].prompt_ids
    if prompt[: len(known)] == known:
        return len(known)
    differing = (i for i, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b)
    return next(differing, min(len(known), len(prompt)))
