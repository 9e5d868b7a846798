"""The real command, killed with `kill -9` at several moments of a round: nothing is lost and nothing is there twice."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import turnwise as tw
from command_line import start_cli
from e2e.parity_world import ParityWorld
from turnwise.envs.base import Split, Task, assistant, user
from turnwise.outcomes.labelled import LabelledAttempt, read_labelled, write_labelled
from turnwise.rounds.config import FlywheelConfig
from turnwise.rounds.refresh import verdict_of
from turnwise.rounds.store import PoolStore, is_flywheel
from turnwise.runlog.reader import RunReader
from turnwise.training.orm import OrmConfig, train_outcome_model

pytestmark = pytest.mark.usefixtures("tiny_dir")
WORLD = f"{Path(__file__).with_name('parity_world.py')}:ParityWorld"
FILE = f"""
flywheel: {{rounds: 2, tasks: 6, samples: 4, sft_steps: 4, rl_steps: 4, continued_steps: 2,
           preference_steps: 2, eval_tasks: 4, raise_at: 0.2}}
model: tiny
env: {{name: "{WORLD}"}}
rollout: {{group_size: 3, deterministic: true}}
train: {{tasks_per_step: 2, learning_rate: 1.0e-2, save_every: 2}}
"""
MOMENTS = (
    "SELECT count(*) FROM attempts WHERE round = 1",
    "rounds/01/sft",
    "rounds/01/preference",
    "rounds/01/rl",
    "SELECT count(*) FROM stages WHERE round = 1 AND stage = 'rl'",
    "SELECT count(*) FROM stages WHERE round = 2 AND stage = 'route'",
)
"""When to kill: as soon as a query counts something, or as soon as a run has done a step."""
DEADLINE_S = 900.0
"""Only a hang takes so long."""
TABLES = (
    "SELECT * FROM tasks ORDER BY id",
    "SELECT * FROM held_out ORDER BY id",
    "SELECT round, task_id, attempt, seed, is_success, reward, num_tokens, said FROM attempts ORDER BY 1, 2, 3",
    "SELECT round, task_id, attempt, verdict, score, is_good FROM samples ORDER BY 1, 2, 3",
    "SELECT a.round, a.task_id, a.attempt FROM sft p JOIN attempts a ON a.id = p.attempt_id ORDER BY 1, 2, 3",
    "SELECT a.round, a.task_id, a.attempt FROM continued p JOIN attempts a ON a.id = p.attempt_id ORDER BY 1, 2, 3",
    "SELECT * FROM rl ORDER BY 1, 2",
    "SELECT round, task_id, attempt FROM samples WHERE is_chosen OR is_rejected ORDER BY 1, 2, 3",
    "SELECT round, difficulty, num_attempts, success, reward FROM evaluations ORDER BY 1, 2",
    "SELECT round, stage FROM stages ORDER BY 1, 2",
)


def _start(directory: Path, file: Path) -> subprocess.Popen[bytes]:
    command = ("flywheel", str(file), f"flywheel.dir={directory}")
    return start_cli(*command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=False)


def _rows(directory: Path, sql: str) -> list[Any]:
    with sqlite3.connect(f"file:{directory / 'flywheel.db'}?mode=ro", uri=True) as db:
        return db.execute(sql).fetchall()


def _has_come(directory: Path, moment: str) -> bool:
    if not is_flywheel(directory):
        return False
    if not moment.startswith("SELECT"):
        try:
            with RunReader(directory / moment) as run:
                return bool(run.checkpoints())
        except Exception:  # noqa: BLE001 - it is being made
            return False
    try:
        return bool(_rows(directory, moment)[0][0])
    except sqlite3.Error:
        return False


def _kill_at(directory: Path, file: Path, moment: str) -> bool:
    """Whether the process was killed; it may have been faster."""
    process = _start(directory, file)
    deadline = time.monotonic() + DEADLINE_S
    while process.poll() is None and not _has_come(directory, moment) and time.monotonic() < deadline:
        time.sleep(0.01)
    is_late = time.monotonic() >= deadline
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    _, said = process.communicate()
    assert not is_late, f"{moment} did not come"
    assert process.returncode in (0, -signal.SIGKILL), said.decode()
    return process.returncode != 0


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_flywheel_that_is_killed_in_every_kind_of_stage_ends_like_one_that_nobody_touched(tmp_path: Path) -> None:
    file = tmp_path / "wheel.yaml"
    file.write_text(FILE)
    killed = [_kill_at(tmp_path / "killed", file, moment) for moment in MOMENTS]
    for name in ("killed", "plain"):
        process = _start(tmp_path / name, file)
        _, said = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, said.decode()
    assert sum(killed) >= 5, "most moments are hit before the stage is over"
    for sql in TABLES:
        assert _rows(tmp_path / "killed", sql) == _rows(tmp_path / "plain", sql), sql
    counts = _rows(tmp_path / "killed", "SELECT count(*), count(DISTINCT task_id) FROM attempts WHERE round = 1")
    assert counts == [(24, 6)]
    trained = _rows(tmp_path / "killed", "SELECT round, stage FROM stages WHERE detail LIKE '%\"run\"%' ORDER BY 1, 2")
    assert [row[1] for row in trained] == ["continued", "preference", "rl", "sft"] * 2, (
        "every stage had something to learn from"
    )
    for number, stage in trained:
        with RunReader(tmp_path / "killed" / "rounds" / f"{number:02d}" / stage) as run:
            steps = [step for step, _ in run.metric("train/grad_norm")]
            assert len(steps) == len(set(steps)), f"a step of {stage} in round {number} is there twice"
    leaked = "SELECT count(*) FROM tasks t JOIN held_out h ON h.id = t.id OR h.content = t.content"
    assert _rows(tmp_path / "killed", leaked) == [(0,)]


class FewTasks(ParityWorld):
    """Two tasks in all, and whatever is said is right."""

    difficulties = ()

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:  # noqa: ARG002
        return [Task(id=f"{split}-{n}", data={"n": 4 * n + (split == "test"), "size": 10}) for n in range(2)]


@pytest.mark.slow
def test_a_flywheel_whose_tasks_are_all_solved_ends_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []

    class Told(tw.Observer):
        def message(self, text: str) -> None:
            said.append(text)

    options = ["rounds=3", "tasks=2", "samples=4", "sft_steps=1", "rl_steps=0", "eval_tasks=2", "threshold=-1"]
    file = tmp_path / "wheel.yaml"
    file.write_text("{flywheel: {}, model: tiny, env: {name: few}}")
    overrides = [*(f"flywheel.{one}" for one in options), "train.lr_schedule=cosine", "train.lr_floor=0.5"]
    wheel = tw.flywheel(file, directory=tmp_path / "w", overrides=overrides, env=FewTasks(), observer=Told())
    assert [row["round"] for row in wheel.evaluations] == [0, 1]
    assert "nothing left to play" in said[-1]
    learned = tw.Run.open(tmp_path / "w" / "rounds" / "01" / "sft").config.train
    assert (learned.lr_schedule, learned.lr_floor) == ("cosine", 0.5), "a stage on stored data has the file's schedule"


def _outcome_model(directory: Path) -> Path:
    """An outcome model of the world of parity; what it has learned does not matter."""
    attempts: list[LabelledAttempt] = []
    for number in range(80):
        last = "ab"[number % 2]
        said = (user(f"Task {number}."), assistant("a"), user("Once more."), assistant(last))
        attempts.append(LabelledAttempt(world=WORLD, task_id=f"t{number}", messages=said, label=last == "b"))
    write_labelled(directory / "labelled.jsonl", attempts)
    options = OrmConfig(model="tiny", steps=12, batch_size=4, save_every=2)
    return train_outcome_model([directory / "labelled.jsonl"], directory / "orm", options).directory


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_an_outcome_model_is_trained_again_between_rounds_and_a_kill_on_the_way_changes_nothing(tmp_path: Path) -> None:
    orm, file = _outcome_model(tmp_path), tmp_path / "wheel.yaml"
    judged = f"verdict: {orm}, threshold: 0.45, refresh_verdict: 1, rounds: 2, tasks: 6, samples: 4"
    judged += ", sft_steps: 2, rl_steps: 2, eval_tasks: 2"
    file.write_text(
        f'flywheel: {{{judged}}}\nmodel: tiny\nenv: {{name: "{WORLD}"}}\n'
        "rollout: {group_size: 3, deterministic: true}\nalarms: {min_outcome_agreement: 0.99}\n"
        "train: {tasks_per_step: 2, learning_rate: 1.0e-2, save_every: 2}\n"
    )
    process, refreshed = _start(tmp_path / "killed", file), tmp_path / "killed" / "rounds" / "02" / "verdict"
    deadline = time.monotonic() + DEADLINE_S
    while process.poll() is None and not (refreshed / "progress.json").is_file() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert json.loads((refreshed / "progress.json").read_text())["step"] < 12, "it was killed on the way"
    for name in ("killed", "plain"):
        process = _start(tmp_path / name, file)
        _, said = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, said.decode()
    for sql in TABLES:
        assert _rows(tmp_path / "killed", sql) == _rows(tmp_path / "plain", sql), sql
    judges = _rows(tmp_path / "plain", "SELECT DISTINCT round, verdict FROM samples ORDER BY 1")
    assert judges == [(1, str(orm)), (2, "rounds/02/verdict")], "every sample says which model judged it"
    ((detail,),) = _rows(tmp_path / "plain", "SELECT detail FROM stages WHERE round = 2 AND stage = 'verdict'")
    assert json.loads(detail)["attempts"] == 24, "all that the verifier judged in the round before"
    learned = read_labelled(tmp_path / "plain" / "rounds" / "02" / "verdict" / "attempts.jsonl")
    assert len(learned) == 80 + 24
    with PoolStore.open(tmp_path / "plain", read_only=True) as store:
        used = [verdict_of(store, FlywheelConfig(verdict=str(orm)), number) for number in (1, 2)]
    assert used == [str(orm), str((tmp_path / "plain" / "rounds" / "02" / "verdict").resolve())], (
        "RL learns from it too"
    )
    judged_stage = "SELECT detail FROM stages WHERE round = 1 AND stage = 'judge'"
    assert json.loads(_rows(tmp_path / "plain", judged_stage)[0][0])["has_parted"], "it agreed on less than 99 %"
