"""Shared parts of the adapters: importing the other library, and making tasks of seeds or rows."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, cast

from turnwise.envs.base import Split, Task
from turnwise.envs.rows import Row, read_rows, split_row_tasks
from turnwise.envs.splits import random_for
from turnwise.errors import ConfigError

_NUM_SEEDS = 2**30


def import_peer(module: str, *, extra: str, then: str = "") -> Any:
    """Import another library. If it is missing, `ConfigError` gives the command that installs it.

    Args:
        then: A second command, for a library whose own requirements would replace ours.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as cause:
        if cause.name is None or cause.name.partition(".")[0] != module.partition(".")[0]:
            raise  # the library is installed, but something that it needs is not
        raise ConfigError(
            f"envs of {extra} need the package {module.partition('.')[0]!r}, which is not installed; "
            f"install it with: pip install 'turnwise[{extra}]'" + (f" && {then}" if then else "")
        ) from cause


def seed_tasks(name: str, split: Split, count: int, seed: int) -> list[Task]:
    """Tasks that are seeds for an env: even ones for training, odd ones held out."""
    rng = random_for(name, split, seed)
    numbers = [2 * number + (split == "test") for number in rng.sample(range(_NUM_SEEDS), count)]
    return [Task(id=f"{split}-{number}", data={"seed": number}) for number in numbers]


def row_tasks(data: Path, test_data: Path | None, row_key: str = "") -> Mapping[Split, Sequence[Task]]:
    """Tasks from the rows of a file. Without a file for `test`, one row in five is held out (`split_row_tasks`)."""
    test = None if test_data is None else [_row_task(row) for row in read_rows(test_data)]
    return split_row_tasks([_row_task(row) for row in read_rows(data)], test, row_key=row_key)


def _row_task(row: Row) -> Task:
    try:
        text = json.dumps(row, sort_keys=True)
    except (TypeError, ValueError) as cause:
        raise ConfigError(f"the row {row!r:.60} is not JSON: {cause}") from cause
    return Task(id=f"row-{hashlib.sha256(text.encode('utf-8')).hexdigest()[:16]}", data=json.loads(text))


def numbers_of(found: object) -> dict[str, float]:
    """The entries of a mapping that can be logged: finite numbers under text keys."""
    items = cast(Mapping[object, object], found).items() if isinstance(found, Mapping) else ()
    return {
        key: float(value)
        for key, value in items
        if isinstance(key, str) and isinstance(value, Real) and math.isfinite(value)
    }
