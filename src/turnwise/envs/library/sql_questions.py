"""Generates questions about generated databases. The right query of each was run before the question is asked.

    easy      one table        How many cats have age over 3?             SELECT COUNT(*) FROM cats WHERE age > 3
    medium    join, group      How many cats are there for each city?     SELECT city, COUNT(*) FROM cats GROUP BY city
    hard      nested, having,  Which cats have age above the average?     SELECT name FROM cats WHERE age > (SELECT
              order                                                       AVG(age) FROM cats)

A question is asked only if its answer is not empty, is not every row, and differs on the database's other variant, so
that no constant query is right on both. A question about an order has no ties, so that there is one right order.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass

from turnwise.envs.library.sql_compare import asks_for_order, same_result
from turnwise.envs.library.sql_databases import Database, Level, Table, draw_database

_TRIES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlQuestion:
    """A question and a query that answers it."""

    text: str
    gold: str
    tie_free: str | None = None
    """The expression that the right query orders by. All of its values must differ."""


def draw_question(level: Level, number: int, rng: random.Random) -> SqlQuestion | None:
    """Draw a question about database `number` of a level. None if no useful question was found."""
    variants = [draw_database(level, number, variant) for variant in (0, 1)]
    with closing(variants[0].open()) as first, closing(variants[1].open()) as second:
        for _ in range(_TRIES):
            question = rng.choice(_MAKERS[level])(variants[0], rng)
            if _says_something(question, first, second):
                return question
    return None


def _says_something(question: SqlQuestion, first: sqlite3.Connection, second: sqlite3.Connection) -> bool:
    answers = [connection.execute(question.gold).fetchall() for connection in (first, second)]
    if not answers[0] or not answers[1] or answers[0] == [(0,)] or answers[0][0][0] is None:
        return False
    if same_result(answers[0], answers[1], ordered=asks_for_order(question.gold)):
        return False
    return question.tie_free is None or all(_has_no_ties(question.tie_free, one) for one in (first, second))


def _has_no_ties(sql: str, connection: sqlite3.Connection) -> bool:
    values = connection.execute(sql).fetchall()
    return len(set(values)) == len(values)


Maker = Callable[[Database, random.Random], SqlQuestion]

_COMPARISONS = (("over", ">"), ("under", "<"))
_EXTREMES = (("highest", "MAX"), ("lowest", "MIN"))


def _comparison(table: Table, rng: random.Random) -> tuple[str, str]:
    """A condition on a number or a word of the table, in words and in SQL."""
    if rng.random() < 0.5:
        column = rng.choice(table.numbers)
        word, sign = rng.choice(_COMPARISONS)
        value = rng.choice(table.values(column))
        return f"{column} {word} {value}", f"{column} {sign} {value}"
    column = rng.choice((*table.words, *table.numbers))
    value = rng.choice(table.values(column))
    return f"{column} {value}", f"{column} = {value!r}"


def _count(database: Database, rng: random.Random) -> SqlQuestion:
    table = database.main
    text, sql = _comparison(table, rng)
    return SqlQuestion(
        text=f"How many {table.name} have {text}?", gold=f"SELECT COUNT(*) FROM {table.name} WHERE {sql}"
    )


def _names(database: Database, rng: random.Random) -> SqlQuestion:
    table = database.main
    text, sql = _comparison(table, rng)
    return SqlQuestion(text=f"Which {table.name} have {text}?", gold=f"SELECT name FROM {table.name} WHERE {sql}")


def _extreme(database: Database, rng: random.Random) -> SqlQuestion:
    table, column = database.main, rng.choice(database.main.numbers)
    word, function = rng.choice((*_EXTREMES, ("average", "AVG"), ("total", "SUM")))
    return SqlQuestion(
        text=f"What is the {word} {column} of the {table.name}?", gold=f"SELECT {function}({column}) FROM {table.name}"
    )


def _value_of(database: Database, rng: random.Random) -> SqlQuestion:
    table = database.main
    column, name = rng.choice((*table.numbers, *table.words)), rng.choice(table.values("name"))
    return SqlQuestion(
        text=f"What is the {column} of {name}?", gold=f"SELECT {column} FROM {table.name} WHERE name = '{name}'"
    )


def _count_each(database: Database, rng: random.Random) -> SqlQuestion:
    table, column = database.main, rng.choice(database.main.words)
    return SqlQuestion(
        text=f"How many {table.name} are there for each {column}? Show {column} and number.",
        gold=f"SELECT {column}, COUNT(*) FROM {table.name} GROUP BY {column}",
    )


def _extreme_each(database: Database, rng: random.Random) -> SqlQuestion:
    table, column, number = database.main, rng.choice(database.main.words), rng.choice(database.main.numbers)
    word, function = rng.choice((*_EXTREMES, ("average", "AVG"), ("total", "SUM")))
    return SqlQuestion(
        text=f"What is the {word} {number} of the {table.name} for each {column}? Show {column} and {number}.",
        gold=f"SELECT {column}, {function}({number}) FROM {table.name} GROUP BY {column}",
    )


def _join(table: Table) -> str:
    return f"{table.name} JOIN owners ON {table.name}.owner = owners.name"


def _names_by_town(database: Database, rng: random.Random) -> SqlQuestion:
    table, town = database.main, rng.choice(database.tables[1].values("town"))
    return SqlQuestion(
        text=f"Which {table.name} have an owner from {town}?",
        gold=f"SELECT {table.name}.name FROM {_join(table)} WHERE town = '{town}'",
    )


def _count_by_town(database: Database, rng: random.Random) -> SqlQuestion:
    table, town = database.main, rng.choice(database.tables[1].values("town"))
    return SqlQuestion(
        text=f"How many {table.name} have an owner from {town}?",
        gold=f"SELECT COUNT(*) FROM {_join(table)} WHERE town = '{town}'",
    )


def _town_of(database: Database, rng: random.Random) -> SqlQuestion:
    table, name = database.main, rng.choice(database.main.values("name"))
    return SqlQuestion(
        text=f"From which town is the owner of {name}?",
        gold=f"SELECT town FROM {_join(table)} WHERE {table.name}.name = '{name}'",
    )


def _above_average(database: Database, rng: random.Random) -> SqlQuestion:
    table, number = database.main, rng.choice(database.main.numbers)
    word, sign = rng.choice((("above", ">"), ("below", "<")))
    return SqlQuestion(
        text=f"Which {table.name} have {number} {word} the average?",
        gold=f"SELECT name FROM {table.name} WHERE {number} {sign} (SELECT AVG({number}) FROM {table.name})",
    )


def _owners_without(database: Database, rng: random.Random) -> SqlQuestion:
    table = database.main
    text, sql = _comparison(table, rng)
    return SqlQuestion(
        text=f"Which owners have no {table.name} with {text}?",
        gold=f"SELECT name FROM owners WHERE name NOT IN (SELECT owner FROM {table.name} WHERE {sql})",
    )


def _having(database: Database, rng: random.Random) -> SqlQuestion:
    table, column = database.main, rng.choice((*database.main.words, "owner"))
    least = rng.randint(1, 3)
    label = "Which owners have" if column == "owner" else f"Which {column} values are shared by"
    return SqlQuestion(
        text=f"{label} more than {least} {table.name}?",
        gold=f"SELECT {column} FROM {table.name} GROUP BY {column} HAVING COUNT(*) > {least}",
    )


def _in_order(database: Database, rng: random.Random) -> SqlQuestion:
    table, number = database.main, rng.choice(database.main.numbers)
    text, sql = _comparison(table, rng)
    word, direction = rng.choice((("highest", "DESC"), ("lowest", "ASC")))
    where = f"FROM {table.name} WHERE {sql}"
    return SqlQuestion(
        text=f"List the {table.name} with {text}, {word} {number} first.",
        gold=f"SELECT name {where} ORDER BY {number} {direction}",
        tie_free=f"SELECT {number} {where}",
    )


def _top(database: Database, rng: random.Random) -> SqlQuestion:
    table, number = database.main, rng.choice(database.main.numbers)
    word, direction = rng.choice((("highest", "DESC"), ("lowest", "ASC")))
    count = rng.randint(2, 3)
    return SqlQuestion(
        text=f"List the {count} {table.name} with the {word} {number}, {word} first.",
        gold=f"SELECT name FROM {table.name} ORDER BY {number} {direction} LIMIT {count}",
        tie_free=f"SELECT {number} FROM {table.name} ORDER BY {number} {direction} LIMIT {count + 1}",
    )


_MAKERS: Mapping[Level, tuple[Maker, ...]] = {
    "easy": (_count, _names, _extreme, _value_of),
    "medium": (_count_each, _extreme_each, _names_by_town, _count_by_town, _town_of),
    "hard": (_above_average, _owners_without, _having, _in_order, _top),
}
