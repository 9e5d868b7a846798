"""A private PostgreSQL server for tests: a fresh cluster in a temporary folder, reached by a socket in that folder."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 240.0


def missing_part() -> str:
    """Why no server can be started here; empty if one can."""
    if importlib.util.find_spec("psycopg") is None:
        return "the package psycopg is not installed: pip install 'turnwise[postgres]'"
    if not _find("initdb") or not _find("pg_ctl"):
        return "PostgreSQL's initdb and pg_ctl are not installed: apt-get install postgresql"
    try:
        subprocess.run(["true"], user=_server_user(), check=True)
    except OSError as error:
        return f"a server does not run as root, and no process can be started as another user: {error}"
    return ""


@contextmanager
def postgres_server(script: str) -> Iterator[str]:
    """Start a server, run a script as its superuser, and yield the address without a user: `...//USER@...` is yours."""
    folder = Path(tempfile.mkdtemp(prefix="turnwise-pg-"))
    user = _server_user()
    if user is not None:
        os.chown(folder, user, -1)
    data = folder / "data"

    def call(*argv: str) -> None:
        subprocess.run(
            argv,
            check=True,
            user=user,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=START_S,
        )

    try:
        call(_find("initdb"), "-D", str(data), "-U", "admin", "-A", "trust", "--no-sync", "--locale=C", "-E", "UTF8")
        settings = f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c fsync=off -c max_connections=20"
        wait = ("-w", "-t", str(int(START_S)))
        call(_find("pg_ctl"), "-D", str(data), "-o", settings, "-l", str(folder / "log"), *wait, "start")
        try:
            psycopg = importlib.import_module("psycopg")
            with psycopg.connect(f"postgresql://admin@/postgres?host={folder}", autocommit=True) as connection:
                connection.execute(script)
            yield f"postgresql://USER@/postgres?host={folder}"
        finally:
            call(_find("pg_ctl"), "-D", str(data), "-m", "immediate", *wait, "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _server_user() -> int | None:
    """Who runs the server: this user, or nobody where this user is root, because a server refuses to run as root."""
    return pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else None


def _find(program: str) -> str:
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{program}"))  # Debian's; its `psql` in PATH is a wrapper
    return str(places[-1]) if places else shutil.which(program) or ""
