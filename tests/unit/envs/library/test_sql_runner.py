"""Workers in a sandbox: what they can reach if SQLite had a hole, and that none is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from processes import processes_below
from turnwise.envs.library import sql_runner, sql_worker
from turnwise.envs.library.sql_runner import QueryLimits, QueryRefused, QueryResult, SqlRunner
from turnwise.envs.library.text_to_sql import TextToSql
from turnwise.envs.sandbox import SandboxWarning
from turnwise.envs.sandbox.detect import find_bubblewrap
from turnwise.errors import ConfigError, SandboxError

GONE_WITHIN_S = 60.0


def run_query(runner: SqlRunner, path: Path, sql: str, limits: QueryLimits | None = None) -> QueryResult:
    return asyncio.run(runner.run(path, sql, limits))


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "cats.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE cats (name TEXT)")
        connection.execute("INSERT INTO cats VALUES ('Ada')")
        connection.commit()
    return path


@pytest.fixture
def runner(database: Path) -> Iterator[SqlRunner]:
    runner = SqlRunner([database])
    yield runner
    runner.close()


def is_running(pid: int) -> bool:
    """A zombie that nobody waited for has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def wait_for_end(pid: int) -> None:
    end_s = time.monotonic() + GONE_WITHIN_S
    while is_running(pid):
        assert time.monotonic() < end_s
        time.sleep(0.01)


def replace_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str) -> None:
    """Another program in the worker's place: what a hole in SQLite would let run."""
    script = tmp_path / "taken_over.py"
    script.write_text(textwrap.dedent(source), encoding="utf-8")
    monkeypatch.setattr(sql_worker, "__file__", str(script))


PROBES = """
    import json, os, pathlib, socket, sys

    def attempt(action):
        try:
            return repr(action())
        except OSError as error:
            return type(error).__name__

    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        database, asked = pathlib.Path(request["path"]), json.loads(request["sql"])
        rows = [
            ["path", str(database)],
            ["database", attempt(lambda: database.read_bytes()[:6])],
            ["written", attempt(lambda: database.write_bytes(b""))],
            ["secret", attempt(lambda: pathlib.Path(asked["secret"]).read_text())],
            ["home", attempt(lambda: os.listdir(asked["home"]))],
            ["passwords", attempt(lambda: open("/etc/shadow").read())],
            ["network", attempt(lambda: socket.create_connection(("127.0.0.1", asked["port"]), 5))],
            ["environment", attempt(lambda: os.environ.get("SECRET_KEY"))],
            ["processes", attempt(lambda: sum(name.isdigit() for name in os.listdir("/proc")) < 5)],
        ]
        print(json.dumps({"columns": ["what", "became"], "rows": rows, "is_cut": False}), flush=True)
"""


