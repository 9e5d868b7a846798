"""Questions about a PostgreSQL server, by address, with queries that can only read.

Four things keep the server as it is: the role (refused if it is a superuser or may write a table), the transaction
(`BEGIN READ ONLY`, always rolled back), one statement at a time that begins with SELECT, WITH, VALUES or TABLE, and a
statement timeout. After every query the session is reset. What reaches other sessions or files is refused by name.

A changed copy cannot be written to a server that we only read. In its place a judged query runs behind a WITH that
hides every table under a changed view of itself, with the rules of `sql_files.py`.
"""

from __future__ import annotations

import asyncio
import datetime
import importlib
import re
import threading
import uuid
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

from turnwise.envs.library.sql_files import DROPPED_PERCENT, SMALL_TABLE
from turnwise.envs.library.sql_runner import MAX_WORKERS, QueryLimits, QueryRefused, QueryResult, Value
from turnwise.envs.library.sql_schema import Column, DatabaseSchema, Kind, Link, TableSchema, measure
from turnwise.envs.library.sql_worker import READ_ONLY, TOO_LONG
from turnwise.envs.sync import call_in_thread
from turnwise.errors import AttemptFailed, ConfigError, Party
from turnwise.runtime.per_loop import PerLoop

INSTALL = "pip install 'turnwise[postgres]'"
CONNECT_S = 10
NO_ESCAPES = "texts with escapes, texts between dollars and comments inside comments are not allowed"
OUR_LIMITS = QueryLimits(time_limit_s=60, max_rows=100_000, max_bytes=50_000_000)
"""Limits of the queries that read the schema and check golds."""

_STATEMENT = re.compile(r"[\s(]*(?:select|with|values|table)\b", re.IGNORECASE)
_REFUSED_NAME = re.compile(
    r"""\b(pg_(?!catalog\b|typeof\b)\w+) | \b(lo_\w+|dblink\w*|set_config|current_setting|setval|nextval
    |ts_stat|ts_rewrite|\w*_to_xml\w*)"?\s*\(""",
    re.IGNORECASE | re.VERBOSE,
)
"""Names of functions and views that reach further than the tables: other sessions, files, queries written as text."""
_PARTS = re.compile(
    r"""(?P<escape>\b(?:e'|u&['"]) | \$\w*\$ | /\*(?:(?!\*/).)*/\*) | (?P<comment>/\*.*?\*/ | --[^\n]*)
    | '(?:[^']|'')*' | "(?:[^"]|"")*" """,
    re.DOTALL | re.IGNORECASE | re.VERBOSE,
)
"""Comments, texts and quoted names, so that `--` inside a text is no comment. `escape` is what would be read in another
way than here: texts with escapes, texts between dollars, and comments inside comments."""
_KINDS: dict[str, Kind] = {"N": "number", "S": "text"}
_TABLES = """
SELECT n.nspname, c.relname, c.oid::int8 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND pg_table_is_visible(c.oid)
  AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND has_table_privilege(c.oid, 'SELECT')
ORDER BY c.relname"""
_COLUMNS = """
SELECT a.attname, format_type(a.atttypid, NULL), t.typcategory::text FROM pg_attribute a
JOIN pg_type t ON t.oid = a.atttypid WHERE a.attrelid = {} AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"""
_KEY = """
SELECT a.attname FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
WHERE i.indisprimary AND i.indrelid = {} ORDER BY a.attnum"""
_LINKS = """
SELECT a.attname, other.relname, target.attname FROM pg_constraint k
JOIN pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = k.conkey[1]
JOIN pg_class other ON other.oid = k.confrelid
JOIN pg_attribute target ON target.attrelid = k.confrelid AND target.attnum = k.confkey[1]
WHERE k.contype = 'f' AND k.conrelid = {} AND cardinality(k.conkey) = 1 ORDER BY a.attnum"""
_ROLE = """
SELECT rolname, rolsuper OR pg_has_role('pg_read_server_files', 'MEMBER') OR pg_has_role('pg_write_server_files',
'MEMBER') OR pg_has_role('pg_execute_server_program', 'MEMBER') FROM pg_roles WHERE rolname = current_user"""
_WRITABLE = """
SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND n.nspname NOT IN ('pg_catalog', 'information_schema')
  AND has_table_privilege(c.oid, 'INSERT, UPDATE, DELETE, TRUNCATE') ORDER BY c.relname LIMIT 1"""


