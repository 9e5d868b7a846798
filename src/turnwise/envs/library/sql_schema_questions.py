"""Makes questions about any database, from its schema and its values. Whoever asks one runs its right query first.

    easy      one table             List the title of the book rows where price is over 30.
    medium    filter, aggregate     What is the average price of the book rows where language is "French"?
    hard      join of two           List the title of the book rows that have an author where name is "Ada Moss".
    hardest   join of three or      For each author name that has some, show it and its number of loan rows.
              more, with grouping   Follow loan to book, book to author.

A question names tables and columns by their own words ("InvoiceLines" becomes "invoice line"), and it says which
columns to show and which links to follow. `SchemaQuestion.shape` is the question without its values: whole shapes are
held out, so that a test never asks a question of the training with another number.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from turnwise.envs.library.sql_schema import (
    Column,
    DatabaseSchema,
    Kind,
    Link,
    TableSchema,
    literal,
    quote,
    thing,
    words,
)

SchemaLevel = Literal["easy", "medium", "hard", "hardest"]
SCHEMA_LEVELS: tuple[SchemaLevel, ...] = ("easy", "medium", "hard", "hardest")

MAX_GROUPS = 500
"""Most different values of a column that a question groups by."""
_MAX_LINKS = 3
_AGGREGATES = (("average", "AVG"), ("summed", "SUM"), ("highest", "MAX"), ("lowest", "MIN"))
_ENDS = (("highest", "DESC"), ("lowest", "ASC"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaQuestion:
    """A question, a query that answers it, and what both have in common with other questions."""

    text: str
    gold: str
    shape: str
    """The level, the form, the tables and the columns, without values. Splits are made by it."""
    tie_free: str | None = None
    """A query whose first column may hold no value twice, because the order of the answer depends on it."""


class NoQuestion(Exception):  # noqa: N818 - it says what was found
    """The tables that were drawn do not allow this form of question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Condition:
    text: str
    sql: str
    shape: str


class _SchemaDraw:
    """Draws tables, columns and values of one schema."""

    def __init__(self, schema: DatabaseSchema, rng: random.Random) -> None:
        self.schema = schema
        self.rng = rng

    def table(self) -> TableSchema:
        return self.rng.choice(self.schema.tables)

    def name(self, text: str) -> str:
        return quote(text, self.schema.dialect)

    def full(self, table: TableSchema, column: Column | str) -> str:
        return f"{self.name(table.name)}.{self.name(column if isinstance(column, str) else column.name)}"

    def column(self, table: TableSchema, *kinds: Kind, allow: Callable[[Column], bool] = lambda _: True) -> Column:
        found = [column for column in table.facts(*kinds) if allow(column)]
        if not found:
            raise NoQuestion
        return self.rng.choice(found)

    def columns(self, table: TableSchema, count: int) -> list[Column]:
        found = table.facts("number", "text")
        if len(found) < count:
            raise NoQuestion
        return self.rng.sample(found, count)

    def condition(self, table: TableSchema, *, is_full: bool, besides: Sequence[Column] = ()) -> _Condition:
        """A condition on one column that is not among `besides`; with the table's name before it if `is_full`."""
        taken = {column.name for column in besides}
        column = self.column(table, "number", "text", allow=lambda one: bool(one.values) and one.name not in taken)
        value = self.rng.choice(column.values)
        place = self.full(table, column) if is_full else self.name(column.name)
        label = f"{table.name}.{column.name}"
        if column.kind == "text":
            return _Condition(text=f'{words(column.name)} is "{value}"', sql=f"{place} = {literal(value)}", shape=label)
        word, sign = self.rng.choice((("over", ">"), ("under", "<"), ("equal to", "=")))
        sql = f"{place} {sign} {literal(value)}"
        return _Condition(text=f"{words(column.name)} is {word} {value}", sql=sql, shape=f"{label}{sign}")

    def link(self) -> tuple[TableSchema, Link, TableSchema]:
        """A table, its link, and the table that it leads to. Two links between the same tables would be ambiguous."""
        found = [(table, link) for table in self.schema.tables for link in clear_links(table)]
        if not found:
            raise NoQuestion
        table, link = self.rng.choice(found)
        return table, link, self.schema.table(link.other)

    def joined(self, table: TableSchema, link: Link) -> str:
        other = self.schema.table(link.other)
        condition = f"{self.full(table, link.column)} = {self.full(other, link.target)}"
        return f"JOIN {self.name(other.name)} ON {condition}"


