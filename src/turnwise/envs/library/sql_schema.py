"""What is known of a database before questions about it are made: its tables, columns, links and some values.

A reader (`sql_files.py` for SQLite, `sql_postgres.py` for PostgreSQL) finds the tables and their keys. `measure` then
asks the database itself for the rest, in SQL that both understand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from turnwise.envs.library.sql_runner import Value

Dialect = Literal["sqlite", "postgres"]
Kind = Literal["number", "text", "other"]
Ask = Callable[[str], Sequence[Sequence[Value]]]
"""Runs a query of ours and returns its rows."""

MAX_SCHEMA_LENGTH = 6000
MAX_VALUES = 200
"""Values of a column that are kept, for conditions."""
MAX_VALUE_LENGTH = 40
_MAX_READ = 4000

_PLAIN = {"sqlite": re.compile(r"[A-Za-z_][A-Za-z0-9_]*"), "postgres": re.compile(r"[a-z_][a-z0-9_]*")}
_RESERVED_WORDS = """
    add all alter analyse analyze and any array as asc authorization autoincrement between both by case cast check
    collate column commit constraint create cross current_date current_time current_timestamp current_user default
    deferrable delete desc distinct do drop else end escape except exists false fetch for foreign from full grant
    group having ilike in index initially inner insert intersect into is isnull join leading left like limit
    localtime natural not nothing notnull null of offset on only or order outer overlaps placing primary references
    returning right rollback select set similar some symmetric table then to trailing transaction true union unique
    update user using values verbose view when where window with
"""
_RESERVED = frozenset(_RESERVED_WORDS.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A foreign key of one column: every value of `column` is a value of `target` in the table `other`."""

    column: str
    other: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column, with what its rows hold."""

    name: str
    type: str
    """The declared type; empty if there is none, which SQLite allows."""
    kind: Kind = "other"
    has_nulls: bool = True
    is_unique: bool = False
    num_values: int = 0
    """Number of different values."""
    values: tuple[Value, ...] = ()
    """At most `MAX_VALUES` of them, spread over the whole range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSchema:
    """A table. `columns` are all of them; questions use those that are no keys."""

    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...] = ()
    links: tuple[Link, ...] = ()
    num_rows: int = 0

    def facts(self, *kinds: Kind) -> list[Column]:
        """The columns of these kinds that hold facts, not keys."""
        keys = {*self.key, *(link.column for link in self.links)}
        return [column for column in self.columns if column.kind in kinds and column.name not in keys]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseSchema:
    """All tables of a database."""

    dialect: Dialect
    tables: tuple[TableSchema, ...]

    @property
    def text(self) -> str:
        """One line per table, as the policy reads it. A very long text is cut."""
        lines = [
            table_line(
                table.name,
                [(quote(column.name, self.dialect), column.type) for column in table.columns],
                [(link.column, link.other, link.target) for link in table.links],
            )
            for table in self.tables
        ]
        return cut_schema("\n".join(lines))

    def table(self, name: str) -> TableSchema:
        return next(table for table in self.tables if table.name == name)


def table_line(name: str, columns: Sequence[tuple[str, str]], links: Sequence[tuple[str, str, str | None]]) -> str:
    """Describe a table in one line: its columns with their types, then the keys that lead to other tables."""
    listed = [f"{column} {kind.lower()}".strip() for column, kind in columns]
    linked = [f"{column} -> {other}.{target or column}" for column, other, target in links]
    return f"{name}({', '.join([*listed, *linked])})"


def cut_schema(text: str) -> str:
    return text if len(text) <= MAX_SCHEMA_LENGTH else f"{text[:MAX_SCHEMA_LENGTH]} ..."


def quote(name: str, dialect: Dialect) -> str:
    """A name as it stands in a query: quoted only if it has to be."""
    if _PLAIN[dialect].fullmatch(name) and name.lower() not in _RESERVED:
        return name
    return '"' + name.replace('"', '""') + '"'


def literal(value: Value) -> str:
    """A number or a text as it stands in a query."""
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


def words(name: str) -> str:
    """A name as it stands in a question.

    >>> words("InvoiceLine"), words("unit_price"), words("URL")
    ('invoice line', 'unit price', 'url')
    """
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_+", " ", name)
    return " ".join(spaced.split()).lower() or name


def thing(name: str) -> str:
    """A table's name as one row is called.

    >>> thing("OrderLines"), thing("categories"), thing("status"), thing("boss")
    ('order line', 'category', 'status', 'boss')
    """
    text = words(name)
    if text.endswith("ies") and len(text) > 4:
        return f"{text[:-3]}y"
    return text[:-1] if text.endswith("s") and not text.endswith(("ss", "us", "is")) and len(text) > 3 else text


def measure(tables: Sequence[TableSchema], dialect: Dialect, ask: Ask) -> DatabaseSchema:
    """Count rows and values, and read some of the values. Tables without rows are left out."""
    counted = [_measure_table(table, dialect, ask) for table in tables]
    kept = {table.name for table in counted if table.num_rows}
    found = tuple(_without_links_to_nothing(table, kept) for table in counted if table.num_rows)
    return DatabaseSchema(dialect=dialect, tables=found)


def _without_links_to_nothing(table: TableSchema, kept: set[str]) -> TableSchema:
    links = tuple(link for link in table.links if link.other in kept)
    return TableSchema(name=table.name, columns=table.columns, key=table.key, links=links, num_rows=table.num_rows)


def _measure_table(table: TableSchema, dialect: Dialect, ask: Ask) -> TableSchema:
    ((num_rows,),) = ask(f"SELECT COUNT(*) FROM {quote(table.name, dialect)}")
    assert isinstance(num_rows, int)
    columns = tuple(_measure_column(table.name, column, dialect, ask) for column in table.columns)
    return TableSchema(name=table.name, columns=columns, key=table.key, links=table.links, num_rows=num_rows)


def _measure_column(table: str, column: Column, dialect: Dialect, ask: Ask) -> Column:
    if dialect == "postgres" and column.kind == "other":
        return column  # its type may have no order and no equality
    name, place = quote(column.name, dialect), quote(table, dialect)
    ((num_rows, num_filled, num_values),) = ask(f"SELECT COUNT(*), COUNT({name}), COUNT(DISTINCT {name}) FROM {place}")
    rows = ask(
        f"SELECT {name} FROM (SELECT DISTINCT {name} FROM {place} WHERE {name} IS NOT NULL) AS found "
        f"ORDER BY {name} LIMIT {_MAX_READ}"
    )
    values = [row[0] for row in rows]
    usable = [value for value in values if _is_usable(value)]
    return Column(
        name=column.name,
        type=column.type,
        kind=_kind_of(values),
        has_nulls=num_filled != num_rows,
        is_unique=num_filled == num_values == num_rows,
        num_values=int(str(num_values)),
        values=tuple(usable[:: max(1, len(usable) // MAX_VALUES)][:MAX_VALUES]),
    )


def _kind_of(values: Sequence[Value]) -> Kind:
    """Numbers or texts only; anything mixed, and a column without values, is `other`."""
    if values and all(isinstance(value, int | float) for value in values):
        return "number"
    return "text" if values and all(isinstance(value, str) for value in values) else "other"


def _is_usable(value: Value) -> bool:
    """Whether a question may show this value: short, on one line, and not endless as a number."""
    if isinstance(value, str):
        return (
            0 < len(value) <= MAX_VALUE_LENGTH and value.isprintable() and value == value.strip() and '"' not in value
        )
    return isinstance(value, int | float) and len(repr(value)) <= 12