class PostgresServer:
    """A few connections to one database of a server, opened when they are needed."""

    def __init__(self, address: str) -> None:
        """Connect once and check the role. `ConfigError` says what is wrong with it."""
        parts = urlsplit(address)
        if parts.scheme not in ("postgresql", "postgres"):
            raise ConfigError(f"address={address!r}; expected postgresql://USER@HOST:PORT/DATABASE")
        self._address = address
        self._driver = _psycopg()
        self._idle: list[Any] = []
        self._lock = threading.Lock()
        self._slots = PerLoop(lambda: asyncio.Semaphore(MAX_WORKERS))
        weakref.finalize(self, _close_all, self._idle)
        try:
            self._check_role()
        except AttemptFailed as error:
            shown = f"{parts.hostname or 'a socket'}{parts.path}"  # without the password
            raise ConfigError(f"no connection to {shown}: {error.detail}; check address") from error

    @property
    def name(self) -> str:
        return urlsplit(self._address).path.strip("/") or "postgres"

    async def run(self, sql: str, limits: QueryLimits) -> QueryResult:
        """Run one query of a policy without blocking the event loop."""
        async with self._slots.get():
            return await call_in_thread(self.run_now, sql, limits)

    def run_now(self, sql: str, limits: QueryLimits) -> QueryResult:
        """Run one query. A connection that was lost is opened again, once."""
        for is_last in (False, True):
            try:
                connection = self._take()
            except self._driver.OperationalError as error:
                raise AttemptFailed(Party.TOOL, f"PostgreSQL: {_first_line(error)}") from error
            try:
                result = self._query(connection, sql, limits)
            except self._driver.Error as error:
                if connection.closed or connection.broken:
                    if is_last:
                        raise AttemptFailed(Party.TOOL, f"PostgreSQL: {_first_line(error)}") from error
                    continue
                self._give_back(connection)
                raise QueryRefused(self._explain(error)) from error
            self._give_back(connection)
            return result
        raise AssertionError("the second try returns or raises")

    def close(self) -> None:
        """Close the connections. A later query opens new ones."""
        _close_all(self._idle)

    def _query(self, connection: Any, sql: str, limits: QueryLimits) -> QueryResult:
        connection.execute("BEGIN READ ONLY")
        connection.execute(f"SET LOCAL statement_timeout = {max(1, int(1000 * limits.time_limit_s))}")
        rows: list[tuple[Value, ...]] = []
        num_bytes, is_cut = 0, False
        with connection.cursor() as cursor:
            for row in cursor.stream(sql):  # the extended protocol, which takes one statement only
                values = tuple(_to_value(value) for value in row)
                num_bytes += sum(len(value) if isinstance(value, str | bytes) else 8 for value in values)
                if len(rows) == limits.max_rows or num_bytes > limits.max_bytes:
                    is_cut = True
                    break
                rows.append(values)
            columns = tuple(str(column.name) for column in cursor.description or ())
        return QueryResult(columns=columns, rows=tuple(rows), is_cut=is_cut)

    def _explain(self, error: Exception) -> str:
        errors = self._driver.errors
        if isinstance(error, errors.QueryCanceled):
            return TOO_LONG
        if isinstance(error, errors.ReadOnlySqlTransaction | errors.InsufficientPrivilege):
            return READ_ONLY
        if "multiple commands" in str(error):
            return "one query at a time"
        return _first_line(error)[:200]

    def _take(self) -> Any:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._driver.connect(
            self._address,
            autocommit=True,
            prepare_threshold=None,
            connect_timeout=CONNECT_S,
            application_name="turnwise",
        )

    def _give_back(self, connection: Any) -> None:
        """End the transaction, and forget whatever the query set in its session."""
        try:
            connection.execute("ROLLBACK")
            connection.execute("DISCARD ALL")
        except self._driver.Error:
            with suppress(self._driver.Error):
                connection.close()
            return
        with self._lock:
            self._idle.append(connection)

    def _check_role(self) -> None:
        role, is_strong = self.run_now(_ROLE, OUR_LIMITS).rows[0]
        how = "CREATE ROLE reader LOGIN; GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader"
        if is_strong:
            raise ConfigError(f"address: the role {role} may do more than read (a superuser, or server files); {how}")
        writable = self.run_now(_WRITABLE, OUR_LIMITS).rows
        if writable:
            raise ConfigError(f"address: the role {role} may write the table {writable[0][0]}; {how}")