def clear_links(table: TableSchema) -> list[Link]:
    """The links to other tables that have only one link to that table."""
    others = [link.other for link in table.links]
    return [link for link in table.links if others.count(link.other) == 1 and link.other != table.name]


def draw_schema_question(schema: DatabaseSchema, level: SchemaLevel, rng: random.Random) -> SchemaQuestion | None:
    """Draw one question of a level. None if the tables that were drawn do not allow it: draw again."""
    maker = rng.choice(_MAKERS[level])
    try:
        return maker(_SchemaDraw(schema, rng))
    except NoQuestion:
        return None


def _shape(maker: Callable[..., SchemaQuestion], *parts: str) -> str:
    return " ".join([maker.__name__.strip("_"), *parts])


def _a(name: str) -> str:
    """The words of a name with their article."""
    return f"{'an' if thing(name)[0] in 'aeiou' else 'a'} {thing(name)}"


def _list_where(draw: _SchemaDraw) -> SchemaQuestion:
    table = draw.table()
    shown = draw.column(table, "number", "text")
    condition = draw.condition(table, is_full=False, besides=[shown])
    return SchemaQuestion(
        text=f"List the {words(shown.name)} of the {thing(table.name)} rows where {condition.text}.",
        gold=f"SELECT {draw.name(shown.name)} FROM {draw.name(table.name)} WHERE {condition.sql}",
        shape=_shape(_list_where, table.name, shown.name, condition.shape),
    )


def _look_up(draw: _SchemaDraw) -> SchemaQuestion:
    table = draw.table()
    one, two = draw.columns(table, 2)
    condition = draw.condition(table, is_full=False, besides=[one, two])
    return SchemaQuestion(
        text=f"Show the {words(one.name)} and the {words(two.name)} of the {thing(table.name)} rows "
        f"where {condition.text}.",
        gold=f"SELECT {draw.name(one.name)}, {draw.name(two.name)} FROM {draw.name(table.name)} WHERE {condition.sql}",
        shape=_shape(_look_up, table.name, *sorted((one.name, two.name)), condition.shape),
    )


def _different(draw: _SchemaDraw) -> SchemaQuestion:
    table = draw.table()
    shown = draw.column(table, "number", "text", allow=lambda one: not one.has_nulls and not one.is_unique)
    return SchemaQuestion(
        text=f"List every different {words(shown.name)} of the {thing(table.name)} table once.",
        gold=f"SELECT DISTINCT {draw.name(shown.name)} FROM {draw.name(table.name)}",
        shape=_shape(_different, table.name, shown.name),
    )


def _first_few(draw: _SchemaDraw) -> SchemaQuestion:
    table = draw.table()
    number = draw.column(table, "number", allow=lambda one: not one.has_nulls)
    shown = draw.column(table, "text")
    word, order = draw.rng.choice(_ENDS)
    count = draw.rng.choice((1, 2, 3, 5))
    place, by = draw.name(table.name), f"ORDER BY {draw.name(number.name)} {order}"
    return SchemaQuestion(
        text=f"List the {words(shown.name)} of the {count} {thing(table.name)} rows with the {word} "
        f"{words(number.name)}, the {word} first.",
        gold=f"SELECT {draw.name(shown.name)} FROM {place} {by} LIMIT {count}",
        shape=_shape(_first_few, table.name, shown.name, number.name, order),
        tie_free=f"SELECT {draw.name(number.name)} FROM {place} {by} LIMIT {count + 1}",
    )


