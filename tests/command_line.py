"""Runs our commands for tests: in this process, which costs no start, or in one of their own."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from typing import Any

import pytest

from turnwise.cli import main
from warm_start import WarmPopen

SMALL_RUN = (
    "model=tiny",
    "train.steps=2",
    "train.tasks_per_step=2",
    "rollout.group_size=4",
    "eval.tasks=4",
    "eval.every=0",
    "warmup.steps=2",
    "warmup.batch_size=2",
    "warmup.demonstrations=4",
    "run.dialogues=1",
)
"""Options of a run that does everything once or twice."""
ECHO_RUN = (
    "model=tiny",
    "train.steps=2",
    "train.tasks_per_step=2",
    "train.num_tasks=8",
    "rollout.group_size=4",
    "run.dialogues=0",
)
"""Options of a run in `echo_world.py`."""
ONE_STEP = (
    "model=tiny",
    "method=rft",
    "method.threshold=-1000",
    "rollout.group_size=2",
    "train.tasks_per_step=2",
    "train.steps=1",
    "warmup.steps=0",
    "eval.tasks=1",
    "eval.every=0",
    "run.dialogues=1",
)
"""Options of a run that learns from every attempt of one step, whatever it earned."""
SECONDS = 280
"""A deadline that only a hang can miss."""


def run_here(*arguments: str, code: int = 0) -> str:
    """What `turnwise ARGUMENTS` prints. For commands that get no signals and read no standard input."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        patch.setenv("COLUMNS", "200")
        status = main(arguments)
    assert status == code, f"{arguments}: {said.getvalue()}"
    return said.getvalue()


def run_module(*arguments: str, code: int = 0, stdin: str = "", **environment: str) -> str:
    """What `python -m ARGUMENTS` prints."""
    kind = WarmPopen if arguments[0].startswith("turnwise.") else subprocess.Popen
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with kind([sys.executable, "-m", *arguments], text=True, env=env, **pipes) as process:
        try:
            said, complaints = process.communicate(stdin, timeout=SECONDS)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == code, f"{arguments}: {said}\n{complaints}"
    return said + complaints


def start_cli(*arguments: str, **options: Any) -> subprocess.Popen[Any]:
    """`turnwise ARGUMENTS` in a process of its own, which goes on; by default all that it prints is on one pipe."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return WarmPopen([sys.executable, "-m", "turnwise.cli", *arguments], env=env, **pipes | options)