@dataclass(frozen=True, slots=True)
class PostgresTarget:
    """The database as a policy queries it, or behind the WITH that changes it."""

    server: PostgresServer
    schemas: tuple[str, ...]
    prefix: str = ""

    async def run(self, sql: str, limits: QueryLimits) -> QueryResult:
        check_statement(sql, self.schemas)
        return await self.server.run(self.wrapped(sql), limits)

    def wrapped(self, sql: str) -> str:
        return f"{self.prefix}SELECT * FROM (\n{sql}\n) AS submitted" if self.prefix else sql


def check_statement(sql: str, schemas: Sequence[str]) -> None:
    """Refuse what is no query, what calls a function that reaches further, and what names a schema."""
    if not _STATEMENT.match(sql):
        raise QueryRefused(READ_ONLY)
    if any(part["escape"] for part in _PARTS.finditer(sql)):
        raise QueryRefused(NO_ESCAPES)
    bare = _PARTS.sub(lambda part: " " if part["comment"] else part[0], sql)
    refused = _REFUSED_NAME.search(bare)
    if refused is not None:
        raise QueryRefused(f"{refused[1] or refused[2]} is not allowed")
    for schema in schemas:
        if re.search(rf'(?<![\w."])"?{re.escape(schema)}"?\s*\.', bare, re.IGNORECASE):
            raise QueryRefused(f"write the names of tables without {schema}.")


class PostgresDatabase:
    """A server's database as questions are made about it."""

    def __init__(self, address: str) -> None:
        self._server = PostgresServer(address)
        self.name = self._server.name
        found = self._rows(_TABLES)
        self._schema_of = {str(table): str(schema) for schema, table, _ in found}
        if not found:
            raise ConfigError("address: the role can read no table there; grant SELECT, or name another database")
        tables = [self._read_table(str(table), int(str(oid))) for _, table, oid in found]
        self.schema = measure(tables, "postgres", self._rows)
        schemas = tuple(sorted(set(self._schema_of.values())))
        prefix = changed_views(self.schema, self._schema_of)
        self._whole = PostgresTarget(self._server, schemas)
        self._changed = PostgresTarget(self._server, schemas, prefix)

    @property
    def targets(self) -> Sequence[PostgresTarget]:
        return [self._whole, self._changed]

    def ask(self, sql: str, *, is_changed: bool) -> Sequence[Sequence[Value]] | None:
        try:
            return self._rows(self._changed.wrapped(sql) if is_changed else sql)
        except QueryRefused as refusal:
            if str(refusal) == TOO_LONG:
                return None
            raise

    def close(self) -> None:
        self._server.close()

    def _rows(self, sql: str) -> Sequence[Sequence[Value]]:
        return self._server.run_now(sql, OUR_LIMITS).rows

    def _read_table(self, name: str, oid: int) -> TableSchema:
        columns = [
            Column(name=str(column), type=str(kind), kind=_KINDS.get(str(category), "other"))
            for column, kind, category in self._rows(_COLUMNS.format(oid))
        ]
        links = [
            Link(column=str(column), other=str(other), target=str(target))
            for column, other, target in self._rows(_LINKS.format(oid))
            if other in self._schema_of
        ]
        key = tuple(str(column) for (column,) in self._rows(_KEY.format(oid)))
        return TableSchema(name=name, columns=tuple(columns), key=key, links=tuple(links))


