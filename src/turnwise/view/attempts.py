"""Lists of attempts and of groups: filtered, searched, sorted, and one page at a time."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.envs.joint import SEPARATOR
from turnwise.errors import ConfigError
from turnwise.runlog.arrays import unpack_messages
from turnwise.view.index import COLUMNS, AttemptIndex, IndexWorker
from turnwise.view.runs import Json

PAGE = 50
MAX_PAGE = 500
PREVIEW = 200
"""Characters of the last reply that a list shows."""
ORDERS: Mapping[str, str] = {
    "newest": "id DESC",
    "oldest": "id",
    "best": "reward DESC, id DESC",
    "worst": "reward, id DESC",
    "longest": "num_sampled_tokens DESC, id DESC",
    "turns": "num_turns DESC, id DESC",
}
FACETS = ("phase", "outcome", "stop_reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFilter:
    """Which attempts to list. Empty fields ask for nothing."""

    phase: str = ""
    outcome: str = ""
    stop_reason: str = ""
    task: str = ""
    """A part of the task's id."""
    step_from: int | None = None
    step_to: int | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    success: str = ""
    """yes, no or none (the env gave no verdict)."""
    text: str = ""
    """Words of the dialogue; the last one may be the beginning of a word."""
    members: Mapping[str, str] = field(default_factory=dict[str, str])
    """By the names of runs that mix worlds: the member whose attempts are asked for."""

    def conditions(self, run: str) -> tuple[list[str], list[Any]]:
        """SQL conditions for the attempts of a run with their values, without the text."""
        found: list[tuple[str, Any]] = [
            (f"{name} = ?", getattr(self, name)) for name in FACETS if getattr(self, name) != ""
        ]
        for column in ("step", "reward"):
            for side, sign in (("from", ">="), ("to", "<=")):
                value = getattr(self, f"{column}_{side}")
                if value is not None:
                    found.append((f"{column} {sign} ?", value))
        if self.task:
            found.append(("instr(task_id, ?) > 0", self.task))
        if run in self.members:
            found.append(("instr(task_id, ?) = 1", f"{self.members[run]}{SEPARATOR}"))
        known = {"": [], "yes": ["is_success = 1"], "no": ["is_success = 0"], "none": ["is_success IS NULL"]}
        if self.success not in known:
            raise ConfigError(f"success={self.success!r}; expected yes, no or none")
        return [text for text, _ in found] + known[self.success], [value for _, value in found]


def words_query(text: str) -> str:
    """What a person typed as a query for SQLite's full-text index; every sign in it is taken as it is."""
    words = re.findall(r"\w+", text)
    return " ".join(f'"{word}"' for word in words[:-1]) + (f' "{words[-1]}"*' if words else "")


