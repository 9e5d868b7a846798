from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from cases import for_each
from postgres_server import missing_part, postgres_server
from turnwise.envs.base import assistant
from turnwise.envs.library.sql_postgres import NO_ESCAPES, PostgresDatabase, PostgresTarget, check_statement
from turnwise.envs.library.sql_runner import QueryLimits, QueryRefused
from turnwise.envs.library.sql_schema import Link
from turnwise.envs.library.text_to_sql import TextToSql
from turnwise.errors import ConfigError

READ_ONLY = "only SELECT is allowed, and the database is read-only"
LIMITS = QueryLimits(time_limit_s=20)
SCRIPT = """
CREATE TABLE makers (id serial PRIMARY KEY, name text NOT NULL, country text NOT NULL);
CREATE TABLE "Models" (id serial PRIMARY KEY, title varchar(40) NOT NULL, price numeric(8, 2) NOT NULL,
    seats int, maker_id int NOT NULL REFERENCES makers);
CREATE TABLE sales (id serial PRIMARY KEY, amount int NOT NULL, day date NOT NULL, model_id int REFERENCES "Models");
INSERT INTO makers (name, country) SELECT 'maker ' || n, 'land ' || n % 5 FROM generate_series(1, 40) n;
INSERT INTO "Models" (title, price, seats, maker_id)
    SELECT 'model ' || n, n * 37 % 101 + 0.5, n % 7, 1 + n % 40 FROM generate_series(1, 120) n;
INSERT INTO sales (amount, day, model_id)
    SELECT n * n % 23, date '2025-01-01' + n % 50, 1 + n % 120 FROM generate_series(1, 600) n;
CREATE ROLE reader LOGIN;
GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader;
CREATE ROLE writer LOGIN;
GRANT SELECT, INSERT ON sales TO writer;
"""

needs_server = pytest.mark.skipif(bool(missing_part()), reason=missing_part() or "there is a server")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with postgres_server(SCRIPT) as address:
        yield address


@pytest.fixture(scope="module")
def database(address: str) -> Iterator[PostgresDatabase]:
    database = PostgresDatabase(address.replace("USER", "reader"))
    yield database
    database.close()


def run_query(target: PostgresTarget, sql: str, limits: QueryLimits = LIMITS) -> list[tuple[object, ...]]:
    return list(asyncio.run(target.run(sql, limits)).rows)


def refusal(target: PostgresTarget, sql: str, limits: QueryLimits = LIMITS) -> str:
    with pytest.raises(QueryRefused) as caught:
        run_query(target, sql, limits)
    return str(caught.value)


@needs_server
def test_the_schema_has_keys_links_and_values(database: PostgresDatabase) -> None:
    models = database.schema.table("Models")
    assert models.links == (Link(column="maker_id", other="makers", target="id"),)
    assert models.key == ("id",)
    assert [(column.name, column.kind) for column in models.columns][1:4] == [
        ("title", "text"),
        ("price", "number"),
        ("seats", "number"),
    ]
    assert (
        "sales(id integer, amount integer, day date, model_id integer, model_id -> Models.id)" in database.schema.text
    )


@needs_server
def test_queries_read_and_cannot_write(database: PostgresDatabase) -> None:
    (whole, _) = database.targets
    count = "SELECT COUNT(*) FROM sales"
    assert run_query(whole, count) == [(600,)]
    for sql in (
        "DELETE FROM sales",
        "WITH gone AS (DELETE FROM sales RETURNING *) SELECT * FROM gone",
        "SELECT * INTO copied FROM sales",
        "COMMIT",
        "SET statement_timeout = 0",
        "COPY sales TO '/tmp/sales'",
    ):
        assert refusal(whole, sql) == READ_ONLY, sql
    assert refusal(whole, "SELECT 1; DROP TABLE sales") == "one query at a time"
    assert "is not allowed" in refusal(whole, "SELECT pg_terminate_backend(1)")
    assert refusal(whole, "SELECT nothing FROM sales") == 'column "nothing" does not exist'
    assert run_query(whole, count) == [(600,)]


@needs_server
def test_a_long_query_and_a_long_result_are_stopped(database: PostgresDatabase) -> None:
    (whole, _) = database.targets
    endless = "SELECT COUNT(*) FROM generate_series(1, 100000000000)"
    assert refusal(whole, endless, QueryLimits(time_limit_s=0.2)) == "the query took too long and was stopped"
    result = asyncio.run(
        whole.run("SELECT one.id FROM sales one, sales two, sales three", QueryLimits(time_limit_s=60, max_rows=7))
    )
    assert (len(result.rows), result.is_cut) == (7, True)
    assert run_query(whole, "SELECT 1") == [(1,)]


