"""A side index of a run's attempts, so that a page of 100,000 attempts opens at once.

`run.db` has an index by step only, and its rows hold whole dialogues. The side index is a file of our own in
`$TURNWISE_HOME/view` with one short row per attempt, indexes for every filter, and, once somebody searches, the words
of the dialogues. It is filled in the background, in short reads: a run that trains is never written to and never held
up. Until the rows are there, the same queries are asked of `run.db` itself.
"""

from __future__ import annotations

import hashlib
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from turnwise.models.directories import home
from turnwise.runlog.arrays import unpack_messages
from turnwise.runlog.schema import DATABASE

COLUMNS = (
    "id, step, phase, outcome, task_id, attempt, stop_reason, is_success, reward, num_turns, num_sampled_tokens, "
    "duration_s, time"
)
LAYOUT = 3
"""The layout of the side index; a file with another layout is made again."""
ROWS_AT_ONCE = 4000
TEXTS_AT_ONCE = 200
_TABLES = """
CREATE TABLE attempts (
    key INTEGER PRIMARY KEY AUTOINCREMENT, id INTEGER UNIQUE, step INTEGER, phase TEXT, outcome TEXT, task_id TEXT,
    attempt INTEGER, stop_reason TEXT, is_success INTEGER, reward REAL, num_turns INTEGER, num_sampled_tokens INTEGER,
    duration_s REAL, time REAL
);
CREATE INDEX by_step ON attempts (step, phase);
CREATE INDEX by_group ON attempts (phase, step, task_id, id);
CREATE INDEX by_end ON attempts (stop_reason, reward);
CREATE INDEX by_outcome ON attempts (outcome);
CREATE INDEX by_reward ON attempts (reward, id);
CREATE INDEX by_length ON attempts (num_sampled_tokens, id);
CREATE INDEX by_turns ON attempts (num_turns, id);
CREATE INDEX by_task ON attempts (task_id, step);
CREATE TABLE progress (name TEXT PRIMARY KEY, key INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO progress VALUES ('texts', 0);
CREATE VIRTUAL TABLE words USING fts5(text, content='');
"""


class AttemptIndex:
    """The side index of one run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self._file = _cache_file(self.directory)
        self._is_made = False
        self._lock = threading.Lock()

    @contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        """A connection whose main database is the side index, with the run attached as `run`, for reading."""
        with self._lock:
            if not self._is_made:
                self._file = _make(self._file)
                self._is_made = True
        database = sqlite3.connect(self._file, timeout=10.0, uri=True)
        try:
            database.row_factory = sqlite3.Row
            database.execute("PRAGMA synchronous = OFF")  # it can always be made again
            database.execute("ATTACH ? AS run", (f"{(self.directory / DATABASE).as_uri()}?mode=ro",))
            yield database
        finally:
            database.close()

    def source(self, database: sqlite3.Connection) -> str:
        """The table to ask: ours if it has every attempt of the run, else the run's own."""
        return (
            "main.attempts"
            if _last(database, "main.attempts") == _last(database, "run.trajectories")
            else ("run.trajectories")
        )

    def add_rows(self) -> bool:
        """Take over the next attempts; False if there are none left."""
        with self.opened() as database:
            with database:
                database.execute("BEGIN IMMEDIATE")  # another viewer may fill the same index
                _forget_replaced(database)
                first = _last(database, "main.attempts")[0]
                database.execute(
                    f"INSERT INTO main.attempts ({COLUMNS}) SELECT {COLUMNS} FROM run.trajectories WHERE id > ? "
                    "ORDER BY id LIMIT ?",
                    (first, ROWS_AT_ONCE),
                )
            return _last(database, "main.attempts")[0] != first

    def add_texts(self) -> bool:
        """Take over the words of the next attempts; False if there are none left."""
        with self.opened() as database, database:
            database.execute("BEGIN IMMEDIATE")
            (done,) = database.execute("SELECT key FROM progress WHERE name = 'texts'").fetchone()
            rows = database.execute(
                "SELECT key, id FROM main.attempts WHERE key > ? ORDER BY key LIMIT ?", (done, TEXTS_AT_ONCE)
            ).fetchall()
            if rows:
                texts = [(row["key"], _text(database, row["id"])) for row in rows]
                database.executemany("INSERT INTO words (rowid, text) VALUES (?, ?)", texts)
                database.execute("UPDATE progress SET key = ? WHERE name = 'texts'", (rows[-1]["key"],))
            return bool(rows)