def _count_where(draw: _SchemaDraw) -> SchemaQuestion:
    table = draw.table()
    condition = draw.condition(table, is_full=False)
    return SchemaQuestion(
        text=f"How many {thing(table.name)} rows are there where {condition.text}?",
        gold=f"SELECT COUNT(*) FROM {draw.name(table.name)} WHERE {condition.sql}",
        shape=_shape(_count_where, table.name, condition.shape),
    )


def _count_both(draw: _SchemaDraw) -> SchemaQuestion:
    table = draw.table()
    used = draw.columns(table, 2)
    one = draw.condition(table, is_full=False, besides=[c for c in table.columns if c.name != used[0].name])
    two = draw.condition(table, is_full=False, besides=[c for c in table.columns if c.name != used[1].name])
    return SchemaQuestion(
        text=f"How many {thing(table.name)} rows are there where {one.text} and {two.text}?",
        gold=f"SELECT COUNT(*) FROM {draw.name(table.name)} WHERE {one.sql} AND {two.sql}",
        shape=_shape(_count_both, table.name, *sorted((one.shape, two.shape))),
    )


def _aggregate_where(draw: _SchemaDraw) -> SchemaQuestion:
    table = draw.table()
    number = draw.column(table, "number")
    condition = draw.condition(table, is_full=False, besides=[number])
    word, function = draw.rng.choice(_AGGREGATES)
    return SchemaQuestion(
        text=f"What is the {word} {words(number.name)} of the {thing(table.name)} rows where {condition.text}?",
        gold=f"SELECT {function}({draw.name(number.name)}) FROM {draw.name(table.name)} WHERE {condition.sql}",
        shape=_shape(_aggregate_where, table.name, function, number.name, condition.shape),
    )


def _count_different(draw: _SchemaDraw) -> SchemaQuestion:
    table = draw.table()
    counted = draw.column(table, "number", "text", allow=lambda one: not one.is_unique)
    condition = draw.condition(table, is_full=False, besides=[counted])
    return SchemaQuestion(
        text=f"How many different values of {words(counted.name)} do the {thing(table.name)} rows have "
        f"where {condition.text}?",
        gold=f"SELECT COUNT(DISTINCT {draw.name(counted.name)}) FROM {draw.name(table.name)} WHERE {condition.sql}",
        shape=_shape(_count_different, table.name, counted.name, condition.shape),
    )


def _list_joined(draw: _SchemaDraw) -> SchemaQuestion:
    table, link, other = draw.link()
    shown, condition = draw.column(table, "number", "text"), draw.condition(other, is_full=True)
    return SchemaQuestion(
        text=f"List the {words(shown.name)} of the {thing(table.name)} rows that have {_a(other.name)} "
        f"where {condition.text}.",
        gold=f"SELECT {draw.full(table, shown)} FROM {draw.name(table.name)} {draw.joined(table, link)} "
        f"WHERE {condition.sql}",
        shape=_shape(_list_joined, table.name, shown.name, link.column, condition.shape),
    )


def _count_joined(draw: _SchemaDraw) -> SchemaQuestion:
    table, link, other = draw.link()
    condition = draw.condition(other, is_full=True)
    return SchemaQuestion(
        text=f"How many {thing(table.name)} rows have {_a(other.name)} where {condition.text}?",
        gold=f"SELECT COUNT(*) FROM {draw.name(table.name)} {draw.joined(table, link)} WHERE {condition.sql}",
        shape=_shape(_count_joined, table.name, link.column, condition.shape),
    )