@needs_server
def test_settings_and_names_of_schemas_are_refused(database: PostgresDatabase) -> None:
    (whole, _) = database.targets
    assert refusal(whole, "SELECT set_config/**/('work_mem', '1GB', false)") == "set_config is not allowed"
    assert refusal(whole, 'SELECT * FROM public."Models"') == "write the names of tables without public."


@needs_server
def test_the_changed_views_have_other_rows_and_whole_links(database: PostgresDatabase) -> None:
    (whole, changed) = database.targets
    for sql in (
        "SELECT COUNT(*) FROM sales",
        "SELECT country FROM makers WHERE name = 'maker 3'",
        "SELECT SUM(price) FROM \"Models\" JOIN makers ON maker_id = makers.id WHERE country = 'land 2'",
    ):
        assert run_query(whole, sql) != run_query(changed, sql), sql
    orphans = 'SELECT COUNT(*) FROM "Models" WHERE maker_id NOT IN (SELECT id FROM makers)'
    assert run_query(changed, orphans) == [(0,)]
    prices = 'SELECT MIN(price), MAX(price) FROM "Models"'
    assert run_query(whole, prices)[0][0] == 0.5
    assert len(run_query(changed, 'SELECT * FROM "Models"')) > 60
    assert run_query(changed, prices) != []


@needs_server
def test_the_world_plays_on_a_server(address: str) -> None:
    world = TextToSql(address=address.replace("USER", "reader"), difficulty="mixed")
    tasks = world.tasks("test", 6, seed=0)

    async def play(sql: list[str]) -> list[bool | None]:
        envs = [world.make_env(task, 0) for task in tasks]
        steps = [await env.step(assistant(f"submit {text}")) for env, text in zip(envs, sql, strict=True)]
        return [step.is_success for step in steps]

    assert asyncio.run(play([task.data["gold"] for task in tasks])) == [True] * 6
    assert asyncio.run(play(["SELECT 1"] * 6)) == [False] * 6


@needs_server
def test_a_role_that_can_do_more_than_read_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="the role admin may do more than read"):
        PostgresDatabase(address.replace("USER", "admin"))
    with pytest.raises(ConfigError, match=r"the role writer may write the table sales; CREATE ROLE"):
        PostgresDatabase(address.replace("USER", "writer"))
    with pytest.raises(ConfigError, match="no connection to a socket/postgres"):
        PostgresDatabase(address.replace("USER", "nobody_there"))


@for_each(
    ("sql", "why"),
    [
        ("EXPLAIN SELECT 1", READ_ONLY),
        ('SELECT "pg_sleep" (3)', "pg_sleep is not allowed"),
        ("SELECT pg_catalog.pg_read_file('/etc/passwd')", "pg_read_file is not allowed"),
        ("SELECT query_to_xml('SELECT 1', true, true, '')", "query_to_xml is not allowed"),
        ('SELECT * FROM U&"\\0070ublic".sales', NO_ESCAPES),
        ("SELECT E'\\'--', 1", NO_ESCAPES),
        ("SELECT $$/*$$, 1, $$*/$$", NO_ESCAPES),
        ("SELECT set_config/* /* */ */('a', 'b', true)", NO_ESCAPES),
        ("SELECT '--', pg_sleep(3)", "pg_sleep is not allowed"),
        ("SELECT '/*', set_config/**/('a', 'b', true), '*/'", "set_config is not allowed"),
        ('SELECT "--", pg_sleep(3) FROM sales', "pg_sleep is not allowed"),
        ('SELECT * FROM "public" . sales', "write the names of tables without public."),
    ],
)
def test_statements_are_refused_before_they_reach_a_server(sql: str, why: str) -> None:
    with pytest.raises(QueryRefused) as caught:
        check_statement(sql, ("public",))
    assert str(caught.value) == why


@for_each(
    "sql",
    [
        "SELECT name FROM makers WHERE country = 'e' -- the pg_ of a comment",
        "SELECT name /* pg_sleep */ FROM makers WHERE name = 'it''s $5'",
    ],
)
def test_texts_and_comments_that_only_look_alike_are_allowed(sql: str) -> None:
    check_statement(sql, ("public",))


def test_an_address_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected postgresql://USER@HOST:PORT/DATABASE"):
        TextToSql(address="mysql://host/db")
