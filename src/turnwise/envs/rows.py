"""Rows of a data file, which is a JSON list, JSON lines, or parquet where pyarrow is installed; which are held out."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from turnwise.envs.base import Split, Task
from turnwise.envs.splits import split_of
from turnwise.errors import ConfigError

Row = Mapping[str, Any]

ASKED_FIELDS = ("prompt", "question", "problem", "instruction", "query", "input", "messages")
"""Fields that usually hold what a task asks."""


def read_rows(path: Path | str) -> list[Row]:
    """Read every row as an object. `ConfigError` if the file is missing, empty or of another kind."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; check the path")
    rows = _read_parquet(path) if path.suffix == ".parquet" else _read_json(path)
    if not rows:
        raise ConfigError(f"{path} holds no rows")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, row {number} is {type(row).__name__}; expected an object")
    return cast(list[Row], rows)


def read_row_key(text: str) -> list[str]:
    """The fields that `question, table` names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def what_row_asks(row: Row, fields: Sequence[str] = ()) -> str:
    """What identifies the task of a row: two rows with equal texts are the same task, whatever else they hold.

    Args:
        fields: The fields that say what is asked. None: those of `ASKED_FIELDS` that the row has; if it has none of
            them, `id`; without that, the whole row.
    """
    if missing := [name for name in fields if name not in row]:
        raise ConfigError(f"a row has no field {', '.join(missing)}; it has {', '.join(map(str, row)) or 'no fields'}")
    chosen = fields or [name for name in ASKED_FIELDS if name in row] or [name for name in ("id",) if name in row]
    asked = {name: row[name] for name in chosen or row}
    texts = {name: " ".join(value.split()) if isinstance(value, str) else value for name, value in asked.items()}
    return json.dumps(texts, sort_keys=True, default=str)


def split_row_tasks(
    tasks: Sequence[Task], test_tasks: Sequence[Task] | None = None, *, row_key: str = ""
) -> dict[Split, list[Task]]:
    """Tasks whose data are rows, by split, each once. Rows that ask the same are in one split.

    Without `test_tasks`, one task in five is held out, by the hash of its id; of rows that ask the same, the least id
    decides for all. If all rows ask the same, as in a game that hides its answer, each is a task of its own.

    Args:
        row_key: The fields that say what a row asks, with commas between them; empty: see `what_row_asks`.

    Raises:
        ConfigError: A row of `test_tasks` asks what a row of `tasks` asks.
    """
    every, fields = [*tasks, *(test_tasks or ())], read_row_key(row_key)
    asked = [what_row_asks(task.data, fields) for task in every]
    if not fields and len(set(asked)) == 1:
        asked = [task.id for task in every]
    if test_tasks is not None:
        shared = set(asked[: len(tasks)]) & set(asked[len(tasks) :])
        if shared:
            raise ConfigError(
                f"{len(shared)} tasks are both trained on and held out, such as {min(shared):.80}; leave their rows "
                "out of one of the two files, or name the fields that tell tasks apart: row_key=FIELD,FIELD"
            )
        return {"train": _each_once(tasks), "test": _each_once(test_tasks)}
    first: dict[str, str] = {}
    for key, task in zip(asked, every, strict=True):
        first[key] = min(task.id, first.get(key, task.id))
    found: dict[Split, list[Task]] = {"train": [], "test": []}
    for key, task in zip(asked, every, strict=True):
        found[split_of(first[key])].append(task)
    return {split: _each_once(own) for split, own in found.items()}


def _each_once(tasks: Sequence[Task]) -> list[Task]:
    return list({task.id: task for task in tasks}.values())


def _read_json(path: Path) -> list[object]:
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        return _load(path, 1, text)
    lines = enumerate(text.splitlines(), start=1)
    return [_load(path, number, line) for number, line in lines if line.strip()]


def _load(path: Path, line: int, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as cause:
        raise ConfigError(f"{path}, line {line}: {cause}; expected a JSON list, or one JSON object per line") from cause


def _read_parquet(path: Path) -> list[object]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as cause:
        raise ConfigError(f"{path.name} is parquet; pip install 'turnwise[pairs]', or use JSON lines") from cause
    return parquet.read_table(path).to_pylist()
