"""A flywheel's file: tasks, attempts, verdicts, pools and evaluations in one SQLite database.

with PoolStore.open(directory) as store:
    store.query("SELECT * FROM samples WHERE in_sft AND score > 0.9")

What a stage makes is written in one transaction with the row that says that the stage is done, or group by group with
a key that refuses the same group twice. So a process that dies leaves nothing half and doubles nothing.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.envs.base import Task
from turnwise.envs.listed import ListedTask, level_id
from turnwise.errors import ConfigError
from turnwise.rounds.tables import DATABASE, TABLES, VERSION
from turnwise.runtime.closing import ClosedOnExit
from turnwise.runtime.transaction import transaction
from turnwise.trajectory import Trajectory, TrajectoryGroup, trajectory_from_json, trajectory_to_json

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedAttempt:
    """A stored attempt, and what was said about it."""

    id: int
    round: int
    model: str
    task_id: str
    is_success: bool | None
    duplicate_of: int | None
    trajectory: Trajectory
    score: float | None = None
    is_good: bool | None = None
    """None: nobody has judged it yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptVerdict:
    """What a source of verdicts says of an attempt."""

    attempt_id: int
    source: str
    score: float
    is_good: bool
    reason: str = ""


def is_flywheel(path: Path) -> bool:
    """Whether `path` is the directory of a flywheel."""
    return (path / DATABASE).is_file()


def content_of(task: Task) -> str:
    """A hash of a task's data: equal for equal tasks, whatever their ids are. Without data, the id is the task."""
    told = json.dumps(dict(task.data), sort_keys=True) if task.data else task.id
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def said_in(trajectory: Trajectory) -> str:
    """A hash of the task and of every reply: equal for attempts that say the same at the same task."""
    replies = [[turn.reply.content, [str(call) for call in turn.reply.tool_calls]] for turn in trajectory.turns]
    return hashlib.sha256(json.dumps([trajectory.task_id, replies]).encode()).hexdigest()[:32]


