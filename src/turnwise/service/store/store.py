"""What survives a restart, in one SQLite file: keys, sessions, runs, samplers, checkpoints and the journal.

The service's event loop has the one connection. `turnwise keys` opens the file from another process, which WAL allows.
A row that another key owns is never returned: every query that a client can cause names its owner.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from turnwise.client.checkpoints import CheckpointPath, Kind
from turnwise.errors import ConfigError
from turnwise.runtime.transaction import transaction
from turnwise.types import LoraConfig

FILE_NAME = "service.sqlite3"
VERSION = 1

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS keys (
    key_id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, digest TEXT NOT NULL UNIQUE, hint TEXT NOT NULL,
    created_at REAL NOT NULL, revoked_at REAL) STRICT;
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at REAL NOT NULL, last_seen_at REAL NOT NULL,
    tags TEXT NOT NULL, user_metadata TEXT NOT NULL, sdk_version TEXT, project_id TEXT, display_name TEXT,
    finished TEXT) STRICT;
CREATE TABLE IF NOT EXISTS runs (
    model_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, owner TEXT NOT NULL, request_id TEXT NOT NULL,
    base_model TEXT NOT NULL, lora TEXT NOT NULL, user_metadata TEXT NOT NULL, created_at REAL NOT NULL,
    last_request_at REAL NOT NULL, next_seq INTEGER NOT NULL, snapshot TEXT, snapshot_seq INTEGER NOT NULL,
    num_steps INTEGER NOT NULL, is_journaled INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS samplers (
    sampler_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, owner TEXT NOT NULL, base_model TEXT NOT NULL,
    source TEXT NOT NULL, model_path TEXT, directory TEXT, created_at REAL NOT NULL,
    num_joined INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS checkpoints (
    model_id TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, owner TEXT NOT NULL, request_id TEXT NOT NULL,
    base_model TEXT NOT NULL, lora TEXT NOT NULL, has_optimizer INTEGER NOT NULL, created_at REAL NOT NULL,
    expires_at REAL, size_bytes INTEGER NOT NULL, is_public INTEGER NOT NULL, user_metadata TEXT NOT NULL,
    PRIMARY KEY (model_id, kind, name)) STRICT;
CREATE TABLE IF NOT EXISTS journal (
    request_id TEXT PRIMARY KEY, model_id TEXT NOT NULL, seq INTEGER, after INTEGER NOT NULL, kind TEXT NOT NULL,
    body BLOB, result BLOB, created_at REAL NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS journal_by_model ON journal (model_id, after);
CREATE INDEX IF NOT EXISTS sessions_by_owner ON sessions (owner, created_at);
CREATE INDEX IF NOT EXISTS runs_by_owner ON runs (owner, created_at);
CREATE INDEX IF NOT EXISTS runs_by_session ON runs (session_id);
CREATE INDEX IF NOT EXISTS samplers_by_session ON samplers (session_id);
CREATE INDEX IF NOT EXISTS checkpoints_by_owner ON checkpoints (owner, created_at);
"""

Metadata = Mapping[str, str]

KIND_KEY, CRITIC = "turnwise.kind", "critic"
"""A key in a training client's metadata: it trains a critic. SDKs pass metadata through, and nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    key_id: int
    name: str
    hint: str
    created_at: float
    revoked_at: float | None


@dataclass(slots=True, kw_only=True)
class SessionRow:
    session_id: str
    owner: str
    created_at: float
    last_seen_at: float
    tags: Sequence[str] = ()
    user_metadata: Metadata = field(default_factory=dict)
    sdk_version: str | None = None
    project_id: str | None = None
    display_name: str | None = None
    finished: str | None = None


@dataclass(slots=True, kw_only=True)
class RunRow:
    """A training client and the adapter that it trains."""

    model_id: str
    session_id: str
    owner: str
    request_id: str
    """The request that created it."""
    base_model: str
    """The name that the client gave."""
    lora: LoraConfig
    """It always has a seed, so that the adapter can be made again."""
    user_metadata: Metadata = field(default_factory=dict)
    created_at: float
    last_request_at: float
    next_seq: int = 1
    """The first sequence number that the snapshot does not contain."""
    snapshot: str | None = None
    """Directory name of the newest complete snapshot. None: there is none yet, and the adapter is as it was created."""
    snapshot_seq: int = 0
    num_steps: int = 0
    is_journaled: bool = True
    """True: the journal has its requests since the snapshot. False: a restart loses what is not in a snapshot."""

    @property
    def is_critic(self) -> bool:
        return self.user_metadata.get(KIND_KEY) == CRITIC


@dataclass(slots=True, kw_only=True)
class SamplerRow:
    sampler_id: str
    session_id: str
    owner: str
    base_model: str
    source: str
    """`base`, `checkpoint` or `published`: a copy of a training client's weights that has no name."""
    model_path: str | None = None
    directory: str | None = None
    """The directory of published weights; None: in memory only."""
    created_at: float
    num_joined: int = 0


