"""Answer a question about a database: write a query, read the result, improve it, submit.

    system     Answer with SQL. Write one query and see its result. Write submit when the last result is the answer.
    user       cats(name, age, city)
               How many cats have age over 3?
    assistant  SELECT COUNT(*) FROM cat WHERE age > 3
    tool       error: no such table: cat
    assistant  SELECT COUNT(*) FROM cats WHERE age > 3
    tool       7                                                        format +0.1 (the first query that runs)
    assistant  submit                                                   outcome +1.0, terminated, a success

`submit` submits the last query that ran; `submit SELECT ...` submits another one. The query is run on the database and,
for questions that we make, on a second one with the same schema and other rows, so that a constant is not right.
`sql_compare.py` says how results are compared, `sql_worker.py` what a query may do. Queries run in a sandbox
(docs/sandbox.md). After `max_turns` replies without a submission the attempt ends with reward 0. A reply that is
neither a query nor a submission is flagged as unparsable.

`protocol="tags"` reads `<sql>...</sql>` and `<solution>...</solution>` instead, as models trained for SkyRL's world
write them. Databases are generated (`difficulty`), one in five is held out; `databases=` names any SQLite files, and
`address=` a PostgreSQL server: questions are made from the schema. `path=` names Spider's or BIRD's folder.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from turnwise.envs.base import EnvStep, Split, Task, as_action, system, user
from turnwise.envs.difficulty import Levels
from turnwise.envs.library.sql_compare import asks_for_order, same_result
from turnwise.envs.library.sql_postgres import PostgresDatabase
from turnwise.envs.library.sql_runner import QueryLimits, QueryRefused, QueryResult, Value
from turnwise.envs.library.sql_sources import (
    SHOP,
    DatasetSource,
    Difficulty,
    FileSource,
    GeneratedSource,
    Queryable,
    QuestionSource,
    SchemaSource,
    SqlTask,
)
from turnwise.envs.sandbox import SandboxKind
from turnwise.envs.schema import check_fractions
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.splits import random_for
from turnwise.errors import ConfigError, DataError
from turnwise.trajectory import Message

Protocol = Literal["line", "tags"]

MAX_CELL_LENGTH = 40
MAX_RESULT_LENGTH = 1000
MAX_ROWS_KEPT, MAX_RESULTS_KEPT = 200, 1000
"""Limits of the cache of right answers: rows of each, and number of answers."""

_RULES: Mapping[Protocol, str] = {
    "line": "Answer with SQL. Write one query and see its result. Write submit when the last result is the answer.",
    "tags": "Answer with SQL. Write <sql>a query</sql> to see its result, or <solution>a query</solution> to answer.",
}
_HINTS: Mapping[Protocol, str] = {
    "line": "Write one SQL query, or submit.",
    "tags": "Write one <sql>...</sql> or one <solution>...</solution>.",
}
_NOTHING_TO_SUBMIT = "error: no query has run yet; write one first"
_TAG = re.compile(r"<(sql|solution)>(.*?)</\1>", re.DOTALL | re.IGNORECASE)
_FENCE = re.compile(r"^```(?:sql)?\s*\n?(.*?)\n?```$", re.DOTALL | re.IGNORECASE)
_SUBMIT = re.compile(r"submit\b[\s:.]*(.*)", re.DOTALL | re.IGNORECASE)
_SQL_WORDS = """alter analyze attach begin commit create delete detach drop end explain insert pragma reindex release
replace rollback savepoint select update vacuum values with"""
_STATEMENT = re.compile(rf"\(*\s*(?:{'|'.join(_SQL_WORDS.split())})\b", re.IGNORECASE)


class SqlAction(NamedTuple):
    """The action of a reply."""

    is_submission: bool
    sql: str
    """The query. Empty in a submission of the last query that ran."""


def read_action(text: str, protocol: Protocol) -> SqlAction | None:
    """The action of a reply. None if there is none, or more than one."""
    if protocol == "tags":
        found = _TAG.findall(text)
        if len(found) != 1 or not found[0][1].strip():
            return None
        return SqlAction(found[0][0].lower() == "solution", _unfence(found[0][1]))
    text = _unfence(text)
    submission = _SUBMIT.fullmatch(text)
    if submission is not None:
        rest = _unfence(submission[1])
        return SqlAction(True, rest) if not rest or _STATEMENT.match(rest) else None
    return SqlAction(False, text) if _STATEMENT.match(text) else None


def _unfence(text: str) -> str:
    text = text.strip()
    fenced = _FENCE.fullmatch(text)
    return (fenced[1] if fenced else text).strip().rstrip(";").strip()


def format_result(result: QueryResult, max_rows: int) -> str:
    """A result as text for the policy: a line per row, and column names above if there are several."""
    if not result.rows:
        return "no rows"
    lines = [" | ".join(_clip(name) for name in result.columns)] if len(result.columns) > 1 else []
    lines += [" | ".join(_format_value(value) for value in row) for row in result.rows[:max_rows]]
    num_left = len(result.rows) - max_rows
    if num_left > 0:
        lines.append(f"... and {'more than ' if result.is_cut else ''}{num_left} more")
    text = "\n".join(lines)
    return text if len(text) <= MAX_RESULT_LENGTH else f"{text[:MAX_RESULT_LENGTH]} ..."


def _format_value(value: Value) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"({len(value)} bytes)"
    return _clip(f"{value:.6g}" if isinstance(value, float) else str(value))


def _clip(text: str) -> str:
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= MAX_CELL_LENGTH else f"{text[:MAX_CELL_LENGTH]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class TextToSql:
    """The world `text_to_sql`."""

    name: ClassVar[str] = "text_to_sql"
    difficulties: ClassVar[Levels] = (
        {"difficulty": "easy"},
        {"difficulty": "medium"},
        {"difficulty": "hard"},
        {"difficulty": "hardest"},
    )

    difficulty: Difficulty = "easy"
    """Level of generated questions. `hardest` asks about the shop; `mixed` draws from the other three, or from all four
    levels with `databases` or `address`."""
    databases: str = ""
    """Ask about these databases: a folder of SQLite files, one file, or `shop`."""
    address: str = ""
    """Ask about a PostgreSQL database: postgresql://USER@HOST:PORT/DATABASE, with a role that can only read."""
    path: Path | None = None
    """Spider's or BIRD's folder: their databases and their questions."""
    protocol: Protocol = "line"
    max_turns: int = 4
    max_rows: int = 5
    """Most rows of a result that the policy sees."""
    time_limit_s: float = 5.0
    """Time limit of one query."""
    format_reward: float = 0.1
    """Reward for the first query that runs."""
    demonstration_skill: float = 1.0
    """How often a demonstration uses the right query. The others answer another question about the database."""
    demonstration_mistakes: float = 0.2
    """How often a demonstration begins with a query that fails, and corrects it."""
    sandbox: SandboxKind = "bubblewrap"
    """`subprocess` sets limits but does not isolate."""
    _source: QuestionSource = field(init=False, repr=False, compare=False)
    _gold_results: dict[tuple[Queryable, str], QueryResult] = field(
        init=False, repr=False, compare=False, default_factory=dict[tuple[Queryable, str], QueryResult]
    )

    def __post_init__(self) -> None:
        if self.max_turns < 2:
            raise ConfigError(f"max_turns={self.max_turns}; expected at least 2: one to query, one to submit")
        if self.max_rows < 1:
            raise ConfigError(f"max_rows={self.max_rows}; expected at least 1")
        if not 0 < self.time_limit_s <= 60:
            raise ConfigError(f"time_limit_s={self.time_limit_s}; expected more than 0 and at most 60")
        check_fractions(self, "demonstration_skill", "demonstration_mistakes")
        given = [name for name in ("path", "databases", "address") if getattr(self, name)]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are set; expected one place that questions come from")
        object.__setattr__(self, "_source", self._make_source())

    def _make_source(self) -> QuestionSource:
        if self.path is not None:
            return DatasetSource(self.path, self.sandbox)
        if self.address:
            database = PostgresDatabase(self.address)
            return SchemaSource({database.name: database}, self.difficulty)
        if self.databases or self.difficulty == "hardest":
            return FileSource(self.databases or SHOP, self.difficulty, self.sandbox)
        return GeneratedSource(self.difficulty, self.sandbox)

    @property
    def max_tokens(self) -> int:
        if self.path is not None:
            return 256
        if self.databases or self.address or self.difficulty == "hardest":
            return 160
        return 48 if self.difficulty == "easy" else 96

    @property
    def limits(self) -> QueryLimits:
        return QueryLimits(time_limit_s=self.time_limit_s)

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return self._source.tasks(split, count, random_for(self.name, split, seed))

    def make_env(self, task: Task, seed: int) -> TextToSqlEnv:  # noqa: ARG002 - nothing is random once the task is drawn
        return TextToSqlEnv(self, self._source.load(task))

    async def gold_result(self, database: Queryable, gold: str) -> QueryResult:
        """The result of the right query, run once for all attempts. `DataError` if the query fails."""
        found = self._gold_results.get((database, gold))
        if found is not None:
            return found
        try:
            result = await database.run(gold, QueryLimits(time_limit_s=30, max_steps=10**9))
        except QueryRefused as refusal:
            raise DataError(f"the gold query {gold!r} does not run: {refusal}") from refusal
        if result.is_cut:
            raise DataError(f"the gold query {gold!r} has more than {QueryLimits().max_rows} rows")
        if len(result.rows) <= MAX_ROWS_KEPT:
            if len(self._gold_results) >= MAX_RESULTS_KEPT:
                self._gold_results.clear()
            self._gold_results[database, gold] = result
        return result

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        return play_demonstrations(
            self, lambda task: self._player(task, random_for("demo", seed, task.id)), count, seed
        )

    def _player(self, task: Task, rng: random.Random) -> ScriptedPlayer:
        gold = self._source.load(task).gold
        if rng.random() >= self.demonstration_skill:
            gold = self._source.other_gold(task, rng) or gold
        queries = [_spoil(gold, rng), gold] if rng.random() < self.demonstration_mistakes else [gold]
        queries = queries[-(self.max_turns - 1) :]

        def reply(dialogue: Sequence[Message]) -> str:
            num_said = sum(message.role == "assistant" for message in dialogue)
            if num_said < len(queries):
                return queries[num_said] if self.protocol == "line" else f"<sql>{queries[num_said]}</sql>"
            return "submit" if self.protocol == "line" else f"<solution>{gold}</solution>"

        return reply