def _aggregate_joined(draw: _SchemaDraw) -> SchemaQuestion:
    table, link, other = draw.link()
    number, condition = draw.column(table, "number"), draw.condition(other, is_full=True)
    word, function = draw.rng.choice(_AGGREGATES)
    return SchemaQuestion(
        text=f"What is the {word} {words(number.name)} of the {thing(table.name)} rows that have "
        f"{_a(other.name)} where {condition.text}?",
        gold=f"SELECT {function}({draw.full(table, number)}) FROM {draw.name(table.name)} "
        f"{draw.joined(table, link)} WHERE {condition.sql}",
        shape=_shape(_aggregate_joined, table.name, function, number.name, link.column, condition.shape),
    )


def _show_both(draw: _SchemaDraw) -> SchemaQuestion:
    table, link, other = draw.link()
    one, two = draw.column(table, "number", "text"), draw.column(other, "text", "number")
    condition = draw.condition(table, is_full=True, besides=[one])
    return SchemaQuestion(
        text=f"For the {thing(table.name)} rows where {condition.text}, show the {words(one.name)} and the "
        f"{words(two.name)} of their {thing(other.name)}.",
        gold=f"SELECT {draw.full(table, one)}, {draw.full(other, two)} FROM {draw.name(table.name)} "
        f"{draw.joined(table, link)} WHERE {condition.sql}",
        shape=_shape(_show_both, table.name, one.name, two.name, link.column, condition.shape),
    )


