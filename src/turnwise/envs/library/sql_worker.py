"""Runs SQL that a policy wrote, in a separate process: only SELECT, read-only, with limits.

    python -I -S sql_worker.py        `ready`, then one JSON request per line in, one JSON answer per line out

There are two protections. The first is SQLite: the file is opened read-only, an authorizer allows only SELECT, reads of
the file's tables and listed functions, the size of values and statements is limited, and a progress handler stops a
query after a number of steps or seconds. The second is the process: it runs in a sandbox with limits on memory, file
size and CPU time, and `sql_runner.py` kills it if it does not answer. The second is needed because the first has gaps:
a statement of 900 characters can make SQLite's planner use all memory, and no handler is called there.

The limit on steps is the one that is usually reached first, because it gives the same answer on a busy machine.
This file uses only the standard library. A request names its database file; an answer never does.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sqlite3
import sys
import time
from typing import Any, Final
from urllib.parse import quote

MAX_SQL_LENGTH: Final = 4000
MAX_VALUE_BYTES: Final = 1_000_000
MAX_MEMORY_BYTES: Final = 512 * 2**20
MAX_FILE_BYTES: Final = 64 * 2**20
"""Largest temporary file, which sorting may need. The database itself is never written."""
STEPS_PER_LOOK: Final = 2000
JOURNALS: Final = ("-wal", "-journal")
"""Endings of the files beside a database that is being written, or was not closed properly."""

_LIMITS: Final = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: MAX_SQL_LENGTH,
    sqlite3.SQLITE_LIMIT_COLUMN: 200,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 50,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 500,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_FUNCTIONS: Final = """
    abs acos asin atan atan2 avg ceil ceiling char coalesce cos count cume_dist current_date current_time
    current_timestamp date datetime degrees dense_rank exp first_value floor format glob group_concat hex ifnull iif
    instr julianday lag last_value lead length like ln log log10 log2 lower ltrim max min mod nth_value ntile nullif
    percent_rank pi pow power printf radians rank replace round row_number rtrim sign sin soundex sqrt strftime
    string_agg substr substring sum tan time total trim trunc typeof unicode unixepoch upper