class IndexWorker:
    """One thread that fills the side indexes of the runs that are looked at, and waits when all are filled."""

    def __init__(self) -> None:
        self._indexes: dict[Path, AttemptIndex] = {}
        self._searched: set[Path] = set()
        self._wake = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def index(self, directory: Path, *, with_texts: bool = False) -> AttemptIndex:
        """The side index of a run; it is brought up to date in the background from now on."""
        with self._wake:
            found = self._indexes.setdefault(directory, AttemptIndex(directory))
            if with_texts:
                self._searched.add(directory)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="view-index", daemon=True)
                self._thread.start()
            self._wake.notify()
        return found

    def close(self) -> None:
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _work(self) -> None:
        while not self._is_closed:
            with self._wake:
                indexes, searched = dict(self._indexes), set(self._searched)
            is_busy = False
            for directory, index in indexes.items():
                try:
                    is_busy |= index.add_rows()
                    if directory in searched:
                        is_busy |= index.add_texts()
                except sqlite3.Error:  # the page says what is wrong with the run
                    continue
            if not is_busy:
                with self._wake:
                    if not self._is_closed:
                        self._wake.wait()


def _cache_file(directory: Path) -> Path:
    return home() / "view" / f"{hashlib.blake2b(str(directory).encode(), digest_size=12).hexdigest()}.db"


def _make(file: Path) -> Path:
    """The file with its tables. A damaged one is made anew; a folder that cannot be written is replaced by another."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            _make_tables(file)
        except sqlite3.DatabaseError:
            for name in (file.name, f"{file.name}-wal", f"{file.name}-shm"):
                file.with_name(name).unlink(missing_ok=True)
            _make_tables(file)
    except (OSError, sqlite3.Error):
        file = Path(tempfile.mkdtemp(prefix="turnwise-view-")) / file.name
        _make_tables(file)
    return file


def _make_tables(file: Path) -> None:
    with closing(sqlite3.connect(file, timeout=10.0)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        (layout,) = database.execute("PRAGMA user_version").fetchone()
        if layout == LAYOUT:
            database.execute("SELECT count(*) FROM progress").fetchone()
            return
        for name in ("attempts", "progress", "words"):
            database.execute(f"DROP TABLE IF EXISTS {name}")
        database.executescript(_TABLES)
        database.execute(f"PRAGMA user_version = {LAYOUT}")
        database.commit()


def _last(database: sqlite3.Connection, table: str) -> tuple[int, float]:
    """Id and time of the last attempt of a table."""
    row = database.execute(f"SELECT id, time FROM {table} ORDER BY id DESC LIMIT 1").fetchone()
    return (0, 0.0) if row is None else (row["id"], row["time"])


def _forget_replaced(database: sqlite3.Connection) -> None:
    """Forget attempts that a resumed run deleted; it may have given their ids to others since."""

    def is_same(at: int) -> bool:
        ours = database.execute("SELECT time FROM main.attempts WHERE id = ?", (at,)).fetchone()
        theirs = database.execute("SELECT time FROM run.trajectories WHERE id = ?", (at,)).fetchone()
        return theirs is not None and ours is not None and ours[0] == theirs[0]

    last = _last(database, "main.attempts")[0]
    if last == 0 or is_same(last):
        return
    low, high = 0, last  # ids up to `low` are the same, `high` is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_same(middle) else (low, middle)
    database.execute("DELETE FROM main.attempts WHERE id > ?", (low,))


def _text(database: sqlite3.Connection, attempt_id: int) -> str:
    """All messages of an attempt; empty if its dialogue was dropped."""
    row = database.execute("SELECT start, detail FROM run.trajectories WHERE id = ?", (attempt_id,)).fetchone()
    if row is None or row["start"] is None:
        return ""
    blobs: list[Any] = [row["start"]]
    turns = "SELECT reply, observation FROM run.turns WHERE trajectory_id = ? ORDER BY turn"
    for turn in database.execute(turns, (attempt_id,)):
        blobs += [turn["reply"], turn["observation"]]
    messages = [message for blob in blobs for message in unpack_messages(blob)]
    calls = [f"{call.name} {dict(call.arguments)}" for message in messages for call in message.tool_calls]
    return "\n".join([*(message.content for message in messages), *calls, row["detail"] or ""])