def _has_none(draw: _SchemaDraw) -> SchemaQuestion:
    table, link, other = draw.link()
    shown = draw.column(other, "text")
    column = draw.name(link.column)
    inner = f"SELECT {column} FROM {draw.name(table.name)} WHERE {column} IS NOT NULL"
    return SchemaQuestion(
        text=f"List the {words(shown.name)} of the {thing(other.name)} rows that have no {thing(table.name)} row.",
        gold=f"SELECT {draw.name(shown.name)} FROM {draw.name(other.name)} "
        f"WHERE {draw.name(link.target)} NOT IN ({inner})",
        shape=_shape(_has_none, table.name, link.column, shown.name),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    """A table, and the tables that its links lead to. Every row of the first has at most one row of the join."""

    first: TableSchema
    tables: tuple[TableSchema, ...]
    sql: str
    text: str
    shape: str


def _draw_chain(draw: _SchemaDraw) -> _Chain:
    """Follow two or three links, from a table that has as many; one link if the whole database has no more."""
    long = [table for table in draw.schema.tables if _num_reachable(draw.schema, table) >= 2]
    starts = long or [table for table in draw.schema.tables if clear_links(table)]
    if not starts:
        raise NoQuestion
    first = draw.rng.choice(starts)
    tables, joins, told = [first], [f"FROM {draw.name(first.name)}"], list[str]()
    for _ in range(draw.rng.randint(2, _MAX_LINKS)):
        names = {table.name for table in tables}
        open_links = [(one, link) for one in tables for link in clear_links(one) if link.other not in names]
        if not open_links:
            break
        onward = [pair for pair in open_links if pair[0] is tables[-1]]
        one, link = draw.rng.choice(onward if onward and draw.rng.random() < 0.7 else open_links)
        tables.append(draw.schema.table(link.other))
        joins.append(draw.joined(one, link))
        told.append(f"{thing(one.name)} to {thing(link.other)}")
    shape = " ".join(sorted(table.name for table in tables))
    return _Chain(
        first=first, tables=tuple(tables), sql=" ".join(joins), text=f"Follow {', '.join(told)}.", shape=shape
    )


def _num_reachable(schema: DatabaseSchema, table: TableSchema) -> int:
    found, waiting = {table.name}, [table]
    while waiting:
        for link in clear_links(waiting.pop()):
            if link.other not in found:
                found.add(link.other)
                waiting.append(schema.table(link.other))
    return len(found) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """What the four grouped forms share: a chain, the column to group by, and sometimes a condition."""

    chain: _Chain
    by: str
    """The column, in SQL."""
    label: str
    where_text: str
    where_sql: str
    shape: str


def _draw_groups(draw: _SchemaDraw) -> _Groups:
    chain = _draw_chain(draw)
    last = chain.tables[-1]
    by = draw.column(last, "text", "number", allow=lambda one: not one.has_nulls and 2 <= one.num_values <= MAX_GROUPS)
    where_text = where_sql = where_shape = ""
    if draw.rng.random() < 0.5:
        filtered = draw.rng.choice(chain.tables[:-1])
        condition = draw.condition(filtered, is_full=True)
        where_text = f" Only count rows where the {thing(filtered.name)}'s {condition.text}."
        where_sql, where_shape = f" WHERE {condition.sql}", condition.shape
    return _Groups(
        chain=chain,
        by=draw.full(last, by),
        label=f"{thing(last.name)} {words(by.name)}",
        where_text=where_text,
        where_sql=where_sql,
        shape=f"{chain.shape} {last.name}.{by.name} {where_shape}",
    )


def _count_each(draw: _SchemaDraw) -> SchemaQuestion:
    groups = _draw_groups(draw)
    first = thing(groups.chain.first.name)
    return SchemaQuestion(
        text=f"For each {groups.label} that has some, show it and its number of {first} rows. {groups.chain.text}"
        f"{groups.where_text}",
        gold=f"SELECT {groups.by}, COUNT(*) {groups.chain.sql}{groups.where_sql} GROUP BY {groups.by}",
        shape=_shape(_count_each, groups.shape),
    )


def _measure_each(draw: _SchemaDraw) -> SchemaQuestion:
    groups = _draw_groups(draw)
    number = draw.column(groups.chain.first, "number", allow=lambda one: not one.has_nulls)
    word, function = draw.rng.choice(_AGGREGATES)
    place = draw.full(groups.chain.first, number)
    return SchemaQuestion(
        text=f"For each {groups.label} that has some, show it and the {word} {words(number.name)} of its "
        f"{thing(groups.chain.first.name)} rows. {groups.chain.text}{groups.where_text}",
        gold=f"SELECT {groups.by}, {function}({place}) {groups.chain.sql}{groups.where_sql} GROUP BY {groups.by}",
        shape=_shape(_measure_each, groups.shape, function, number.name),
    )


def _most(draw: _SchemaDraw) -> SchemaQuestion:
    groups = _draw_groups(draw)
    word, order = draw.rng.choice((("most", "DESC"), ("fewest", "ASC")))
    rest = f"{groups.chain.sql}{groups.where_sql} GROUP BY {groups.by} ORDER BY COUNT(*) {order} LIMIT"
    return SchemaQuestion(
        text=f"Which {groups.label} has the {word} {thing(groups.chain.first.name)} rows, not counting those without "
        f"any? {groups.chain.text}{groups.where_text}",
        gold=f"SELECT {groups.by} {rest} 1",
        shape=_shape(_most, groups.shape, order),
        tie_free=f"SELECT COUNT(*) {rest} 2",
    )


def _more_than(draw: _SchemaDraw) -> SchemaQuestion:
    groups = _draw_groups(draw)
    least = draw.rng.choice((1, 2, 3, 5, 10, 20, 50, 100))
    return SchemaQuestion(
        text=f"Which {groups.label} have more than {least} {thing(groups.chain.first.name)} rows? "
        f"{groups.chain.text}{groups.where_text}",
        gold=f"SELECT {groups.by} {groups.chain.sql}{groups.where_sql} GROUP BY {groups.by} HAVING COUNT(*) > {least}",
        shape=_shape(_more_than, groups.shape),
    )


_MAKERS: Mapping[SchemaLevel, Sequence[Callable[[_SchemaDraw], SchemaQuestion]]] = {
    "easy": (_list_where, _look_up, _different, _first_few),
    "medium": (_count_where, _count_both, _aggregate_where, _count_different),
    "hard": (_list_joined, _count_joined, _aggregate_joined, _show_both, _has_none),
    "hardest": (_count_each, _measure_each, _most, _more_than),
}