"""
"""The allowed functions. None is random, shows the SQLite library, or reaches a file."""
_ALLOWED: Final = frozenset(_FUNCTIONS.split())
_SCHEMA_TABLES: Final = frozenset({"sqlite_master", "sqlite_schema"})

READ_ONLY: Final = "only SELECT is allowed, and the database is read-only"
TOO_LONG: Final = "the query took too long and was stopped"
TOO_BIG: Final = "the query needs too much memory and was stopped"


class QueryRefused(Exception):  # noqa: N818 - it names what happened to a query
    """The query is wrong, not allowed, or too expensive. The policy reads the text."""


def run_query(
    path: str, sql: str, *, max_rows: int, max_bytes: int, max_steps: int, time_limit_s: float
) -> tuple[list[str], list[list[Any]], bool]:
    """Return column names, rows, and whether rows were left out. `QueryRefused` says what is wrong with the query."""
    if len(sql) > MAX_SQL_LENGTH:
        raise QueryRefused(f"the query has {len(sql)} characters; at most {MAX_SQL_LENGTH}")
    if "\x00" in sql:
        raise QueryRefused("the query holds a null character")
    connection = sqlite3.connect(read_only_uri(path), uri=True, isolation_level=None)
    try:
        guard = _Guard(connection, max_steps, time_limit_s)
        return guard.run(sql, max_rows, max_bytes)
    finally:
        connection.close()


def read_only_uri(path: str) -> str:
    """The address of a file as SQLite opens it for reading only.

    `immutable` says: nobody writes the file. SQLite then needs no files beside it; a read-only folder holds none.
    """
    is_settled = not any(os.path.exists(path + suffix) for suffix in JOURNALS)  # noqa: PTH110 - ten times faster than Path.exists
    return f"file://{quote(path)}?{'mode=ro&immutable=1' if is_settled else 'mode=ro'}"


class _Guard:
    """A connection that can only read."""

    def __init__(self, connection: sqlite3.Connection, max_steps: int, time_limit_s: float) -> None:
        self._connection = connection
        self._looks_left = max(1, max_steps // STEPS_PER_LOOK)
        self._end_s = time.monotonic() + time_limit_s
        self._is_stopped = False
        self._denied: str | None = None
        connection.text_factory = _decode
        connection.execute("PRAGMA query_only=ON")
        connection.execute("PRAGMA trusted_schema=OFF")
        self._tables = {row[0].lower() for row in connection.execute("SELECT name FROM sqlite_master")}
        for category, limit in _LIMITS.items():
            connection.setlimit(category, limit)
        connection.set_authorizer(self._authorize)
        connection.set_progress_handler(self._look, STEPS_PER_LOOK)

    def run(self, sql: str, max_rows: int, max_bytes: int) -> tuple[list[str], list[list[Any]], bool]:
        try:
            cursor = self._connection.execute(sql)
            if cursor.description is None:  # the text was a comment, or empty
                raise QueryRefused("this is no query; write a SELECT")
            rows, is_cut = _fetch(cursor, max_rows, max_bytes)
            return [str(column[0]) for column in cursor.description], rows, is_cut
        except (sqlite3.Error, sqlite3.Warning, UnicodeError, OverflowError) as error:
            raise QueryRefused(self._explain(error)) from error
        except MemoryError as error:
            raise QueryRefused(TOO_BIG) from error

    def _explain(self, error: Exception) -> str:
        """SQLite's own message, except where it would hide the real reason."""
        if self._is_stopped:
            return TOO_LONG
        if self._denied is not None:
            return self._denied
        text = " ".join(str(error).split())
        if isinstance(error, UnicodeError):
            return "the query holds characters that are no text"
        if "one statement" in text:
            return "one query at a time"
        if "attempt to write" in text or "readonly" in text:
            return READ_ONLY
        if "binding" in text or "variable" in text:
            return "the query has parameters; write the values into it"
        if text in ("disk I/O error", "database or disk is full", "out of memory"):
            return TOO_BIG
        return text[:200]

    def _look(self) -> int:
        self._looks_left -= 1
        self._is_stopped = self._is_stopped or self._looks_left <= 0 or time.monotonic() > self._end_s
        return int(self._is_stopped)

    def _authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE):
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_FUNCTION:
            return self._allow((second or "").lower() in _ALLOWED, f"the function {second} is not allowed")
        if action == sqlite3.SQLITE_READ:
            table = (first or "").lower()
            is_known = table in self._tables or table in _SCHEMA_TABLES
            return self._allow(is_known or not second, f"no such table: {first}")  # COUNT(*) of a WITH reads no column
        return self._allow(False, READ_ONLY)

    def _allow(self, is_allowed: bool, why_not: str) -> int:
        if is_allowed:
            return sqlite3.SQLITE_OK
        self._denied = self._denied or why_not[:200]
        return sqlite3.SQLITE_DENY


def _fetch(cursor: sqlite3.Cursor, max_rows: int, max_bytes: int) -> tuple[list[list[Any]], bool]:
    rows: list[list[Any]] = []
    num_bytes = 0
    for row in cursor:
        num_bytes += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
        if len(rows) == max_rows or num_bytes > max_bytes:
            return rows, True
        rows.append([{"hex": value.hex()} if isinstance(value, bytes) else value for value in row])
    return rows, False


def _decode(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request. A file that cannot be read is the caller's fault and gets a separate key."""
    try:
        columns, rows, is_cut = run_query(**request)
    except QueryRefused as refusal:
        return {"refused": str(refusal)}
    except sqlite3.Error as error:  # this happened before the query: the file is missing, or is not a database
        return {"broken": str(error)}
    return {"columns": columns, "rows": rows, "is_cut": is_cut}


def _limit_process() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))


def _limit_processor(seconds: float) -> None:
    """Limit CPU time from now on, so that a query ends by itself even if the parent process is dead."""
    spent_s = time.process_time()
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(spent_s + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def main() -> None:
    _limit_process()
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        _limit_processor(2 * request["time_limit_s"])
        sys.stdout.write(json.dumps(answer(request)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
