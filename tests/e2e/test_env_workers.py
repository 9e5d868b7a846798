"""`cluster.env_workers` from the command line: the same run as without, also when a worker is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from campaigns.train_kills import start
from processes import marked_processes, processes_below
from turnwise.cli import main
from turnwise.runlog.reader import RunReader

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
def test_a_run_survives_the_death_of_its_workers_and_takes_them_along_when_it_is_killed(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    arguments = (*SMALL, "train.steps=100", "cluster.env_workers=2", "rollout.max_retries=20", f"run.dir={directory}")
    process = start(*arguments)
    try:
        killed: set[int] = set()
        give_up_s = time.monotonic() + 120
        while len(killed) < 3:
            assert time.monotonic() < give_up_s
            assert process.poll() is None
            workers = _workers(process.pid)
            if len(workers) == 2 and not workers & killed:
                time.sleep(0.7)
                victim = min(workers)
                os.kill(victim, signal.SIGKILL)
                killed.add(victim)
            time.sleep(0.05)
        steps = _num_steps(directory)
        while _num_steps(directory) < steps + 2:  # it goes on after the last death
            assert time.monotonic() < give_up_s
            assert process.poll() is None
            time.sleep(0.1)
    finally:
        process.kill()
        process.communicate()
    for _ in range(100):
        if not marked_processes("turnwise.env_service.process"):
            break
        time.sleep(0.05)
    assert not marked_processes("turnwise.env_service.process")


def _workers(pid: int) -> set[int]:
    def is_worker(one: int) -> bool:
        try:
            return b"env_service.process" in Path(f"/proc/{one}/cmdline").read_bytes()
        except OSError:
            return False

    return {one for one in processes_below(pid) if is_worker(one)}


def _num_steps(directory: Path) -> int:
    with RunReader(directory) as run:
        return len(run.metric("train/loss"))