class AttemptLists:
    """Answers questions about the attempts of runs, from their side indexes."""

    def __init__(self, worker: IndexWorker) -> None:
        self._worker = worker

    def page(self, runs: Mapping[str, Path], chosen: AttemptFilter, order: str, first: int, size: int) -> Json:
        """One page of the attempts of one or several runs, and how many there are in all."""
        if order not in ORDERS:
            raise ConfigError(f"order={order!r}; expected {', '.join(ORDERS)}")
        size = max(1, min(size, MAX_PAGE))
        rows: list[Json] = []
        total, num_searched, num_all = 0, 0, 0
        for name, directory in runs.items():
            index = self._worker.index(directory, with_texts=bool(chosen.text))
            with index.opened() as database:
                # Before the rows: the index grows meanwhile, and what is said to be searched must be in them.
                searched, everything = _progress(database)
                num_searched, num_all = num_searched + searched, num_all + everything
                table = _table(index, database, chosen)
                where, values = _where(chosen, name)
                order_by = "time DESC, id DESC" if order == "newest" and len(runs) > 1 else ORDERS[order]
                asked = f"SELECT {COLUMNS} FROM {table} WHERE {where} ORDER BY {order_by} LIMIT ? OFFSET ?"
                # Of several runs, the first rows of each may be on this page.
                window = (size, first) if len(runs) == 1 else (first + size, 0)
                rows += [{"run": name, **dict(row)} for row in database.execute(asked, (*values, *window))]
                total += database.execute(f"SELECT count(*) FROM {table} WHERE {where}", values).fetchone()[0]
        shown = rows if len(runs) == 1 else sorted(rows, key=lambda row: _sort_key(row, order))[first : first + size]
        self.add_previews(runs, shown)
        return {
            "rows": shown,
            "total": total,
            "first": first,
            "size": size,
            "num_searched": num_searched if chosen.text else None,
            "num_attempts": num_all,
        }

    def groups(self, runs: Mapping[str, Path], chosen: AttemptFilter, first: int, size: int) -> Json:
        """Groups that hold an attempt of the filter, newest first, each with the rewards of all its attempts."""
        size = max(1, min(size, MAX_PAGE))
        found: list[Json] = []
        total = 0
        for name, directory in runs.items():
            index = self._worker.index(directory, with_texts=bool(chosen.text))
            with index.opened() as database:
                table = _table(index, database, chosen)
                where, values = _where(chosen, name)
                distinct = f"SELECT DISTINCT phase, step, task_id FROM {table} WHERE {where}"
                total += database.execute(f"SELECT count(*) FROM ({distinct})", values).fetchone()[0]
                asked = f"SELECT phase, step, task_id, max(id) AS last FROM {table} WHERE {where} "
                asked += "GROUP BY phase, step, task_id ORDER BY last DESC LIMIT ?"
                for row in database.execute(asked, (*values, first + size)).fetchall():
                    members = group_rows(database, row["phase"], row["step"], row["task_id"])
                    found.append({"run": name, **dict(row), "attempts": members, "time": members[-1]["time"]})
        found.sort(key=lambda one: -one["time"])
        return {"groups": found[first : first + size], "total": total, "first": first, "size": size}

    def facets(self, runs: Mapping[str, Path], members: Mapping[str, str]) -> Json:
        """How many attempts there are by phase, outcome and end reason; empty until a side index is complete."""
        counts: dict[str, dict[str, int]] = {name: {} for name in FACETS}
        for name, directory in runs.items():
            index = self._worker.index(directory)
            where, values = _where(AttemptFilter(members=members), name)
            with index.opened() as database:
                if index.source(database) != "main.attempts":
                    return {"is_complete": False, **{facet: {} for facet in FACETS}}
                for facet in FACETS:
                    asked = f"SELECT {facet}, count(*) FROM attempts WHERE {where} GROUP BY {facet}"
                    for value, count in database.execute(asked, values):
                        counts[facet][value] = counts[facet].get(value, 0) + count
        return {"is_complete": True, **counts}

    def add_previews(self, runs: Mapping[str, Path], rows: Sequence[Json]) -> None:
        """Add the beginning of the last reply to each row."""
        for name in {row["run"] for row in rows}:
            with self._worker.index(runs[name]).opened() as database:
                for row in rows:
                    if row["run"] == name:
                        row["preview"] = _preview(database, row["id"])


def group_rows(database: sqlite3.Connection, phase: str, step: int, task_id: str) -> list[Json]:
    """The attempts of one group, in the order in which they were stored."""
    asked = f"SELECT {COLUMNS} FROM run.trajectories WHERE phase = ? AND step = ? AND task_id = ? ORDER BY id"
    return [dict(row) for row in database.execute(asked, (phase, step, task_id))]


def _table(index: AttemptIndex, database: sqlite3.Connection, chosen: AttemptFilter) -> str:
    return "main.attempts" if chosen.text else index.source(database)


def _where(chosen: AttemptFilter, run: str) -> tuple[str, list[Any]]:
    conditions, values = chosen.conditions(run)
    if chosen.text:
        query = words_query(chosen.text)
        if not query.strip():
            return "0", []  # only signs: no word holds them
        conditions.append("key IN (SELECT rowid FROM words WHERE words MATCH ?)")
        values.append(query)
    return " AND ".join(conditions) or "1", values


def _progress(database: sqlite3.Connection) -> tuple[int, int]:
    """How many attempts can be searched by words, and how many there are."""
    (done,) = database.execute("SELECT key FROM progress WHERE name = 'texts'").fetchone()
    (searched,) = database.execute("SELECT count(*) FROM main.attempts WHERE key <= ?", (done,)).fetchone()
    (everything,) = database.execute("SELECT coalesce(max(id), 0) FROM run.trajectories").fetchone()
    return searched, everything


def _sort_key(row: Json, order: str) -> tuple[float, float]:
    keys = {
        "newest": -row["time"],
        "oldest": row["time"],
        "best": -row["reward"],
        "worst": row["reward"],
        "longest": -row["num_sampled_tokens"],
        "turns": -row["num_turns"],
    }
    return keys[order], -row["time"]


def _preview(database: sqlite3.Connection, attempt_id: int) -> str:
    asked = "SELECT reply FROM run.turns WHERE trajectory_id = ? ORDER BY turn DESC LIMIT 1"
    row = database.execute(asked, (attempt_id,)).fetchone()
    if row is None:
        return ""
    (reply,) = unpack_messages(row["reply"])
    calls = " ".join(f"{call.name}({', '.join(map(str, call.arguments.values()))})" for call in reply.tool_calls)
    return " ".join(f"{reply.content} {calls}".split())[:PREVIEW]
