"""Stores a judge's answers by the hash of model and prompt: in memory, or in an SQLite file."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from turnwise.errors import ConfigError
from turnwise.trajectory import Message

_SCHEMA = "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL) WITHOUT ROWID"
_BUSY_S = 10.0


class AnswerCache(Protocol):
    """A store of answers. Attempts and threads share it."""

    def get(self, key: str) -> str | None: ...

    def put(self, key: str, answer: str) -> None: ...


def make_key(model: str, prompt: Sequence[Message]) -> str:
    """Make a key of a model and a prompt. Any change in either gives another key."""
    parts = [model, *([message.role, message.content] for message in prompt)]
    return hashlib.sha256(json.dumps(parts).encode("utf-8")).hexdigest()


class MemoryCache:
    """Keeps the latest answers of this process."""

    def __init__(self, max_answers: int = 10_000) -> None:
        if max_answers < 0:
            raise ConfigError(f"max_answers={max_answers}; expected 0 (keep none) or more")
        self._max_answers = max_answers
        self._answers: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> str | None:
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
            return self._answers.get(key)

    def put(self, key: str, answer: str) -> None:
        with self._lock:
            self._answers[key] = answer
            self._answers.move_to_end(key)
            while len(self._answers) > self._max_answers:
                self._answers.popitem(last=False)


class FileCache:
    """Keeps answers in an SQLite file, which several runs can share, also at the same time."""

    def __init__(self, path: Path | str) -> None:
        path = Path(path).expanduser()
        if not path.parent.is_dir():
            raise ConfigError(f"there is no folder {path.parent} for the judge's cache; make it first")
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        self._ending = weakref.finalize(self, self._database.close)
        try:
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute(_SCHEMA)
        except sqlite3.DatabaseError as cause:
            self.close()
            raise ConfigError(f"{path} cannot be used as the judge's cache: {cause}; name another file") from cause

    def get(self, key: str) -> str | None:
        with self._lock:
            row = self._database.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, answer: str) -> None:
        with self._lock:
            self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, answer))

    def close(self) -> None:
        self._ending()
