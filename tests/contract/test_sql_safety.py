"""SQL that a policy may write: refused or stopped, told in words that name no file, and harmless to all else."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from turnwise.envs.base import Task, assistant
from turnwise.envs.library import sql_worker
from turnwise.envs.library.sql_runner import QueryLimits, QueryRefused, QueryResult, SqlRunner
from turnwise.envs.library.text_to_sql import TextToSql, TextToSqlEnv
from turnwise.errors import DataError

READ_ONLY = "only SELECT is allowed, and the database is read-only"
TOO_LONG = "the query took too long and was stopped"
TOO_BIG = "the query needs too much memory and was stopped"

QUICK = QueryLimits(time_limit_s=1.0, max_steps=5_000_000)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In a folder whose name must never be seen."""
    path = tmp_path_factory.mktemp("sEcReT place") / "hidden name.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE cats (name TEXT, age INTEGER, photo BLOB)")
        connection.execute("CREATE INDEX by_age ON cats (age)")
        connection.execute("CREATE VIEW old_cats AS SELECT name FROM cats WHERE age > 5")
        rows = [(f"cat {n}", n, bytes([n])) for n in range(200)]
        connection.executemany("INSERT INTO cats VALUES (?, ?, ?)", rows)
        connection.commit()
    return path


@pytest.fixture(scope="module")
def runner(database: Path) -> Iterator[SqlRunner]:
    runner = SqlRunner([database])
    yield runner
    runner.close()


def run_query(runner: SqlRunner, path: Path, sql: str, limits: QueryLimits | None = None) -> QueryResult:
    return asyncio.run(runner.run(path, sql, limits))


def refusal(runner: SqlRunner, database: Path, sql: str, limits: QueryLimits = QUICK) -> str:
    with pytest.raises(QueryRefused) as caught:
        run_query(runner, database, sql, limits)
    return str(caught.value)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO cats VALUES ('x', 1, NULL)",
        "UPDATE cats SET age = 0",
        "DELETE FROM cats",
        "REPLACE INTO cats VALUES ('x', 1, NULL)",
        "DROP TABLE cats",
        "CREATE TABLE t (a)",
        "CREATE TEMP TABLE t AS SELECT * FROM cats",
        "CREATE TEMP VIEW v AS SELECT 1",
        "CREATE TRIGGER t AFTER INSERT ON cats BEGIN SELECT 1; END",
        "CREATE VIRTUAL TABLE f USING fts5(a)",
        "ALTER TABLE cats ADD COLUMN a",
        "ATTACH DATABASE '/etc/passwd' AS p",
        "ATTACH DATABASE 'file:/tmp/new.sqlite?mode=rwc' AS p",
        "DETACH DATABASE main",
        "VACUUM",
        "VACUUM INTO '/tmp/copy.sqlite'",
        "PRAGMA database_list",
        "PRAGMA query_only = OFF",
        "PRAGMA journal_mode = WAL",
        "PRAGMA temp_store_directory = '/tmp'",
        "PRAGMA writable_schema = ON",
        "BEGIN",
        "COMMIT",
        "SAVEPOINT a",
        "ANALYZE",
        "REINDEX cats",
        "WITH x AS (SELECT 1) DELETE FROM cats",
        "EXPLAIN DELETE FROM cats",
        "INSERT INTO cats SELECT * FROM cats RETURNING *",
        "INSERT INTO sqlite_master VALUES (1, 2, 3, 4, 5)",
    ],
)
def test_everything_but_reading_is_refused_and_the_file_stays_as_it_is(
    runner: SqlRunner, database: Path, sql: str
) -> None:
    before = digest(database)
    assert refusal(runner, database, sql) in (READ_ONLY, "cannot VACUUM from within a transaction")
    assert digest(database) == before
    assert [path.name for path in database.parent.iterdir()] == [database.name]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT file FROM pragma_database_list",
        "SELECT COUNT(*) FROM pragma_database_list",
        "SELECT COUNT(*) FROM dbstat",
        "SELECT * FROM pragma_database_list()",
        "SELECT * FROM (SELECT file FROM pragma_database_list) AS inner_query",
        "SELECT * FROM pragma_compile_options",
        "SELECT * FROM sqlite_temp_master",
        "SELECT * FROM dbstat",
        "SELECT * FROM sqlite_dbpage",
        "SELECT * FROM sqlite_stmt",
        "SELECT load_extension('/lib/x86_64-linux-gnu/libm.so.6')",
        "SELECT readfile('/etc/passwd')",
        "SELECT writefile('/tmp/out', 'x')",
        "SELECT fts3_tokenizer('simple')",
        "SELECT sqlite_source_id()",
        "SELECT sqlite_compileoption_get(1)",
        "SELECT random()",
        "SELECT hex(randomblob(8))",
        "SELECT zeroblob(1000)",
        "SELECT edit('x', 'vi')",
        "SELECT * FROM '/etc/passwd'",
        'SELECT * FROM "../hidden name.sqlite"',
        "SELECT * FROM main.[/etc/passwd]",
        "SELECT * FROM other.cats",
        "SELECT * FROM generate_series(1, 1000000000)",
        "SELECT value FROM json_each('[1]')",
    ],
)
def test_probes_for_paths_files_and_the_library_are_refused_without_a_path(
    runner: SqlRunner, database: Path, sql: str
) -> None:
    said = refusal(runner, database, sql)
    assert "sEcReT" not in said
    assert "hidden" not in said.replace("../hidden name.sqlite", "")  # what the query itself said may be said back


