"""A worker is asked line by line; what is late, dead or too loud gives no answer and is ended."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes import processes_below
from turnwise.envs.sandbox import Limits, Sandbox, SandboxKind, Worker, WorkerDiedError

PROGRAM = """
import sys, time
print("ready", flush=True)
for line in sys.stdin:
    word, _, rest = line.strip().partition(" ")
    if word == "sleep":
        time.sleep(1000)
    elif word == "die":
        sys.exit(3)
    elif word == "shout":
        print("x" * int(rest), flush=True)
    elif word == "half":
        print("half of an answer", end="", flush=True)
        sys.exit(0)
    elif word == "write":
        try:
            open(rest, "w").close()
            print("written", flush=True)
        except OSError as error:
            print(error.strerror, flush=True)
    else:
        print(open(rest).read() if word == "read" else line.strip()[::-1], flush=True)
"""
LIMITS = Limits(output_bytes=1 << 20)


@pytest.fixture(params=["bubblewrap", "subprocess"])
def worker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Worker]:
    kind: SandboxKind = request.param
    (tmp_path / "shown.txt").write_text("hello", encoding="utf-8")
    before = processes_below(os.getpid())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no walls, as was asked for
        sandbox = Sandbox(kind, limits=LIMITS)
    worker = sandbox.start_worker(
        ["python3", "-S", "main.py"], files={"main.py": PROGRAM}, shown={"/texts/a.txt": tmp_path / "shown.txt"}
    )
    yield worker
    worker.end()
    worker.end()  # does no harm
    assert not worker.is_alive
    assert processes_below(os.getpid()) <= before


def test_every_line_has_its_answer_whatever_its_size(worker: Worker) -> None:
    assert worker.ask(b"abc", 60.0) == b"cba"
    assert worker.ask(b"shout 900000", 60.0) == b"x" * 900_000
    assert worker.ask(b"y" * 500_000, 60.0) == b"y" * 500_000  # more than a pipe holds
    assert worker.ask(b"def", 60.0) == b"fed"


@pytest.mark.parametrize("last_words", [b"die", b"half", b"shout 3000000"])
def test_one_that_ends_or_says_too_much_is_told_apart_from_one_that_is_late(worker: Worker, last_words: bytes) -> None:
    with pytest.raises(WorkerDiedError):
        worker.ask(last_words, 60.0)


def test_one_that_is_late_gives_no_answer(worker: Worker) -> None:
    assert worker.ask(b"sleep", 0.2) is None
    assert worker.is_alive  # until it is ended


@pytest.mark.parametrize("worker", ["bubblewrap"], indirect=True)
def test_what_is_shown_can_be_read_and_not_written(worker: Worker) -> None:
    assert worker.ask(b"read /texts/a.txt", 60.0) == b"hello"
    assert worker.ask(b"write /texts/a.txt", 60.0) == b"Read-only file system"
    assert worker.ask(b"write /texts/b.txt", 60.0) == b"Read-only file system"
    assert worker.ask(b"write /tmp/b.txt", 60.0) == b"written"