def changed_views(schema: DatabaseSchema, schema_of: dict[str, str]) -> str:
    """A WITH that hides each table under a changed one: values moved to other rows, some rows missing, links whole."""
    done: list[str] = []
    views: list[str] = []
    waiting = list(schema.tables)
    while waiting:
        names = {table.name for table in waiting}
        free = [table for table in waiting if not {link.other for link in table.links} & (names - {table.name})]
        table = (free or waiting)[0]  # a ring of links is cut at its first table
        waiting.remove(table)
        views.append(_changed_view(table, schema, schema_of[table.name], done))
        done.append(table.name)
    return f"WITH {', '.join(views)} "


def _changed_view(table: TableSchema, schema: DatabaseSchema, place: str, done: Sequence[str]) -> str:
    name = _quoted(table.name)
    order = ", ".join(_quoted(column) for column in table.key) or "ctid"
    numbered = (
        f"SELECT *, row_number() OVER (ORDER BY {order}) - 1 AS turnwise_n, count(*) OVER () AS turnwise_all "
        f"FROM {_quoted(place)}.{name}"
    )
    facts = [column.name for column in table.facts("number", "text", "other")]
    moved = [
        _moved(column.name, facts.index(column.name) + 1) if column.name in facts else _quoted(column.name)
        for column in table.columns
    ]
    turned = f"SELECT {', '.join(moved)}, turnwise_n FROM ({numbered}) AS numbered WINDOW w AS (ORDER BY turnwise_n)"
    is_led_to = any(link.other == table.name for one in schema.tables for link in one.links)
    kept = (
        [] if table.num_rows < SMALL_TABLE and is_led_to else [f"turnwise_n * 7919 % 1009 % 100 >= {DROPPED_PERCENT}"]
    )
    kept += [
        f"({_quoted(link.column)} IS NULL OR {_quoted(link.column)} IN "
        f"(SELECT {_quoted(link.target)} FROM {_quoted(link.other)}))"
        for link in table.links
        if link.other in done
    ]
    columns = ", ".join(_quoted(column.name) for column in table.columns)
    return f"{name} AS (SELECT {columns} FROM ({turned}) AS turned{' WHERE ' + ' AND '.join(kept) if kept else ''})"


def _moved(column: str, number: int) -> str:
    """The value of another row: as many rows further as `sql_files.turn_of` says, around the end."""
    name = _quoted(column)
    step = f"((turnwise_all * {37 * number} / 100 + {number}) % turnwise_all)"
    return (
        f"CASE WHEN turnwise_n + {step} < turnwise_all THEN lead({name}, {step}::int) OVER w "
        f"ELSE lag({name}, (turnwise_all - {step})::int) OVER w END AS {name}"
    )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _to_value(value: Any) -> Value:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() and value.is_finite() else float(value)
    if isinstance(value, datetime.date | datetime.time | datetime.datetime):
        return value.isoformat()
    if isinstance(value, int | float | str | bytes) or value is None:
        return value
    return str(value) if isinstance(value, uuid.UUID | datetime.timedelta) else repr(value)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).partition("\n")[0].split())


def _close_all(connections: list[Any]) -> None:
    while connections:
        connections.pop().close()


def _psycopg() -> Any:
    try:
        return importlib.import_module("psycopg")
    except ImportError as cause:
        raise ConfigError(f"a PostgreSQL address needs the package psycopg: {INSTALL}") from cause