def test_a_worker_that_was_taken_over_reaches_the_database_and_nothing_else(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("a secret", encoding="utf-8")
    monkeypatch.setenv("SECRET_KEY", "a secret")
    replace_worker(monkeypatch, tmp_path, PROBES)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        asked = f'{{"secret": "{secret}", "home": "{Path.home()}", "port": {server.getsockname()[1]}}}'
        runner = SqlRunner([database])
        became = {row[0]: row[1] for row in run_query(runner, database, asked).rows}
        runner.close()
    assert became == {
        "path": "/databases/0/database.sqlite",
        "database": "b'SQLite'",
        "written": "OSError",  # a read-only file system
        "secret": "FileNotFoundError",
        "home": "FileNotFoundError",
        "passwords": "FileNotFoundError",
        "network": "ConnectionRefusedError",
        "environment": "None",
        "processes": "True",
    }


def test_a_worker_that_never_answers_is_killed_at_the_deadline_with_what_it_started(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
        import sys, time
        print("ready", flush=True)
        sys.stdin.readline()
        time.sleep(1000)
    """
    replace_worker(monkeypatch, tmp_path, source)
    monkeypatch.setattr("turnwise.envs.library.sql_runner.KILL_AFTER_S", 0.1)
    before = processes_below(os.getpid())
    runner = SqlRunner([database])
    with pytest.raises(QueryRefused, match=sql_worker.TOO_LONG):
        run_query(runner, database, "SELECT 1", QueryLimits(time_limit_s=0.2))
    assert runner.idle_pids == ()
    assert processes_below(os.getpid()) <= before


def test_a_worker_that_does_not_come_up_is_an_error_of_ours_and_not_of_the_query(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_worker(monkeypatch, tmp_path, "raise ImportError('no database library here')")
    before = processes_below(os.getpid())
    runner = SqlRunner([database])
    with pytest.raises(SandboxError, match=r"(?s)it ended, .*no database library here"):
        run_query(runner, database, "SELECT 1")
    assert processes_below(os.getpid()) <= before


def test_the_pool_goes_on_after_a_worker_died(runner: SqlRunner, database: Path) -> None:
    assert run_query(runner, database, "SELECT 1").rows == ((1,),)
    (first,) = runner.idle_pids
    os.kill(first, signal.SIGKILL)
    wait_for_end(first)
    assert run_query(runner, database, "SELECT name FROM cats").rows == (("Ada",),)
    (second,) = runner.idle_pids
    assert second != first


def test_one_worker_serves_many_queries_also_those_of_other_threads(runner: SqlRunner, database: Path) -> None:
    """A sandbox ends with the thread that started it, and the threads of queries come and go."""
    pids: list[int] = []

    def query() -> None:
        run_query(runner, database, "SELECT 1")
        pids.extend(runner.idle_pids)

    for _ in range(5):
        thread = threading.Thread(target=query)
        thread.start()
        thread.join()
    assert len(pids) == 5
    assert len(set(pids)) == 1


@pytest.mark.parametrize("is_closed", [True, False])
def test_no_process_is_left_after_close_or_when_nobody_closed_it(database: Path, is_closed: bool) -> None:
    before = processes_below(os.getpid())
    runner = SqlRunner([database])
    run_query(runner, database, "SELECT 1")
    assert processes_below(os.getpid()) - before
    if is_closed:
        runner.close()
        assert processes_below(os.getpid()) <= before
        assert run_query(runner, database, "SELECT 2").rows == ((2,),)  # a closed runner can be used again
    del runner
    for pid in processes_below(os.getpid()) - before:  # the thread that started it may hold the runner a moment longer
        wait_for_end(pid)


def test_workers_end_with_a_run_that_is_killed(database: Path) -> None:
    program = """
        import asyncio, pathlib, sys, time
        from turnwise.envs.library.sql_runner import SqlRunner
        path = pathlib.Path(sys.argv[1])
        runner = SqlRunner([path])
        asyncio.run(runner.run(path, "SELECT 1"))
        print(*runner.idle_pids, flush=True)
        time.sleep(1000)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(database)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert is_running(pid)
        owner.kill()
        owner.wait()
    wait_for_end(pid)


def test_files_of_a_strict_owner_and_write_ahead_logs_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "private" / "wal.sqlite"
    path.parent.mkdir(mode=0o700)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE cats AS SELECT 'Ada' AS name")
    path.chmod(0o600)
    runner = SqlRunner([path])
    assert run_query(runner, path, "SELECT name FROM cats").rows == (("Ada",),)
    runner.close()
    assert [found.name for found in path.parent.iterdir()] == ["wal.sqlite"]


def test_a_folder_shows_databases_that_are_written_later(tmp_path: Path, database: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    runner = SqlRunner([folder, database])
    assert run_query(runner, database, "SELECT name FROM cats").rows == (("Ada",),)
    later = folder / "later one.sqlite"
    later.write_bytes(database.read_bytes())
    assert run_query(runner, later, "SELECT name FROM cats").rows == (("Ada",),)
    assert len(runner.idle_pids) == 1
    runner.close()


def test_limits_without_walls_are_asked_for_and_warned_about(database: Path) -> None:
    before = processes_below(os.getpid())
    with pytest.warns(SandboxWarning, match="no walls"):
        runner = SqlRunner([database], sandbox="subprocess")
    assert run_query(runner, database, "SELECT name FROM cats").rows == (("Ada",),)
    with pytest.raises(QueryRefused, match="read-only"):
        run_query(runner, database, "DELETE FROM cats")
    runner.close()
    assert processes_below(os.getpid()) <= before


def test_without_bubblewrap_the_world_refuses_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apt-get").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    find_bubblewrap.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"install it with `apt-get install bubblewrap`\. `sandbox: subprocess`"):
            TextToSql()
    finally:
        find_bubblewrap.cache_clear()


async def test_a_worker_that_starts_for_a_query_that_was_given_up_serves_the_next(
    runner: SqlRunner, database: Path
) -> None:
    waiting = asyncio.create_task(runner.run(database, "SELECT 1"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(GONE_WITHIN_S):
        while not runner.idle_pids:
            await asyncio.sleep(0.01)
    (pid,) = runner.idle_pids
    assert (await runner.run(database, "SELECT 2")).rows == ((2,),)
    assert runner.idle_pids == (pid,)


async def test_a_query_that_is_given_up_takes_its_worker_along_and_no_answer_comes_to_another(
    runner: SqlRunner, database: Path
) -> None:
    assert (await runner.run(database, "SELECT 1")).rows == ((1,),)
    (pid,) = runner.idle_pids
    slow = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000000) SELECT COUNT(*) FROM n"
    waiting = asyncio.create_task(runner.run(database, slow))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await runner.run(database, "SELECT 2")).rows == ((2,),)
    await asyncio.to_thread(wait_for_end, pid)
    assert pid not in runner.idle_pids


async def test_an_answer_that_came_while_the_loop_was_held_up_counts(runner: SqlRunner, database: Path) -> None:
    await runner.run(database, "SELECT 1")
    waiting = asyncio.create_task(runner.run(database, "SELECT 2", QueryLimits(time_limit_s=0.1)))
    await asyncio.sleep(0)
    time.sleep(0.1 + sql_runner.KILL_AFTER_S + 0.5)
    assert (await waiting).rows == ((2,),)


async def test_many_queries_at_once_each_get_their_own_answer(runner: SqlRunner, database: Path) -> None:
    asked = [runner.run(database, f"SELECT {number}, name FROM cats") for number in range(60)]
    assert [result.rows for result in await asyncio.gather(*asked)] == [((number, "Ada"),) for number in range(60)]
    assert len(runner.idle_pids) <= sql_runner.MAX_WORKERS


async def test_a_query_too_long_for_a_pipe_and_an_answer_of_megabytes(runner: SqlRunner, database: Path) -> None:
    with pytest.raises(QueryRefused, match="characters; at most"):
        await runner.run(database, "SELECT '" + "x" * 100_000 + "'")
    wide = await runner.run(database, "SELECT printf('%.*c', 900000, 'x') FROM cats")
    assert wide.rows == (("x" * 900_000,),)
