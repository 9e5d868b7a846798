"""`turnwise flywheel` and `turnwise pools`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from turnwise.errors import ConfigError
from turnwise.rounds.export import pool_rows, write_pool
from turnwise.rounds.flywheel import flywheel
from turnwise.rounds.store import PoolStore
from turnwise.rounds.tables import OVERALL, POOLS
from turnwise.runtime.exit_codes import ExitCode
from turnwise.watch.observer import Observer

SHOWN = ("round", "task_id", "attempt", "difficulty", "verdict", "score", "is_good", "is_success", "reward")


class StageLines(Observer):
    """Prints a line for every stage, and what the runs have to say, such as alarms."""

    def message(self, text: str) -> None:
        print(text, flush=True)


def run_flywheel(file: str, overrides: Sequence[str]) -> ExitCode:
    """Run the command."""
    wheel = flywheel(file, overrides=list(overrides), observer=StageLines())
    print()
    _show(wheel.directory)
    print(f"model  {wheel.model}")
    return ExitCode.OK


def run_pools(directory: str, pool: str | None, where: str, out: str | None) -> ExitCode:
    """Run the command."""
    place = Path(directory).expanduser()
    if pool is None:
        if out is not None or where != "1":
            raise ConfigError(f"--out and --where are for one pool; add --pool {', '.join(POOLS[:-1])} or {POOLS[-1]}")
        _show(place)
        return ExitCode.OK
    with PoolStore.open(place, read_only=True) as store:
        if out is not None:
            path = Path(out).expanduser()
            print(f"wrote {write_pool(store, pool, path, where)} rows to {path}")
            return ExitCode.OK
        for row in pool_rows(store, pool, where):
            print(json.dumps({key: row[key] for key in SHOWN if key in row} or row))
    return ExitCode.OK


def _show(directory: Path) -> None:
    """A line for each round, and the size of each pool."""
    with PoolStore.open(directory, read_only=True) as store:
        levels = [row["difficulty"] for row in store.query("SELECT DISTINCT difficulty FROM evaluations ORDER BY 1")]
        own = [level for level in levels if level != OVERALL]
        names = "".join(f"{f'level {level}':>10}" for level in own) if len(own) > 1 else ""
        print(f"round  held-out success (95 % interval){names}   good  sft  rl  pairs  level")
        for row in store.query("SELECT * FROM evaluations WHERE difficulty = ? ORDER BY round", OVERALL):
            print(_line(store, row["round"], row, own if names else []))
        sizes = ", ".join(f"{name} {store.query(f'SELECT count(*) AS n FROM {name}')[0]['n']}" for name in POOLS)
        print(f"pools  {sizes}; in {directory}")


def _line(store: PoolStore, number: int, row: object, levels: Sequence[int]) -> str:
    assert isinstance(row, dict)
    if row["success"] is None:
        measured = f"reward {row['reward']:.3f}"
    else:
        measured = f"{row['success']:.1%} ({row['success_low']:.1%} to {row['success_high']:.1%})"
    parts = [f"{number:>5}  {measured:<33}"]
    for level in levels:
        (one,) = store.query("SELECT success FROM evaluations WHERE round = ? AND difficulty = ?", number, level)
        parts.append(f"{'' if one['success'] is None else format(one['success'], '.1%'):>10}")
    judged, routed, tasks = (store.stage(number, stage) or {} for stage in ("judge", "route", "tasks"))
    if routed:
        good = judged.get("good_share") or 0.0
        counts = f"{routed['sft']:>5}{routed['rl']:>4}{routed['preference']:>7}"
        parts.append(f"  {good:>5.0%}{counts}{tasks.get('level', ''):>7}")
    return "".join(parts)