COPIES = ", ".join(f"cats c{n}" for n in range(12))
DOUBLING = "WITH a0 AS (SELECT 1 x)" + "".join(
    f", a{n} AS (SELECT p.x FROM a{n - 1} p, a{n - 1} q)" for n in range(1, 26)
)


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT COUNT(*) FROM n", TOO_LONG),
        ("WITH RECURSIVE n(x) AS (SELECT 1 UNION SELECT x + 1 FROM n) SELECT MAX(x) FROM n", TOO_LONG),
        (f"SELECT COUNT(*) FROM {COPIES}", TOO_LONG),
        (f"SELECT c1.name FROM {COPIES} ORDER BY c11.name || c10.name", TOO_LONG),
        (f"SELECT group_concat(c0.name) FROM {COPIES}", None),
        (f"{DOUBLING} SELECT COUNT(*) FROM a25", None),
        ("SELECT " + ", ".join(["printf('%.*c', 900000000, 'x')"] * 40), None),  # a second or more for each
        (
            "SELECT replace(hex(printf('%.*c', 400000, 'x')), '7', printf('%.*c', 900000, 'y'))",
            "string or blob too big",
        ),
        ("SELECT " + "(" * 1000 + "1" + ")" * 1000, None),
        ("SELECT 1" + " UNION ALL SELECT 1" * 200, "too many terms in compound SELECT"),
        ("SELECT " + ", ".join(["1"] * 300), "too many columns in result set"),
        ("SELECT '" + "x" * 5000 + "'", "the query has 5009 characters; at most 4000"),
        ("SELECT name FROM cats WHERE name LIKE '" + "%a" * 400 + "'", "LIKE or GLOB pattern too complex"),
    ],
)
def test_bombs_end_in_time_with_a_word_about_it(
    runner: SqlRunner, database: Path, sql: str, expected: str | None
) -> None:
    started_s = time.monotonic()
    said = refusal(runner, database, sql)
    assert time.monotonic() - started_s < 30
    assert expected is None or said == expected
    assert run_query(runner, database, "SELECT COUNT(*) FROM cats").rows == ((200,),)  # the next one is served


def test_rows_that_fill_the_memory_are_stopped(runner: SqlRunner, database: Path) -> None:
    sql = (
        "WITH RECURSIVE n(x, y) AS (SELECT 1, printf('%.*c', 900000, 'x') "
        "UNION ALL SELECT x + 1, y || '' FROM n LIMIT 5000) SELECT COUNT(DISTINCT x || y) FROM n"
    )
    assert refusal(runner, database, sql, QueryLimits(time_limit_s=3.0)) in (TOO_LONG, TOO_BIG)