def _spoil(sql: str, rng: random.Random) -> str:
    """Add a mistake that SQLite refuses: a table's name without its last letter, or a misspelt keyword."""
    tables = re.findall(r"\bFROM (\w+)", sql)
    if tables and rng.random() < 0.7:
        return re.sub(rf"\b{tables[0]}\b", tables[0][:-1], sql)
    return sql.replace("FROM", "FORM", 1)


class TextToSqlEnv:
    """One question."""

    def __init__(self, world: TextToSql, task: SqlTask) -> None:
        self._world = world
        self.databases = task.databases
        self._prompt = task.prompt
        self._gold = task.gold
        self._turn = 0
        self._last_sql: str | None = None  # the last query that ran
        self._last_result: QueryResult | None = None
        self._num_errors = 0

    async def start(self) -> list[Message]:
        return [system(_RULES[self._world.protocol]), user(self._prompt)]

    async def step(self, reply: Message) -> EnvStep:
        self._turn += 1
        action = read_action(reply.content, self._world.protocol)
        if action is None:
            return self._answer(user(_HINTS[self._world.protocol]), is_unparsable=True)
        if not action.is_submission:
            return as_action(await self._query(action.sql))
        sql = action.sql or self._last_sql
        if sql is None:
            return self._answer(user(_NOTHING_TO_SUBMIT))
        is_right = await self._is_right(sql)
        return EnvStep(
            reward={"outcome": 1.0 if is_right else 0.0},
            terminated=True,
            is_success=is_right,
            is_action=bool(action.sql),
            info=self._info(),
        )

    async def close(self) -> None:
        pass

    def state_key(self) -> str:
        """The last query and the number of turns, because earlier queries have no effect."""
        return f"turn {self._turn} errors {self._num_errors} last {self._last_sql}"

    def fork(self) -> TextToSqlEnv:
        return copy.copy(self)  # only text and numbers; the databases are never written

    async def _query(self, sql: str) -> EnvStep:
        try:
            result = await self.databases[0].run(sql, self._world.limits)
        except QueryRefused as refusal:
            self._num_errors += 1
            return self._answer(_tool(f"error: {refusal}"))
        is_first, self._last_sql, self._last_result = self._last_sql is None, sql, result
        text = format_result(result, self._world.max_rows)
        return self._answer(_tool(text), format_reward=self._world.format_reward if is_first else 0.0)

    async def _is_right(self, sql: str) -> bool:
        """Whether the query gives the right result on every database."""
        for database in self.databases:
            gold = await self._world.gold_result(database, self._gold)
            try:
                given = await self._given(database, sql)
            except QueryRefused:
                return False
            if not same_result(gold.rows, given.rows, ordered=asks_for_order(self._gold)):
                return False
        return True

    async def _given(self, database: Queryable, sql: str) -> QueryResult:
        """The result of the submitted query. On the first database it is usually known already."""
        if self._last_result is not None and sql == self._last_sql and database == self.databases[0]:
            return self._last_result
        return await database.run(sql, self._world.limits)

    def _answer(self, message: Message, *, format_reward: float = 0.0, is_unparsable: bool = False) -> EnvStep:
        is_last = self._turn >= self._world.max_turns
        return EnvStep(
            messages=[message],
            reward={"format": format_reward},
            terminated=is_last,
            is_success=False if is_last else None,
            is_unparsable=is_unparsable,
            info=self._info() if is_last else {},
        )

    def _info(self) -> dict[str, float]:
        return {"turns": self._turn, "errors": self._num_errors}


def _tool(text: str) -> Message:
    return Message(role="tool", content=text, name="sql")
