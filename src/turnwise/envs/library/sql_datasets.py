"""Reads Spider and BIRD as published: questions in JSON, databases as SQLite files.

    spider/   train_spider.json  train_others.json  dev.json  tables.json     database/DB/DB.sqlite
    bird/     train/train.json  train/train_databases/DB/DB.sqlite
              dev/dev.json      dev/dev_databases/DB/DB.sqlite

A row has `db_id`, `question` and the right query as `query` (Spider) or `SQL` (BIRD). BIRD's `evidence` is a hint that
is shown with the question. Train files are for training and dev files are held out. A folder with only one of the two
is split by database, so that no held-out question is about a database of the training split.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.envs.base import Split
from turnwise.envs.library.sql_files import open_read_only
from turnwise.envs.library.sql_schema import cut_schema, table_line
from turnwise.envs.rows import Row, read_rows
from turnwise.envs.splits import split_of
from turnwise.errors import ConfigError

_FILES: Mapping[Split, tuple[str, ...]] = {
    "train": ("train_spider.json", "train_others.json", "train.json"),
    "test": ("dev.json",),
}
_PLACES = ("", "train", "dev")
_DATABASES = ("database", "train_databases", "dev_databases", "databases")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetQuestion:
    """One row of a data set."""

    id: str
    database: Path
    text: str
    gold: str


def load_dataset(path: Path) -> Mapping[Split, Sequence[DatasetQuestion]]:
    """Both splits of a Spider or BIRD folder."""
    path = path.expanduser()
    if not path.is_dir():
        raise ConfigError(f"path={path} is not a folder; expected Spider's or BIRD's, with dev.json and the databases")
    found: dict[Split, list[DatasetQuestion]] = {
        split: [question for file in _find(path, split) for question in _read_file(path, file, split)]
        for split in _FILES
    }
    if not any(found.values()):
        names = ", ".join(name for names in _FILES.values() for name in names)
        raise ConfigError(f"no questions in {path}; expected one of {names}, there or in train/ or dev/")
    if all(found.values()):
        return found
    return _split_by_database([question for questions in found.values() for question in questions], path)


def _find(path: Path, split: Split) -> list[Path]:
    return [file for place in _PLACES for name in _FILES[split] if (file := path / place / name).is_file()]


def _read_file(root: Path, file: Path, split: Split) -> list[DatasetQuestion]:
    return [_read_row(root, file, split, number, row) for number, row in enumerate(read_rows(file), start=1)]


def _read_row(root: Path, file: Path, split: Split, number: int, row: Row) -> DatasetQuestion:
    name, text, gold = row.get("db_id"), row.get("question"), row.get("query", row.get("SQL"))
    if not (isinstance(name, str) and isinstance(text, str) and isinstance(gold, str)):
        raise ConfigError(f"{file}, row {number}: expected db_id, question, and the gold as query or SQL")
    evidence = row.get("evidence")
    hint = f"\nHint: {evidence.strip()}" if isinstance(evidence, str) and evidence.strip() else ""
    return DatasetQuestion(
        id=f"{file.stem}-{split}-{number}",
        database=_find_database(root, file, name),
        text=text.strip() + hint,
        gold=gold.strip().rstrip("; \n"),
    )


def _find_database(root: Path, file: Path, name: str) -> Path:
    for place in (file.parent, root):
        for folder in _DATABASES:
            for suffix in (".sqlite", ".db"):
                database = place / folder / name / f"{name}{suffix}"
                if database.is_file():
                    return database
    raise ConfigError(
        f"{file} asks about {name}, but there is no {name}/{name}.sqlite in any of {', '.join(_DATABASES)} "
        f"of {file.parent}"
    )


def _split_by_database(questions: Sequence[DatasetQuestion], path: Path) -> Mapping[Split, list[DatasetQuestion]]:
    split: dict[Split, list[DatasetQuestion]] = {"train": [], "test": []}
    for question in questions:
        split[split_of(question.database.stem)].append(question)
    if not all(split.values()):
        names = {question.database.stem for question in questions}
        raise ConfigError(
            f"{path} has questions about {len(names)} databases and no second file, so nothing could be held out by "
            "database; add the train or the dev file"
        )
    return split


def read_schema(database: Path) -> str:
    """Describe each table in one line, with the keys that link tables. A very long text is cut."""
    with open_read_only(database) as connection:
        tables = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
        ).fetchall()
        lines = [_table_line(connection, name) for (name,) in tables]
    return cut_schema("\n".join(lines))


def _table_line(connection: sqlite3.Connection, table: str) -> str:
    columns = connection.execute("SELECT name, type FROM pragma_table_info(?)", (table,)).fetchall()
    links = connection.execute('SELECT "from", "table", "to" FROM pragma_foreign_key_list(?)', (table,)).fetchall()
    return table_line(table, [(_quoted(name), kind) for name, kind in columns], links)


def _quoted(name: str) -> str:
    return name if name.isidentifier() else f'"{name}"'
