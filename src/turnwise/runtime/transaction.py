"""Several writes to a SQLite file as one."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def transaction(db: sqlite3.Connection) -> Generator[None]:
    """All that is written inside is there afterwards, or nothing is.

    The connection must not begin transactions by itself (`isolation_level=None`).
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
