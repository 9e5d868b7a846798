"""`cluster.env_workers` from the command line: the same run as without, also when a worker is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import turnwise as tw
from processes import processes_below
from turnwise.cli import main
from turnwise.runlog.reader import RunReader, is_run

ECHO = f"{Path(__file__).with_name('echo_world.py')}:EchoWorld"
SMALL = (
    *(ECHO, "model=tiny", "train.tasks_per_step=2", "rollout.group_size=2", "eval.tasks=2", "eval.every=0"),
    *("rollout.deterministic=true", "run.dialogues=0", "train.max_empty_steps=1000"),
)


def _played(directory: Path) -> list[tuple[object, ...]]:
    with RunReader(directory) as run:
        rows = [run.attempt(row.id) for row in run.attempts()]
        return [(row.row.task_id, row.row.reward, [turn.sampled_ids for turn in row.trajectory.turns]) for row in rows]


@pytest.mark.usefixtures("tiny_dir")
def test_a_run_with_workers_plays_and_learns_what_a_run_without_does(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    assert main(["train", *SMALL, "train.steps=2", f"run.dir={here}"]) == 0
    assert main(["train", *SMALL, "train.steps=2", "cluster.env_workers=2", f"run.dir={there}"]) == 0
    assert _played(here) == _played(there)
    assert not processes_below(os.getpid())


@pytest.mark.usefixtures("tiny_dir")
def test_a_run_survives_the_death_of_its_workers(tmp_path: Path) -> None:
    """`test_learners.py` kills the run itself, and looks for its workers."""
    directory = tmp_path / "run"
    options = (*SMALL[1:], "train.steps=100000", "cluster.env_workers=2", "rollout.max_retries=20")
    running = tw.start(ECHO, directory=directory, overrides=options, observer=tw.Observer())
    killed: set[int] = set()
    give_up_s = time.monotonic() + 120
    while len(killed) < 3:
        assert time.monotonic() < give_up_s
        workers = _workers(os.getpid())
        if len(workers) == 2 and not workers & killed and _num_steps(directory):
            time.sleep(0.7)
            victim = min(workers)
            os.kill(victim, signal.SIGKILL)
            killed.add(victim)
        time.sleep(0.05)
    steps = _num_steps(directory)
    while _num_steps(directory) < steps + 2:  # it goes on after the last death
        assert time.monotonic() < give_up_s
        time.sleep(0.1)
    running.stop()
    assert running.wait().state == "stopped"
    assert not _workers(os.getpid())


def _workers(pid: int) -> set[int]:
    def is_worker(one: int) -> bool:
        try:
            return b"env_service.process" in Path(f"/proc/{one}/cmdline").read_bytes()
        except OSError:
            return False

    return {one for one in processes_below(pid) if is_worker(one)}


def _num_steps(directory: Path) -> int:
    if not is_run(directory):
        return 0
    with RunReader(directory) as run:
        return len(run.metric("train/loss"))