@dataclass(slots=True, kw_only=True)
class OwnedCheckpointRow:
    """A checkpoint and the key that owns it."""

    model_id: str
    kind: Kind
    name: str
    owner: str
    request_id: str
    base_model: str
    lora: LoraConfig
    has_optimizer: bool
    created_at: float
    expires_at: float | None = None
    size_bytes: int
    is_public: bool = False
    user_metadata: Metadata = field(default_factory=dict)

    @property
    def path(self) -> str:
        return CheckpointPath(self.model_id, self.kind, self.name).uri


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRow:
    """A training request that was accepted and is not in a snapshot yet, or its result."""

    request_id: str
    model_id: str
    seq: int | None
    after: int
    """Its place in the order: its own number, or, if it has none, the highest number before it."""
    kind: str
    body: bytes | None
    """None after a snapshot contains what it did."""
    result: bytes | None
    created_at: float


Row = TypeVar("Row", SessionRow, RunRow, SamplerRow, OwnedCheckpointRow, JournalRow, KeyRow)
_JSON_COLUMNS = {"tags", "user_metadata", "lora"}
_BOOL_COLUMNS = {"has_optimizer", "is_public", "is_journaled"}


class Store:
    """The file, and the queries that the service makes."""

    def __init__(self, data_dir: Path) -> None:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._db = sqlite3.connect(data_dir / FILE_NAME, isolation_level=None, timeout=30.0)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA foreign_keys = ON")
        with self.transaction():
            for statement in _TABLES.split(";"):
                self._db.execute(statement)
            self._db.execute("INSERT OR IGNORE INTO meta VALUES ('version', ?)", (str(VERSION),))
            self._db.execute("INSERT OR IGNORE INTO meta VALUES ('secret', ?)", (secrets.token_hex(32),))
        version = self._meta("version")
        if version != str(VERSION):
            raise ConfigError(f"{data_dir / FILE_NAME} has version {version}; this turnwise reads version {VERSION}")

    def close(self) -> None:
        self._db.close()

    def transaction(self) -> AbstractContextManager[None]:
        return transaction(self._db)

    @property
    def secret(self) -> bytes:
        """Signs tokens and download links."""
        return bytes.fromhex(self._meta("secret"))

    def _meta(self, name: str) -> str:
        return str(self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()[0])

    # keys

    def add_key(self, name: str, digest: str, hint: str, now: float) -> int:
        added = self._db.execute(
            "INSERT INTO keys (name, digest, hint, created_at) VALUES (?, ?, ?, ?)", (name, digest, hint, now)
        )
        assert added.lastrowid is not None
        return added.lastrowid

    def key_by_digest(self, digest: str) -> KeyRow | None:
        return self._one(KeyRow, "SELECT * FROM keys WHERE digest = ? AND revoked_at IS NULL", digest)

    def key_by_id(self, key_id: int) -> KeyRow | None:
        return self._one(KeyRow, "SELECT * FROM keys WHERE key_id = ? AND revoked_at IS NULL", key_id)

    def list_keys(self) -> list[KeyRow]:
        return self._all(KeyRow, "SELECT * FROM keys ORDER BY key_id")

    def revoke_key(self, key_id: int, now: float) -> bool:
        changed = self._db.execute(
            "UPDATE keys SET revoked_at = ? WHERE key_id = ? AND revoked_at IS NULL", (now, key_id)
        )
        return changed.rowcount == 1

    def has_keys(self) -> bool:
        """Say whether a key was ever made. A revoked key counts: revoking the last one does not open the service."""
        return self._db.execute("SELECT 1 FROM keys LIMIT 1").fetchone() is not None

    # rows by id and owner

    def put(self, row: SessionRow | RunRow | SamplerRow | OwnedCheckpointRow | JournalRow) -> None:
        """Write a row; it replaces a row with the same key."""
        values = {name: _to_column(name, getattr(row, name)) for name in _names(type(row))}
        marks = ", ".join("?" * len(values))
        table = _TABLE_OF[type(row)]
        self._db.execute(
            f"INSERT OR REPLACE INTO {table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values())
        )

    def session(self, session_id: str, owner: str) -> SessionRow | None:
        return self._one(SessionRow, "SELECT * FROM sessions WHERE session_id = ? AND owner = ?", session_id, owner)

    def sessions(self, owner: str, limit: int, offset: int) -> list[SessionRow]:
        query = "SELECT * FROM sessions WHERE owner = ? ORDER BY created_at DESC, session_id LIMIT ? OFFSET ?"
        return self._all(SessionRow, query, owner, limit, offset)

    def sessions_before(self, owner: str, created_at: float, session_id: str, limit: int) -> list[SessionRow]:
        """Newest first; the page starts after the given session."""
        query = (
            "SELECT * FROM sessions WHERE owner = ? AND (created_at, session_id) < (?, ?) "
            "ORDER BY created_at DESC, session_id DESC LIMIT ?"
        )
        return self._all(SessionRow, query, owner, created_at, session_id, limit)

    def session_totals(self, session_id: str) -> tuple[int, int]:
        """Count the checkpoints of a session's runs, and their bytes."""
        query = (
            "SELECT COUNT(*), COALESCE(SUM(c.size_bytes), 0) FROM checkpoints c JOIN runs r USING (model_id) "
            "WHERE r.session_id = ?"
        )
        count, size = self._db.execute(query, (session_id,)).fetchone()
        return int(count), int(size)

    def is_finished(self, session_id: str) -> bool:
        query = "SELECT 1 FROM sessions WHERE session_id = ? AND finished IS NOT NULL"
        return self._db.execute(query, (session_id,)).fetchone() is not None

    def run(self, model_id: str, owner: str) -> RunRow | None:
        return self._one(RunRow, "SELECT * FROM runs WHERE model_id = ? AND owner = ?", model_id, owner)

    def runs(self, owner: str, limit: int, offset: int) -> list[RunRow]:
        query = "SELECT * FROM runs WHERE owner = ? ORDER BY created_at DESC, model_id LIMIT ? OFFSET ?"
        return self._all(RunRow, query, owner, limit, offset)

    def count_runs(self, owner: str) -> int:
        return int(self._db.execute("SELECT COUNT(*) FROM runs WHERE owner = ?", (owner,)).fetchone()[0])

    def runs_of_session(self, session_id: str) -> list[RunRow]:
        return self._all(RunRow, "SELECT * FROM runs WHERE session_id = ? ORDER BY created_at", session_id)

    def all_runs(self) -> list[RunRow]:
        return self._all(RunRow, "SELECT * FROM runs ORDER BY created_at")

    def touch_run(self, model_id: str, now: float) -> None:
        self._db.execute("UPDATE runs SET last_request_at = ? WHERE model_id = ?", (now, model_id))

    def touch_session(self, session_id: str, now: float) -> None:
        self._db.execute("UPDATE sessions SET last_seen_at = ? WHERE session_id = ?", (now, session_id))

    def sampler(self, sampler_id: str, owner: str) -> SamplerRow | None:
        return self._one(SamplerRow, "SELECT * FROM samplers WHERE sampler_id = ? AND owner = ?", sampler_id, owner)

    def samplers_of_session(self, session_id: str) -> list[SamplerRow]:
        return self._all(SamplerRow, "SELECT * FROM samplers WHERE session_id = ? ORDER BY created_at", session_id)

    def sampler_directories(self) -> set[str]:
        rows = self._db.execute("SELECT directory FROM samplers WHERE directory IS NOT NULL")
        return {str(row[0]) for row in rows}

    # checkpoints

    def checkpoint(self, model_id: str, kind: str, name: str) -> OwnedCheckpointRow | None:
        """Any owner's checkpoint; the caller of this method decides who may see it."""
        query = "SELECT * FROM checkpoints WHERE model_id = ? AND kind = ? AND name = ?"
        return self._one(OwnedCheckpointRow, query, model_id, kind, name)

    def checkpoints_of_run(self, model_id: str, owner: str) -> list[OwnedCheckpointRow]:
        query = "SELECT * FROM checkpoints WHERE model_id = ? AND owner = ? ORDER BY created_at DESC, rowid DESC"
        return self._all(OwnedCheckpointRow, query, model_id, owner)

    def checkpoints_of_owner(self, owner: str, limit: int, offset: int) -> list[OwnedCheckpointRow]:
        query = "SELECT * FROM checkpoints WHERE owner = ? ORDER BY created_at DESC, rowid DESC LIMIT ? OFFSET ?"
        return self._all(OwnedCheckpointRow, query, owner, limit, offset)

    def checkpoint_totals(self, owner: str) -> tuple[int, int]:
        """Count an owner's checkpoints, and their bytes."""
        query = "SELECT COUNT(*), COALESCE(SUM(size_bytes), 0) FROM checkpoints WHERE owner = ?"
        count, size = self._db.execute(query, (owner,)).fetchone()
        return int(count), int(size)

    def expired_checkpoints(self, now: float) -> list[OwnedCheckpointRow]:
        return self._all(OwnedCheckpointRow, "SELECT * FROM checkpoints WHERE expires_at <= ?", now)

    def all_checkpoints(self) -> list[OwnedCheckpointRow]:
        return self._all(OwnedCheckpointRow, "SELECT * FROM checkpoints")

    def delete_checkpoint(self, row: OwnedCheckpointRow) -> None:
        self._db.execute(
            "DELETE FROM checkpoints WHERE model_id = ? AND kind = ? AND name = ?", (row.model_id, row.kind, row.name)
        )

    # journal

    def journal(self, model_id: str) -> list[JournalRow]:
        return self._all(
            JournalRow, "SELECT * FROM journal WHERE model_id = ? ORDER BY after, seq IS NULL, rowid", model_id
        )

    def journaled_models(self) -> list[str]:
        rows = self._db.execute("SELECT DISTINCT model_id FROM journal ORDER BY model_id")
        return [str(row[0]) for row in rows]

    def finish_journal(self, request_id: str, result: bytes) -> None:
        self._db.execute("UPDATE journal SET result = ? WHERE request_id = ?", (result, request_id))

    def save_snapshot(self, run: RunRow) -> None:
        """Point the run at its new snapshot, and delete the request bodies that the snapshot contains."""
        with self.transaction():
            self.put(run)
            self._db.execute(
                "UPDATE journal SET body = NULL WHERE model_id = ? AND after <= ? "
                "AND (seq IS NOT NULL OR result IS NOT NULL)",
                (run.model_id, run.snapshot_seq),
            )

    def forget_journal(self, before: float) -> None:
        """Delete old results of requests that a snapshot contains."""
        self._db.execute("DELETE FROM journal WHERE body IS NULL AND created_at < ?", (before,))

    def _one(self, kind: type[Row], query: str, *values: object) -> Row | None:
        found = self._db.execute(query, values).fetchone()
        return None if found is None else _from_columns(kind, found)

    def _all(self, kind: type[Row], query: str, *values: object) -> list[Row]:
        return [_from_columns(kind, row) for row in self._db.execute(query, values)]


_TABLE_OF: Mapping[type, str] = {
    SessionRow: "sessions",
    RunRow: "runs",
    SamplerRow: "samplers",
    OwnedCheckpointRow: "checkpoints",
    JournalRow: "journal",
}


def iso(moment: float) -> str:
    """Write a column's time as clients read it."""
    return datetime.fromtimestamp(moment, UTC).isoformat()


def _names(kind: type[Any]) -> Iterable[str]:
    return [item.name for item in fields(kind)]


def _to_column(name: str, value: Any) -> Any:
    if name == "lora":
        return json.dumps(asdict(value))
    if name in _JSON_COLUMNS:
        return json.dumps(value if isinstance(value, Mapping) else list(value))
    return int(value) if name in _BOOL_COLUMNS else value


def _from_columns(kind: type[Row], row: sqlite3.Row) -> Row:
    values: dict[str, Any] = {name: row[name] for name in _names(kind)}
    for name in _JSON_COLUMNS & values.keys():
        values[name] = json.loads(values[name])
    if "lora" in values:
        values["lora"] = LoraConfig(**values["lora"])
    for name in _BOOL_COLUMNS & values.keys():
        values[name] = bool(values[name])
    return kind(**values)
