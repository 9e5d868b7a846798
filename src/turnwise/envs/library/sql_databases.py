"""Generates small databases from a number, and writes them to files.

    cats(name, age, city, owner)          10 to 14 rows
    owners(name, town)                    6 rows; levels above easy only

The same number and variant give the same content on every machine. Every database has variants: the same schema with
other rows. A policy sees variant 0. An answer must be right on variant 1 too, so a query that only contains the right
value does not count.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from turnwise.envs.splits import random_for

Level = Literal["easy", "medium", "hard"]
LEVELS: tuple[Level, ...] = ("easy", "medium", "hard")

NAMES = (
    *("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hugo", "Ida", "Jack", "Kim", "Leo", "Max", "Nora"),
    *("Otto", "Pia", "Ray", "Sam", "Tom", "Una", "Vera", "Will", "Zoe", "Amy", "Bob", "Cora", "Dora", "Emil"),
)
WORDS: Mapping[str, Sequence[str]] = {
    "city": ("Rome", "Oslo", "Paris", "Lima", "Cairo"),
    "color": ("red", "blue", "black", "white", "green"),
    "country": ("Peru", "Chad", "Cuba", "Iran", "Mali"),
    "team": ("A", "B", "C", "D"),
    "food": ("fish", "corn", "hay", "rice"),
}
NUMBERS: Mapping[str, tuple[int, int]] = {
    "age": (1, 12),
    "weight": (2, 20),
    "price": (1, 30),
    "size": (1, 9),
    "score": (0, 20),
    "speed": (10, 60),
}
THEMES: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "cats": (("city", "color", "food"), ("age", "weight", "price")),
    "dogs": (("city", "color", "food"), ("age", "weight", "size")),
    "horses": (("color", "country", "food"), ("age", "speed", "price")),
    "boats": (("city", "color", "country"), ("age", "size", "speed", "price")),
    "players": (("city", "team", "country"), ("age", "score", "weight")),
    "robots": (("color", "team", "city"), ("size", "weight", "price", "speed")),
    "farms": (("city", "country", "food"), ("age", "size", "price")),
    "shops": (("city", "color", "country"), ("age", "size", "score")),
    "pilots": (("city", "team", "country"), ("age", "score", "speed")),
    "dolls": (("color", "team", "country"), ("size", "price", "weight")),
}
"""The subjects of tables, with the text and number columns that each may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table with its rows."""

    name: str
    words: tuple[str, ...]
    """Text columns besides `name`."""
    numbers: tuple[str, ...]
    link: str | None
    """The column that names a row of the other table."""
    rows: tuple[tuple[str | int, ...], ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return ("name", *self.numbers, *self.words, *([self.link] if self.link else []))

    @property
    def schema(self) -> str:
        return f"{self.name}({', '.join(self.columns)})"

    def values(self, column: str) -> list[str | int]:
        at = self.columns.index(column)
        return [row[at] for row in self.rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """One variant of a drawn database."""

    tables: tuple[Table, ...]

    @property
    def schema(self) -> str:
        return "\n".join(table.schema for table in self.tables)

    @property
    def main(self) -> Table:
        return self.tables[0]

    def write(self, connection: sqlite3.Connection) -> None:
        for table in self.tables:
            kinds = ", ".join(f"{name} {'INTEGER' if name in table.numbers else 'TEXT'}" for name in table.columns)
            connection.execute(f"CREATE TABLE {table.name} ({kinds})")
            marks = ", ".join("?" * len(table.columns))
            connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", table.rows)
        connection.commit()

    def open(self) -> sqlite3.Connection:
        """Open the database in memory, for our own queries."""
        connection = sqlite3.connect(":memory:")
        self.write(connection)
        return connection


def draw_database(level: Level, number: int, variant: int) -> Database:
    """Generate database `number` of a level. Variants share the schema and the owners' names, not the rows."""
    shape, rows = random_for("schema", level, number), random_for("rows", level, number, variant)
    theme = shape.choice(sorted(THEMES))
    words_of, numbers_of = THEMES[theme]
    numbers = tuple(shape.sample(numbers_of, shape.choice((1, 2)) if level == "easy" else 1))
    words = tuple(shape.sample(words_of, 1))
    if level == "easy":
        return Database(tables=(_draw_table(rows, theme, words, numbers, owners=()),))
    owners = shape.sample(NAMES, 6)
    main = _draw_table(rows, theme, words, numbers, owners=owners)
    towns = tuple((owner, rows.choice(WORDS["city"])) for owner in owners)
    second = Table(name="owners", words=("town",), numbers=(), link=None, rows=towns)
    return Database(tables=(main, second))


def _draw_table(
    rng: random.Random, name: str, words: tuple[str, ...], numbers: tuple[str, ...], owners: Sequence[str]
) -> Table:
    rows: list[tuple[str | int, ...]] = []
    for row_name in rng.sample(NAMES, rng.randint(10, 14)):
        row: list[str | int] = [row_name, *(rng.randint(*NUMBERS[column]) for column in numbers)]
        row += [rng.choice(WORDS[column]) for column in words]
        row += [rng.choice(owners[:-1])] if owners else []  # the last owner has nothing, for questions about that
        rows.append(tuple(row))
    return Table(name=name, words=words, numbers=numbers, link="owner" if owners else None, rows=tuple(rows))


class DatabaseFolder:
    """Generated databases as files. A file is written when it is first needed, and deleted with this object."""

    def __init__(self) -> None:
        outer = Path(tempfile.mkdtemp(prefix="turnwise-sql-"))  # closed to others, who may be shown what is in it
        weakref.finalize(self, shutil.rmtree, outer, ignore_errors=True)
        self.path = outer / "databases"
        self.path.mkdir()
        self.path.chmod(0o755)

    def file(self, level: Level, number: int, variant: int) -> Path:
        path = self.path / f"{level}-{number}-{variant}.sqlite"
        if not path.exists():
            part = path.with_suffix(f".{threading.get_ident()}.part")
            with closing(sqlite3.connect(part)) as connection:
                connection.execute("PRAGMA journal_mode=OFF")
                connection.execute("PRAGMA synchronous=OFF")  # a file that a crash spoils goes with its folder
                draw_database(level, number, variant).write(connection)
            part.chmod(0o644)
            os.replace(part, path)  # noqa: PTH105 - whole or not at all, whoever else writes it now
        return path
