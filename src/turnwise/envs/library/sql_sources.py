"""Sources of the questions of `text_to_sql`: small generated databases, Spider or BIRD, or any database.

`SchemaSource` asks about databases that exist: SQLite files, the generated shop, or a PostgreSQL server. It reads the
schema, draws questions (`sql_schema_questions.py`), runs their golds twice (on the database and on its changed copy)
and asks only what has an answer that differs between the two.
"""

from __future__ import annotations

import hashlib
import random
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from turnwise.envs.base import Split, Task
from turnwise.envs.library.sql_compare import asks_for_order, same_result
from turnwise.envs.library.sql_databases import LEVELS, DatabaseFolder, Level, draw_database
from turnwise.envs.library.sql_datasets import DatasetQuestion, load_dataset, read_schema
from turnwise.envs.library.sql_files import find_databases, open_read_only, read_file_schema, write_changed_copy
from turnwise.envs.library.sql_questions import draw_question
from turnwise.envs.library.sql_runner import QueryLimits, QueryResult, SqlRunner, Value
from turnwise.envs.library.sql_schema import DatabaseSchema
from turnwise.envs.library.sql_schema_questions import SCHEMA_LEVELS, SchemaLevel, SchemaQuestion, draw_schema_question
from turnwise.envs.library.sql_shop import write_shop
from turnwise.envs.sandbox import SandboxKind
from turnwise.envs.splits import draw, split_of
from turnwise.errors import ConfigError, DataError

Difficulty = Literal["easy", "medium", "hard", "hardest", "mixed"]

NUM_DATABASES = 400
"""Number of generated databases per level. A run uses them in random order."""
SHOP = "shop"
MAX_ANSWER_ROWS = 100
"""A question about a real database whose answer has more rows is not asked."""
_TRIES_PER_TASK = 60
_MAX_GOLD_STEPS = 50_000_000
_STEPS_PER_LOOK = 100_000


class Queryable(Protocol):
    """A database that a policy's queries run on."""

    async def run(self, sql: str, limits: QueryLimits) -> QueryResult:
        """Return the result. `QueryRefused` says what is wrong with the query."""
        ...


@dataclass(frozen=True, slots=True)
class SqliteDatabase:
    """A SQLite file, queried in the sandbox of a runner."""

    runner: SqlRunner
    path: Path

    async def run(self, sql: str, limits: QueryLimits) -> QueryResult:
        return await self.runner.run(self.path, sql, limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlTask:
    """A task, ready to be played."""

    databases: Sequence[Queryable]
    """The policy queries the first database. A submission is judged on all of them."""
    prompt: str
    gold: str


class QuestionSource(Protocol):
    """Draws tasks, and finds what a task needs."""

    def tasks(self, split: Split, count: int, rng: random.Random) -> list[Task]: ...

    def load(self, task: Task) -> SqlTask: ...

    def other_gold(self, task: Task, rng: random.Random) -> str | None:
        """The right query of another question about the same database. None if there is none."""
        ...


class GeneratedSource:
    """Small databases with two variants each, drawn from numbers."""

    def __init__(self, difficulty: Difficulty, sandbox: SandboxKind) -> None:
        self._levels: Sequence[Level] = [level for level in LEVELS if difficulty in (level, "mixed")]
        self._folder = DatabaseFolder()
        self._runner = SqlRunner([self._folder.path], sandbox=sandbox)

    def tasks(self, split: Split, count: int, rng: random.Random) -> list[Task]:
        numbers = {
            level: [n for n in range(NUM_DATABASES) if split_of(f"sql-{level}-{n}") == split] for level in self._levels
        }
        found: dict[str, Task] = {}
        for _ in range(4 * count):
            if len(found) >= count:
                break
            level = rng.choice(self._levels)
            task = _draw_task(level, rng.choice(numbers[level]), rng)
            if task is not None:
                found.setdefault(task.id, task)
        return draw(list(found.values()), count, rng) if count else []

    def load(self, task: Task) -> SqlTask:
        level, number = task.data["level"], task.data["database"]
        files = [self._folder.file(level, number, variant) for variant in (0, 1)]
        databases = [SqliteDatabase(self._runner, file) for file in files]
        return SqlTask(databases=databases, prompt=task.data["prompt"], gold=task.data["gold"])

    def other_gold(self, task: Task, rng: random.Random) -> str | None:
        other = draw_question(task.data["level"], task.data["database"], rng)
        return other.gold if other is not None else None


def _draw_task(level: Level, number: int, rng: random.Random) -> Task | None:
    question = draw_question(level, number, rng)
    if question is None:
        return None
    prompt = f"{draw_database(level, number, 0).schema}\n{question.text}"
    data = {"level": level, "database": number, "prompt": prompt, "gold": question.gold}
    return Task(id=f"sql-{level}-{number}-{_short_hash(question.text)}", data=data)


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:8]


