"""Captures on disk, in a SQLite file of their own: what an agent said and was answered survives a restart.

A turn is written before its reply is sent. So a reply that an agent has heard is never lost.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from turnwise.runtime.transaction import transaction

FILE_NAME = "captures.sqlite3"

_TABLES = """
CREATE TABLE IF NOT EXISTS captures (
    capture_id TEXT PRIMARY KEY, owner TEXT NOT NULL, settings TEXT NOT NULL, started_at REAL NOT NULL,
    used_at REAL NOT NULL, rewards TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS turns (
    capture_id TEXT NOT NULL REFERENCES captures ON DELETE CASCADE, number INTEGER NOT NULL, content TEXT NOT NULL,
    is_told INTEGER NOT NULL, PRIMARY KEY (capture_id, number)) STRICT;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRow:
    """A capture without its turns; texts are JSON."""

    capture_id: str
    owner: str
    settings: str
    started_at: float
    used_at: float
    rewards: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedTurnRow:
    """One turn; its content is JSON."""

    capture_id: str
    number: int
    content: str
    is_told: bool
    """The reply was sent. False: the server may have ended before that."""


class CaptureStore:
    """The file. The service's event loop has the one connection."""

    def __init__(self, data_dir: Path) -> None:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._db = sqlite3.connect(data_dir / FILE_NAME, isolation_level=None, timeout=30.0)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA foreign_keys = ON")
        self._db.executescript(_TABLES)

    def close(self) -> None:
        self._db.close()

    def captures(self) -> Iterator[CaptureRow]:
        names = "capture_id, owner, settings, started_at, used_at, rewards"
        for row in self._db.execute(f"SELECT {names} FROM captures ORDER BY started_at, rowid"):
            yield CaptureRow(**dict(zip(names.split(", "), row, strict=True)))

    def turns(self) -> Iterator[CapturedTurnRow]:
        """The turns of all captures, each capture's in order."""
        query = "SELECT capture_id, number, content, is_told FROM turns ORDER BY capture_id, number"
        for capture_id, number, content, is_told in self._db.execute(query):
            yield CapturedTurnRow(capture_id=capture_id, number=number, content=content, is_told=bool(is_told))

    def put(self, row: CaptureRow) -> None:
        """Write a capture; its turns stay."""
        values = (row.capture_id, row.owner, row.settings, row.started_at, row.used_at, row.rewards)
        self._db.execute(
            "INSERT INTO captures VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (capture_id) DO UPDATE SET "
            "used_at = excluded.used_at, rewards = excluded.rewards",
            values,
        )

    def add_turn(self, row: CapturedTurnRow, capture: CaptureRow) -> None:
        """Write a turn and its capture, as one."""
        values = (row.capture_id, row.number, row.content, int(row.is_told))
        with transaction(self._db):
            self._db.execute("INSERT INTO turns VALUES (?, ?, ?, ?)", values)
            self.put(capture)

    def mark_told(self, capture_id: str, number: int) -> None:
        self._db.execute("UPDATE turns SET is_told = 1 WHERE capture_id = ? AND number = ?", (capture_id, number))

    def delete(self, capture_id: str) -> None:
        self._db.execute("DELETE FROM captures WHERE capture_id = ?", (capture_id,))
