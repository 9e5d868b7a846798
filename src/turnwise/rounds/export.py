"""Pools as files: JSON lines, which `data.dialogues` reads, or Parquet; and the files that a round trains on.

A line has the sample's provenance (round, model, task, attempt, verdict), its messages, and the exact trajectory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from turnwise.credit.preferences import PreferencePair
from turnwise.errors import ConfigError
from turnwise.rounds.store import PlayedAttempt, PoolStore
from turnwise.rounds.tables import POOLS
from turnwise.runlog.arrays import messages_to_json
from turnwise.runtime.suggest import did_you_mean
from turnwise.training.pairs import StoredPair, write_pairs
from turnwise.training.stored import Origin
from turnwise.trajectory import trajectory_to_json

SUFFIXES = (".jsonl", ".parquet")
ORDER = "samples.round, samples.task_id, samples.attempt"
"""Not by id: groups are written as they end, and a round that was interrupted must train on the same batches."""


def pool_rows(store: PoolStore, pool: str, where: str = "1") -> Iterator[dict[str, Any]]:
    """The rows of a pool. `where` is a condition in SQL on the columns of the view `samples`; for `rl` on its own."""
    if pool not in POOLS:
        raise ConfigError(f"no pool {pool!r}{did_you_mean(pool, POOLS)}; expected {', '.join(POOLS)}")
    if pool == "rl":
        for row in store.query(
            f"SELECT r.*, t.difficulty, t.data FROM rl r JOIN tasks t ON t.id = r.task_id WHERE {where} "
            "ORDER BY r.round, r.task_id"
        ):
            yield {**row, "data": json.loads(row["data"])}
        return
    if pool == "preference":
        for row in store.query(
            f"SELECT p.* FROM preference p JOIN samples ON samples.id = p.chosen_id WHERE {where} ORDER BY {ORDER}"
        ):
            sides = {name: _sample(store, row[f"{name}_id"], {}) for name in ("chosen", "rejected")}
            yield {"round": row["round"], "task_id": sides["chosen"]["task_id"], **sides}
        return
    extra = {"learn": "world" if pool == "continued" else "replies"}
    rows = store.query(f"SELECT samples.id FROM samples WHERE in_{pool} AND ({where}) ORDER BY {ORDER}")
    yield from (_sample(store, row["id"], extra) for row in rows)


def _sample(store: PoolStore, attempt_id: int, extra: Mapping[str, Any]) -> dict[str, Any]:
    (row,) = store.query("SELECT * FROM samples WHERE id = ?", attempt_id)
    (attempt,) = store.attempts("a.id = ?", attempt_id)
    return {
        **{key: value for key, value in row.items() if not key.startswith(("in_", "is_chosen", "is_rejected"))},
        **extra,
        "world": store.meta("world"),
        "base_model": store.meta("base_model"),
        "messages": json.loads(messages_to_json(attempt.trajectory.messages)),
        "trajectory": trajectory_to_json(attempt.trajectory),
    }


def write_pool(store: PoolStore, pool: str, path: Path, where: str = "1") -> int:
    """Write a pool to a file; how many rows it has. The file appears whole or not at all."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: expected a name that ends with {' or '.join(SUFFIXES)}")
    rows = list(pool_rows(store, pool, where))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    if path.suffix == ".jsonl":
        part.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    else:
        _write_parquet(part, rows)
    part.replace(path)
    return len(rows)


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Plain columns stay columns; dialogues and ids are JSON text."""
    try:
        pa: Any = import_module("pyarrow")
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError as cause:
        raise ConfigError("Parquet needs pyarrow; pip install 'turnwise[pairs]', or name a .jsonl file") from cause
    flat = [
        {key: json.dumps(value) if isinstance(value, dict | list) else value for key, value in row.items()}
        for row in rows
    ]
    parquet.write_table(pa.Table.from_pylist(flat), path, compression="zstd")


def write_pair_file(store: PoolStore, path: Path, first_round: int, origin: Origin) -> int:
    """The pool `preference` from a round on, as `data.pairs` reads it; how many pairs it has."""
    rows = store.query(
        f"SELECT p.* FROM preference p JOIN samples ON samples.id = p.chosen_id WHERE p.round >= ? ORDER BY {ORDER}",
        first_round,
    )
    pairs: list[StoredPair] = []
    for row in rows:
        chosen, rejected = (_attempt(store, row[name]) for name in ("chosen_id", "rejected_id"))
        (task,) = store.query("SELECT data FROM tasks WHERE id = ?", chosen.task_id)
        pairs.append(
            StoredPair(
                pair=PreferencePair(chosen=chosen.trajectory, rejected=rejected.trajectory),
                kind="dpo",
                world=origin.world,
                model=origin.model,
                run=chosen.model,
                step=row["round"],
                task=json.loads(task["data"]),
            )
        )
    if pairs:
        write_pairs(path, pairs)
    return len(pairs)


def _attempt(store: PoolStore, attempt_id: int) -> PlayedAttempt:
    (attempt,) = store.attempts("a.id = ?", attempt_id)
    return attempt
