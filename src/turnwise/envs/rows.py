"""Rows of a data file: a JSON list, JSON lines, or parquet where pyarrow is installed."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from turnwise.errors import ConfigError

Row = Mapping[str, Any]


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
        raise ConfigError(f"{path.name} is parquet; `pip install pyarrow`, or use JSON lines") from cause
    return parquet.read_table(path).to_pylist()
