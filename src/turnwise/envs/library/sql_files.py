"""Reads SQLite files that questions are made about, and writes the changed copies that judge answers.

A copy has the same tables, keys and links without about one row in seven, and in each column the values have moved to
other rows. Links stay whole: a row that led to a missing row is missing too. So two queries that agree on the database
by its keys agree on the copy, and a query that only names the right value does not.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from turnwise.envs.library.sql_schema import Column, DatabaseSchema, Link, TableSchema, measure, quote
from turnwise.envs.library.sql_worker import read_only_uri
from turnwise.errors import ConfigError

SUFFIXES = (".sqlite", ".sqlite3", ".db")
MAX_FILE_BYTES = 1 << 30
"""Largest file of which a copy is made."""
DROPPED_PERCENT = 15
SMALL_TABLE = 20
"""A table with fewer rows loses none that another table leads to."""

_TABLES = """SELECT name FROM pragma_table_list WHERE schema = 'main' AND type = 'table' AND name NOT LIKE 'sqlite\\_%'
ESCAPE '\\' ORDER BY name"""


def find_databases(place: Path) -> dict[str, Path]:
    """The SQLite files of a folder and of its subfolders, or one file; by name."""
    place = place.expanduser()
    if place.is_file():
        files = [place]
    elif place.is_dir():
        files = sorted(path for path in place.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    else:
        raise ConfigError(f"databases={place} does not exist; expected a SQLite file, a folder of such files, or shop")
    if not files:
        raise ConfigError(f"no SQLite file in {place}; expected names that end with {', '.join(SUFFIXES)}")
    for file in files:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(
                f"{file} has {file.stat().st_size >> 20} MiB; answers are judged on a copy, and at most "
                f"{MAX_FILE_BYTES >> 20} MiB are copied; move the file elsewhere, or ask a PostgreSQL server"
            )
    root = place if place.is_dir() else place.parent
    names = [file.relative_to(root) for file in files]
    plain = [name.with_suffix("").as_posix() for name in names]
    return {
        short if plain.count(short) == 1 else name.as_posix(): file
        for short, name, file in zip(plain, names, files, strict=True)
    }


@contextmanager
def open_read_only(path: Path) -> Generator[sqlite3.Connection]:
    """Open a file for queries of our own. Nothing in it can be changed, and no file appears beside it."""
    uri = read_only_uri(str(path.absolute()))
    with closing(sqlite3.connect(uri, uri=True, check_same_thread=False)) as connection:
        connection.text_factory = lambda text: bytes(text).decode("utf-8", errors="replace")  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
        yield connection


def read_file_schema(path: Path) -> DatabaseSchema:
    """The tables of a file, with their links and values."""
    with open_read_only(path) as connection:
        try:
            names = [str(row[0]) for row in connection.execute(_TABLES)]
            tables = [_read_table(connection, name) for name in names]
            linked = [_with_guessed_links(connection, table, tables) for table in tables]
            return measure(linked, "sqlite", lambda sql: connection.execute(sql).fetchall())
        except sqlite3.Error as error:
            raise ConfigError(f"{path} cannot be read: {error}; expected a SQLite database") from error


def _read_table(connection: sqlite3.Connection, name: str) -> TableSchema:
    rows = connection.execute("SELECT name, type, pk FROM pragma_table_info(?) ORDER BY cid", (name,)).fetchall()
    keys = sorted((place, column) for column, _, place in rows if place)
    return TableSchema(
        name=name,
        columns=tuple(Column(name=column, type=kind) for column, kind, _ in rows),
        key=tuple(column for _, column in keys),
        links=tuple(_read_links(connection, name)),
    )


def _read_links(connection: sqlite3.Connection, name: str) -> Iterator[Link]:
    """The declared foreign keys of one column."""
    rows: list[Any] = connection.execute(
        'SELECT id, "from", "table", "to" FROM pragma_foreign_key_list(?) ORDER BY id', (name,)
    ).fetchall()
    numbers = [row[0] for row in rows]
    for number, column, other, target in rows:
        if numbers.count(number) == 1:
            yield Link(column=column, other=other, target=target or _only_key(connection, other) or column)


def _only_key(connection: sqlite3.Connection, table: str) -> str | None:
    keys = connection.execute("SELECT name FROM pragma_table_info(?) WHERE pk > 0", (table,)).fetchall()
    return str(keys[0][0]) if len(keys) == 1 else None


def _with_guessed_links(
    connection: sqlite3.Connection, table: TableSchema, tables: Sequence[TableSchema]
) -> TableSchema:
    """Add links that are not declared: a column `AlbumId` or `album_id` whose values are all keys of the table `Album`.

    SQLite does not ask for declarations, and many files have none.
    """
    known = {link.column for link in table.links}
    by_name = {one.name.lower(): one for one in tables}
    spelled = {other: real.name for other, real in by_name.items()}
    links = [
        Link(column=link.column, other=spelled[link.other.lower()], target=link.target)
        for link in table.links
        if link.other.lower() in spelled
    ]
    for column in table.columns:
        plain = column.name.lower().removesuffix("id").rstrip("_")
        other = by_name.get(plain) or by_name.get(f"{plain}s")
        if column.name in known or other is None or other.name == table.name or len(other.key) != 1:
            continue
        if column.name.lower().endswith("id") and _holds_keys_of(connection, table, column.name, other):
            links.append(Link(column=column.name, other=other.name, target=other.key[0]))
    return TableSchema(name=table.name, columns=table.columns, key=table.key, links=tuple(links))


def _holds_keys_of(connection: sqlite3.Connection, table: TableSchema, column: str, other: TableSchema) -> bool:
    name, key = quote(column, "sqlite"), quote(other.key[0], "sqlite")
    strangers = (
        f"SELECT 1 FROM {quote(table.name, 'sqlite')} WHERE {name} IS NOT NULL "
        f"AND {name} NOT IN (SELECT {key} FROM {quote(other.name, 'sqlite')}) LIMIT 1"
    )
    return connection.execute(strangers).fetchone() is None


def write_changed_copy(source: Path, target: Path, schema: DatabaseSchema) -> None:
    """Write the copy that judges answers. The same file gives the same copy on every machine."""
    part = target.with_name(f"{target.name}.{os.getpid()}-{threading.get_ident()}.part")
    with open_read_only(source) as whole, closing(sqlite3.connect(part)) as copy:
        whole.backup(copy)
        copy.execute("PRAGMA journal_mode=OFF")
        copy.execute("PRAGMA synchronous=OFF")
        for (trigger,) in copy.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            copy.execute(f"DROP TRIGGER {_always_quoted(trigger)}")  # it would change other tables
        copy.execute("PRAGMA ignore_check_constraints=ON")
        for table in schema.tables:
            if _has_row_numbers(copy, table):
                _move_values(copy, table)
                _drop_some(copy, table, schema)
        while sum(_drop_orphans(copy, table) for table in schema.tables):
            pass
        copy.commit()
    part.chmod(0o644)
    os.replace(part, target)  # noqa: PTH105 - whole or not at all, whoever else writes it now


def _has_row_numbers(copy: sqlite3.Connection, table: TableSchema) -> bool:
    """A table WITHOUT ROWID keeps its values, and only loses rows whose links lead nowhere."""
    try:
        copy.execute(f"SELECT rowid FROM {_always_quoted(table.name)} LIMIT 0")
    except sqlite3.OperationalError:
        return False
    return True


def _move_values(copy: sqlite3.Connection, table: TableSchema) -> None:
    """Turn each column of facts by a number of rows of its own. What must be unique stays where it is.

    An index may ask for more than its columns tell (`UNIQUE (lower(mail))`): a value that it refuses stays as well.
    """
    name = _always_quoted(table.name)
    unique = copy.execute(
        """SELECT columns.name FROM pragma_index_list(?) AS indexes, pragma_index_info(indexes.name) AS columns
        WHERE indexes."unique" """,
        (table.name,),
    ).fetchall()
    fixed = {row[0] for row in unique}
    for number, column in enumerate(table.facts("number", "text", "other"), start=1):
        if column.name in fixed:
            continue
        rows = copy.execute(f"SELECT rowid, {_always_quoted(column.name)} FROM {name} ORDER BY rowid").fetchall()
        step = turn_of(number, len(rows))
        moved = [(rows[(place + step) % len(rows)][1], row[0]) for place, row in enumerate(rows)]
        copy.executemany(f"UPDATE OR IGNORE {name} SET {_always_quoted(column.name)} = ? WHERE rowid = ?", moved)


def turn_of(number: int, num_rows: int) -> int:
    """By how many rows the values of fact column `number` (from 1) of a table are turned."""
    return (num_rows * number * 37 // 100 + number) % max(1, num_rows)


def _drop_some(copy: sqlite3.Connection, table: TableSchema, schema: DatabaseSchema) -> None:
    is_led_to = any(link.other == table.name for one in schema.tables for link in one.links)
    if table.num_rows < SMALL_TABLE and is_led_to:
        return
    copy.execute(
        f"DELETE FROM {_always_quoted(table.name)} "
        f"WHERE (abs(rowid % 1000003) * 7919 + {len(table.name)}) % 1009 % 100 < {DROPPED_PERCENT}"
    )


def _drop_orphans(copy: sqlite3.Connection, table: TableSchema) -> int:
    count = 0
    for link in table.links:
        column, key = _always_quoted(link.column), _always_quoted(link.target)
        count += copy.execute(
            f"DELETE FROM {_always_quoted(table.name)} WHERE {column} IS NOT NULL "
            f"AND {column} NOT IN (SELECT {key} FROM {_always_quoted(link.other)} WHERE {key} IS NOT NULL)"
        ).rowcount
    return count


def _always_quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