class PoolStore(ClosedOnExit):
    """The database of a flywheel. One process writes it; others may read it meanwhile."""

    def __init__(self, directory: Path, connection: sqlite3.Connection) -> None:
        """`create` and `open` make these."""
        self.directory = directory
        self._db = connection
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA foreign_keys = ON")

    @classmethod
    def create(cls, directory: Path, meta: Mapping[str, str]) -> PoolStore:
        """Make a new file; it appears whole."""
        directory.mkdir(parents=True, exist_ok=True)
        part = directory / f"{DATABASE}.part"
        part.unlink(missing_ok=True)
        with sqlite3.connect(part) as db:
            db.executescript(TABLES)
            db.executemany("INSERT INTO meta VALUES (?, ?)", [("version", VERSION), *meta.items()])
        db.close()
        part.replace(directory / DATABASE)
        return cls.open(directory)

    @classmethod
    def open(cls, directory: Path, *, read_only: bool = False) -> PoolStore:
        file = directory / DATABASE
        if not file.is_file():
            raise ConfigError(f"{directory} holds no {DATABASE}; expected the directory of a flywheel")
        mode = "ro" if read_only else "rw"
        db = sqlite3.connect(f"{file.absolute().as_uri()}?mode={mode}", uri=True, timeout=30.0, isolation_level=None)
        store = cls(directory, db)
        if store.meta("version") != VERSION:
            raise ConfigError(f"{file} has version {store.meta('version')}; this turnwise reads version {VERSION}")
        if not read_only:
            db.execute("PRAGMA journal_mode = WAL")
        return store

    def close(self) -> None:
        self._db.close()

    def transaction(self) -> AbstractContextManager[None]:
        """All that is written inside is there afterwards, or nothing is."""
        return transaction(self._db)

    def query(self, sql: str, *values: Any) -> list[Row]:
        try:
            return [dict(row) for row in self._db.execute(sql, values)]
        except sqlite3.OperationalError as cause:
            raise ConfigError(f"{sql!r} is no query of {DATABASE}: {cause}") from cause

    def round_place(self, number: int, name: str) -> Path:
        """A file or folder of a round."""
        place = self.directory / "rounds" / f"{number:02d}" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    # --- meta and stages

    def meta(self, key: str) -> str | None:
        rows = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchall()
        return str(rows[0][0]) if rows else None

    def set_meta(self, key: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def stage(self, number: int, stage: str) -> dict[str, Any] | None:
        """What a stage left behind when it was done; None: it is not done."""
        rows = self.query("SELECT detail FROM stages WHERE round = ? AND stage = ?", number, stage)
        return json.loads(rows[0]["detail"]) if rows else None

    def finish(self, number: int, stage: str, **detail: Any) -> dict[str, Any]:
        """Write down that a stage is done; inside a transaction, together with what it made."""
        self._db.execute("INSERT INTO stages VALUES (?, ?, ?, ?)", (number, stage, json.dumps(detail), time.time()))
        return detail

    # --- tasks

    def add_held_out(self, tasks: Iterable[ListedTask]) -> None:
        for one in tasks:
            row = (self._name_of(one), one.difficulty, _json(one.task.data), content_of(one.task))
            self._db.execute("INSERT OR IGNORE INTO held_out VALUES (?, ?, ?, ?)", row)

    def add_tasks(self, tasks: Iterable[ListedTask], number: int) -> None:
        """Propose tasks for a round. A held-out task is refused by the database."""
        for one in tasks:
            row = (self._name_of(one), one.difficulty, _json(one.task.data), content_of(one.task), number)
            self._db.execute("INSERT INTO tasks VALUES (?, ?, ?, ?, ?, NULL)", row)

    def _name_of(self, one: ListedTask) -> str:
        """The id of a task; where another level has a task of that name, with the level."""
        every = "SELECT id, difficulty FROM tasks UNION SELECT id, difficulty FROM held_out"
        is_taken = self.query(f"SELECT 1 FROM ({every}) WHERE id = ? AND difficulty != ?", one.task.id, one.difficulty)
        return level_id(one.task.id, one.difficulty) if is_taken else one.task.id

    def retire(self, task_ids: Iterable[str], number: int) -> None:
        self._db.executemany("UPDATE tasks SET retired = ? WHERE id = ?", [(number, one) for one in task_ids])

    def active_tasks(self) -> list[ListedTask]:
        rows = self.query("SELECT * FROM tasks WHERE retired IS NULL ORDER BY proposed, id")
        return [_listed(row, "train") for row in rows]

    def held_out(self) -> list[ListedTask]:
        return [_listed(row, "test") for row in self.query("SELECT * FROM held_out ORDER BY difficulty, id")]

    def known(self, level: int) -> tuple[set[str], set[str]]:
        """The ids and the contents of every task that must not be proposed at a level: those that were, and those that
        are held out at any level."""
        rows = self.query(
            "SELECT id, content FROM tasks WHERE difficulty = ? UNION ALL SELECT id, content FROM held_out", level
        )
        return {row["id"] for row in rows}, {row["content"] for row in rows}

    # --- attempts

    def add_group(self, number: int, model: str, group: TrajectoryGroup) -> None:
        """Write a group that was played: all of its attempts at once."""
        with self.transaction():
            for one in group.trajectories:
                said = said_in(one)
                twin = self._db.execute("SELECT min(id) FROM attempts WHERE said = ?", (said,)).fetchone()[0]
                values = (
                    *(number, model, one.task_id, one.attempt, one.seed, one.is_success, one.total_reward),
                    *(len(one.turns), sum(len(turn.sampled_ids) for turn in one.turns), str(one.end_reason)),
                    *(said, twin, _pack(one)),
                )
                self._db.execute(
                    "INSERT INTO attempts (round, model, task_id, attempt, seed, is_success, reward, num_turns, "
                    f"num_tokens, end_reason, said, duplicate_of, trajectory) VALUES ({', '.join('?' * len(values))})",
                    values,
                )

    def add_dropped(self, number: int, task_id: str, why: str, detail: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO dropped VALUES (?, ?, ?, ?)", (number, task_id, why, detail))

    def forget_dropped(self, number: int) -> None:
        """Let a round play again what could not be played."""
        self._db.execute("DELETE FROM dropped WHERE round = ?", (number,))

    def played_tasks(self, number: int) -> set[str]:
        """The tasks of a round that need no more play."""
        rows = self.query(
            "SELECT task_id FROM attempts WHERE round = ?1 UNION SELECT task_id FROM dropped WHERE round = ?1", number
        )
        return {row["task_id"] for row in rows}

    def attempts(self, where: str = "1", *values: Any) -> list[PlayedAttempt]:
        """Attempts with their verdicts; `where` speaks of the columns of `attempts` (a) and `verdicts` (v)."""
        rows = self.query(
            "SELECT a.*, v.score, v.is_good FROM attempts a LEFT JOIN verdicts v ON v.attempt_id = a.id "
            f"WHERE {where} ORDER BY a.task_id, a.attempt, a.id",
            *values,
        )
        return [_played(row) for row in rows]

    def add_verdicts(self, verdicts: Sequence[AttemptVerdict]) -> None:
        rows = [(one.attempt_id, one.source, one.score, one.is_good, one.reason) for one in verdicts]
        with self.transaction():
            self._db.executemany("INSERT INTO verdicts VALUES (?, ?, ?, ?, ?)", rows)

    # --- pools and evaluations

    def insert(self, table: str, rows: Iterable[Sequence[Any]]) -> None:
        """Add rows to a pool or to the evaluations, inside a transaction."""
        for row in rows:
            self._db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", tuple(row))


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(dict(data), sort_keys=True)


def _listed(row: Row, split: Any) -> ListedTask:
    task = Task(id=row["id"], data=json.loads(row["data"]))
    return ListedTask(task=task, split=split, difficulty=row["difficulty"])


def _pack(trajectory: Trajectory) -> bytes:
    return zlib.compress(json.dumps(trajectory_to_json(trajectory)).encode())


def _played(row: Row) -> PlayedAttempt:
    return PlayedAttempt(
        id=row["id"],
        round=row["round"],
        model=row["model"],
        task_id=row["task_id"],
        is_success=None if row["is_success"] is None else bool(row["is_success"]),
        duplicate_of=row["duplicate_of"],
        trajectory=trajectory_from_json(json.loads(zlib.decompress(row["trajectory"]))),
        score=row["score"],
        is_good=None if row["is_good"] is None else bool(row["is_good"]),
    )