def test_a_worker_that_hangs_is_killed_and_replaced(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that copies itself gives the handler no chance; the process is ended from outside."""
    monkeypatch.setattr("turnwise.envs.library.sql_runner.KILL_AFTER_S", 0.0)
    runner = SqlRunner([database], max_workers=1)
    assert run_query(runner, database, "SELECT 1").rows == ((1,),)
    assert refusal(runner, database, f"{DOUBLING} SELECT COUNT(*) FROM a25", QueryLimits(time_limit_s=0.3)) == TOO_LONG
    assert runner.idle_pids == ()
    assert run_query(runner, database, "SELECT 2").rows == ((2,),)
    runner.close()


def test_the_limit_in_steps_does_not_depend_on_the_clock(runner: SqlRunner, database: Path) -> None:
    sql = "SELECT COUNT(*) FROM cats a, cats b, cats c"
    assert refusal(runner, database, sql, QueryLimits(time_limit_s=60, max_steps=1_000_000)) == TOO_LONG
    assert run_query(runner, database, "SELECT COUNT(*) FROM cats a, cats b", QUICK).rows == ((40_000,),)


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT COUNT(*) FROM cats", ((200,),)),
        ("SELECT name FROM old_cats LIMIT 1", (("cat 6",),)),
        ("WITH young AS (SELECT * FROM cats WHERE age < 2) SELECT name FROM young", (("cat 0",), ("cat 1",))),
        ("SELECT UPPER(name) FROM cats WHERE name LIKE 'CAT 7' OR age IN (SELECT 8)", (("CAT 7",), ("CAT 8",))),
        ("SELECT rank() OVER (ORDER BY age DESC) FROM cats LIMIT 1", ((1,),)),
        ("VALUES (1, NULL), (2.5, 'é')", ((1, None), (2.5, "é"))),
        ("SELECT photo FROM cats WHERE age = 9", ((b"\t",),)),
        ("SELECT name FROM sqlite_master WHERE type = 'table'", (("cats",),)),
        ("WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 3) SELECT x FROM n", ((1,), (2,), (3,))),
        ("-- how many?\nSELECT COUNT(*) FROM cats;", ((200,),)),
    ],
)
def test_ordinary_reading_is_allowed(runner: SqlRunner, database: Path, sql: str, rows: object) -> None:
    assert run_query(runner, database, sql).rows == rows


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT nme FROM cats", "no such column: nme"),
        ("SELECT name FROM dogs", "no such table: dogs"),
        ("SELECT name FORM cats", 'near "cats": syntax error'),
        ("SELECT 1; SELECT 2", "one query at a time"),
        ("SELECT ?", "the query has parameters; write the values into it"),
        ("SELECT :a", "the query has parameters; write the values into it"),
        ("", "this is no query; write a SELECT"),
        ("-- nothing", "this is no query; write a SELECT"),
        ("SELECT '\x00'", "the query holds a null character"),
        ("SELECT '\ud800'", "the query holds characters that are no text"),
    ],
)
def test_mistakes_are_told_in_the_words_of_sqlite(runner: SqlRunner, database: Path, sql: str, expected: str) -> None:
    assert refusal(runner, database, sql) == expected


def test_rows_and_bytes_of_an_answer_are_bounded(runner: SqlRunner, database: Path) -> None:
    few = run_query(runner, database, "SELECT age FROM cats", QueryLimits(max_rows=3))
    assert (few.rows, few.is_cut) == (((0,), (1,), (2,)), True)
    wide = run_query(runner, database, "SELECT printf('%.*c', 900, 'x') FROM cats", QueryLimits(max_bytes=2000))
    assert (len(wide.rows), wide.is_cut) == (2, True)


def test_a_file_that_is_no_database_is_the_callers_fault_and_no_answer_to_the_policy(tmp_path: Path) -> None:
    (tmp_path / "a.sqlite").write_text("not a database, " * 100)
    (tmp_path / "b.sqlite").touch()
    runner = SqlRunner([tmp_path / "a.sqlite", tmp_path / "missing.sqlite"])
    for name in ("a.sqlite", "missing.sqlite"):
        with pytest.raises(DataError, match="expected a SQLite database"):
            run_query(runner, tmp_path / name, "SELECT 1")
    with pytest.raises(DataError, match="not among the databases that this runner was made for"):
        run_query(runner, tmp_path / "b.sqlite", "SELECT 1")
    runner.close()


async def test_the_event_loop_goes_on_while_a_query_runs(runner: SqlRunner, database: Path) -> None:
    query = asyncio.create_task(runner.run(database, f"SELECT COUNT(*) FROM {COPIES}", QueryLimits(time_limit_s=0.5)))
    num_turns = 0
    while not query.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    with pytest.raises(QueryRefused, match="too long"):
        await query
    assert num_turns > 5


async def test_queries_of_many_attempts_are_kept_apart(runner: SqlRunner, database: Path) -> None:
    results = await asyncio.gather(*(runner.run(database, f"SELECT {n}") for n in range(60)))
    assert [result.rows for result in results] == [((n,),) for n in range(60)]


def test_a_worker_ends_with_its_input() -> None:
    """So no worker outlives a run, however the run ended."""
    command = [sys.executable, "-I", "-S", sql_worker.__file__]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("ready\n", "")


async def test_no_path_is_in_any_observation_of_the_world() -> None:
    world = TextToSql()
    (task,) = world.tasks("train", 1, 0)
    probes = [
        "SELECT file FROM pragma_database_list",
        "ATTACH DATABASE 'x' AS y",
        "SELECT load_extension('x')",
        "PRAGMA database_list",
        "SELECT * FROM nowhere",
        "SELECT sql FROM sqlite_master",
        "SELECT 1 FROM",
        "DROP TABLE cats",
    ]
    for probe in probes:
        step = await make_env(world, task).step(assistant(probe))
        (message,) = step.messages
        assert "/" not in message.content, message
        assert ".sqlite" not in message.content
        assert "turnwise" not in message.content


def make_env(world: TextToSql, task: Task) -> TextToSqlEnv:
    return world.make_env(task, 0)