class DatasetSource:
    """Spider's or BIRD's questions."""

    def __init__(self, path: Path, sandbox: SandboxKind) -> None:
        self._path = path
        dataset = load_dataset(path)
        self._rows = {split: {question.id: question for question in dataset[split]} for split in dataset}
        asked = [question.database for questions in dataset.values() for question in questions]
        self._runner = SqlRunner(asked, sandbox=sandbox)

    def tasks(self, split: Split, count: int, rng: random.Random) -> list[Task]:
        questions = draw(list(self._rows[split].values()), count, rng)
        return [Task(id=f"sql-{q.id}", data={"row": q.id, "split": split}) for q in questions]

    def load(self, task: Task) -> SqlTask:
        question = self._question(task)
        database = SqliteDatabase(self._runner, question.database)
        prompt = f"{read_schema(question.database)}\n{question.text}"
        return SqlTask(databases=[database], prompt=prompt, gold=question.gold)

    def other_gold(self, task: Task, rng: random.Random) -> str | None:  # noqa: ARG002 - the rows are all there is
        return None

    def _question(self, task: Task) -> DatasetQuestion:
        question = self._rows.get(task.data["split"], {}).get(task.data["row"])
        if question is None:
            raise DataError(f"no row {task.data['row']} in {self._path}; is it the folder that the task came from?")
        return question


class AskedDatabase(Protocol):
    """A database that questions are made about."""

    @property
    def schema(self) -> DatabaseSchema: ...

    @property
    def targets(self) -> Sequence[Queryable]:
        """The database itself, and its changed copy."""
        ...

    def ask(self, sql: str, *, is_changed: bool) -> Sequence[Sequence[Value]] | None:
        """Run a query of ours on the database or on its changed copy. None if it takes too long."""
        ...


class FileDatabase:
    """A SQLite file. Its schema is read and its copy is written when they are first needed."""

    def __init__(self, path: Path, copy: Path, runner: SqlRunner) -> None:
        self._path = path
        self._copy = copy
        self._runner = runner
        self._lock = threading.Lock()
        self._schema: DatabaseSchema | None = None

    @property
    def schema(self) -> DatabaseSchema:
        with self._lock:
            if self._schema is None:
                self._schema = read_file_schema(self._path)
            return self._schema

    @property
    def targets(self) -> Sequence[Queryable]:
        return [SqliteDatabase(self._runner, path) for path in (self._path, self._changed())]

    def ask(self, sql: str, *, is_changed: bool) -> Sequence[Sequence[Value]] | None:
        looks = 0

        def look() -> bool:
            nonlocal looks
            looks += 1
            return looks > _MAX_GOLD_STEPS // _STEPS_PER_LOOK

        with open_read_only(self._changed() if is_changed else self._path) as connection:
            connection.set_progress_handler(look, _STEPS_PER_LOOK)
            try:
                return connection.execute(sql).fetchall()
            except sqlite3.OperationalError as error:
                if "interrupted" in str(error):
                    return None
                raise

    def _changed(self) -> Path:
        schema = self.schema
        with self._lock:
            if not self._copy.exists():
                write_changed_copy(self._path, self._copy, schema)
        return self._copy


class SchemaSource:
    """Questions about databases that exist."""

    def __init__(self, databases: Mapping[str, AskedDatabase], difficulty: Difficulty) -> None:
        self._databases = databases
        self._difficulty = difficulty
        self._levels: Sequence[SchemaLevel] = [level for level in SCHEMA_LEVELS if difficulty in (level, "mixed")]

    def tasks(self, split: Split, count: int, rng: random.Random) -> list[Task]:
        names = sorted(self._databases)
        found: dict[str, Task] = {}
        for _ in range(_TRIES_PER_TASK * max(count, 10)):
            if len(found) >= count:
                break
            name = rng.choice(names)
            question = self._draw(name, rng)
            if question is None or _split_of_kind(name, question) != split:
                continue
            identifier = f"sql-{name}-{_short_hash(question.shape)}-{_short_hash(question.text)}"
            if identifier not in found and self._says_something(name, question):
                prompt = f"{self._databases[name].schema.text}\n{question.text}"
                data = {"source": name, "prompt": prompt, "gold": question.gold}
                found[identifier] = Task(id=identifier, data=data)
        if not found and count:
            raise ConfigError(
                f"no {split} question with difficulty={self._difficulty} about {', '.join(names[:5])}; one kind of "
                "question in five is held out: add databases, or set difficulty=mixed. hard and hardest need tables "
                "that are linked by keys"
            )
        return draw(list(found.values()), count, rng) if count else []

    def load(self, task: Task) -> SqlTask:
        database = self._databases.get(task.data["source"])
        if database is None:
            raise DataError(
                f"no database {task.data['source']!r} among {', '.join(sorted(self._databases)[:5])}; is it the folder "
                "that the task came from?"
            )
        return SqlTask(databases=database.targets, prompt=task.data["prompt"], gold=task.data["gold"])

    def other_gold(self, task: Task, rng: random.Random) -> str | None:
        name = task.data["source"]
        for _ in range(_TRIES_PER_TASK):
            question = self._draw(name, rng)
            if question is None or question.gold == task.data["gold"] or _split_of_kind(name, question) == "test":
                continue  # demonstrations show no query of a kind that is held out
            if self._says_something(name, question):
                return question.gold
        return None

    def _draw(self, name: str, rng: random.Random) -> SchemaQuestion | None:
        schema = self._databases[name].schema
        return draw_schema_question(schema, rng.choice(self._levels), rng) if schema.tables else None

    def _says_something(self, name: str, question: SchemaQuestion) -> bool:
        """Whether the answer is short and not empty, and a constant could not be right on both."""
        database = self._databases[name]
        answers = [database.ask(question.gold, is_changed=is_changed) for is_changed in (False, True)]
        whole, changed = answers
        if not whole or not changed or len(whole) > MAX_ANSWER_ROWS:
            return False
        if any(list(answer[0]) in ([0], [None]) for answer in (whole, changed)):
            return False
        if same_result(whole, changed, ordered=asks_for_order(question.gold)):
            return False
        if question.tie_free is None:
            return True
        return all(_has_no_ties(database.ask(question.tie_free, is_changed=is_changed)) for is_changed in (False, True))


def _split_of_kind(name: str, question: SchemaQuestion) -> Split:
    """Whole kinds of questions are held out, database by database."""
    return split_of(f"{name} {question.shape}")


def _has_no_ties(rows: Sequence[Sequence[Value]] | None) -> bool:
    return rows is not None and len({row[0] for row in rows}) == len(rows)


class _Files:
    """The SQLite files of an option `databases`, and the folder with their copies."""

    def __init__(self, place: str, sandbox: SandboxKind) -> None:
        self._folder = DatabaseFolder()
        if place == SHOP:
            shop = self._folder.path / "shop.sqlite"
            write_shop(shop, seed=0)
            files = {SHOP: shop}
        else:
            files = find_databases(Path(place))
        runner = SqlRunner([*files.values(), self._folder.path], sandbox=sandbox)
        self.databases = {
            name: FileDatabase(file, self._folder.path / f"changed-{_short_hash(name)}.sqlite", runner)
            for name, file in files.items()
        }


class FileSource(SchemaSource):
    """Questions about SQLite files: a folder, one file, or the generated shop."""

    def __init__(self, place: str, difficulty: Difficulty, sandbox: SandboxKind) -> None:
        self._files = _Files(place, sandbox)  # the copies live as long as this object
        super().__init__(self._files.databases, difficulty)
