"""Training in a world in which 20 % of steps hang, 10 % crash and 5 % return garbage, through the real command."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from e2e.chaos_world import CRASH, GARBAGE, HANG, MARK, PLAIN_HANG_S, REWARDS
from processes import marked_processes
from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import AttemptRow, StoredAttempt

WORLD = f"{Path(__file__).with_name('chaos_world.py')}:ChaosWorld"
NUM_STEPS, NUM_TASKS, GROUP_SIZE, NUM_RETRIES = 4, 10, 8, 1
NUM_ATTEMPTS = NUM_STEPS * NUM_TASKS * GROUP_SIZE
STEP_S, ATTEMPT_S = 0.5, 5.0
RUN_LIMIT_S = 500.0
"""Only a hang takes so long: without deadlines the first coroutine that hangs would hold up the run for ever."""
pytestmark = pytest.mark.timeout(RUN_LIMIT_S + 100)
EXPECTED = fmean(REWARDS)
LOST_TRY = 1 - (1 - HANG - CRASH - GARBAGE) ** 2
"""Two steps of a try have to go well."""
LOST_ATTEMPT = LOST_TRY ** (1 + NUM_RETRIES)

# The command as a person runs it, and then a look at what it left behind in its process.
DRIVER = """\
import asyncio, gc, json, sys, threading, time
from turnwise.cli import main

code = main(sys.argv[2:])
deadline = time.monotonic() + 120
while threading.active_count() > 1 and time.monotonic() < deadline:
    time.sleep(0.05)  # plain steps that hung come back by themselves
gc.collect()
left = {
    "code": code,
    "threads": sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread()),
    "tasks": [repr(o) for o in gc.get_objects() if issubclass(type(o), asyncio.Task) and not o.done()],
}
with open(sys.argv[1], "w", encoding="utf-8") as file:
    json.dump(left, file)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    left: dict[str, Any]
    errors: str
    processes: list[str]
    directory: Path
    attempts: list[AttemptRow]
    stored: list[StoredAttempt]
    """Of the attempts that did not fail."""
    failures: list[str]
    sums: dict[str, float]
    """Metrics, added up over the steps."""
    step_s: list[float]

    @property
    def groups(self) -> dict[str, list[StoredAttempt]]:
        groups: defaultdict[str, list[StoredAttempt]] = defaultdict(list)
        for one in self.stored:
            groups[one.row.task_id].append(one)
        return groups


@pytest.fixture(scope="module")
def finished(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:  # noqa: ARG001
    scratch = tmp_path_factory.mktemp("chaos")
    directory, left = scratch / "run", scratch / "left.json"
    options = (
        *("model=tiny", f"train.steps={NUM_STEPS}", f"train.tasks_per_step={NUM_TASKS}", "method.advantage=centered"),
        *("eval.tasks=4", "eval.every=0", f"rollout.group_size={GROUP_SIZE}", "run.dialogues=1"),
        "rollout.same_start=false",  # the seed draws what breaks: another attempt has another fate
        *(f"rollout.max_retries={NUM_RETRIES}", f"rollout.step_deadline_s={STEP_S}"),
        *(f"rollout.attempt_deadline_s={ATTEMPT_S}", f"run.dir={directory}"),
    )
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(left), "train", WORLD, *options],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"},
        timeout=RUN_LIMIT_S,
        check=False,
    )
    assert left.exists(), done.stdout + done.stderr
    with RunReader(directory) as run:
        attempts = run.attempts(phase="train")
        read = [run.attempt(row.id) for row in attempts]
        return Finished(
            left=json.loads(left.read_text(encoding="utf-8")),
            errors=done.stderr,
            processes=marked_processes(MARK),
            directory=directory,
            attempts=attempts,
            stored=[one for one in read if one.trajectory.failure is None],
            failures=[one.trajectory.failure.detail for one in read if one.trajectory.failure is not None],
            sums={name: sum(value for _, value in run.metric(name)) for name in run.metric_names()},
            step_s=[value for _, value in run.metric("time/step_s")],
        )


def test_training_finishes_and_learns_from_the_survivors(finished: Finished) -> None:
    assert finished.left["code"] == 0
    assert len(finished.step_s) == NUM_STEPS
    assert finished.sums["train/optimizer_step"] == sum(range(1, NUM_STEPS + 1)), "every step had something to learn"


def test_no_step_takes_longer_than_its_deadlines_allow(finished: Finished) -> None:
    """Attempts run side by side, so a step is as long as the longest of them with its retry, and then trains."""
    close_s, training_s = 10.0, 5.0
    assert max(finished.step_s) < (1 + NUM_RETRIES) * (ATTEMPT_S + close_s) + training_s
    assert max(one.trajectory.duration_s for one in finished.stored) < ATTEMPT_S + close_s


def test_what_is_dropped_is_counted_by_reason_and_adds_up(finished: Finished) -> None:
    sums = finished.sums
    dropped = {name: value for name, value in sums.items() if name.startswith("rollout/dropped_")}
    assert sums["rollout/attempts"] == NUM_ATTEMPTS == sums["rollout/attempts_kept"] + sum(dropped.values())
    assert set(dropped) <= {"rollout/dropped_env_failed", "rollout/dropped_group_too_small"}
    lost, spread = NUM_ATTEMPTS * LOST_ATTEMPT, math.sqrt(NUM_ATTEMPTS * LOST_ATTEMPT * (1 - LOST_ATTEMPT))
    assert sums["rollout/dropped_env_failed"] > lost - 4 * spread
    assert sums["rollout/failures_env"] == sums["rollout/retries"] + sums["rollout/dropped_env_failed"]
    assert sums["rollout/tries"] == NUM_ATTEMPTS + sums["rollout/retries"]
    assert sums["rollout/abandoned_calls"] > 0


def test_every_attempt_is_on_record_and_failed_ones_say_why(finished: Finished) -> None:
    assert len(finished.attempts) == NUM_ATTEMPTS
    assert len(finished.failures) == finished.sums["rollout/dropped_env_failed"]
    for cause in ("gave no answer within", "the sandbox died", "expected an EnvStep"):
        assert any(cause in detail for detail in finished.failures), cause


def test_the_baseline_of_the_survivors_is_unbiased(finished: Finished) -> None:
    """What goes wrong is drawn apart from the reward, so the survivors' mean reward is known: 1.5."""
    rewards = [one.trajectory.total_reward for one in finished.stored]
    assert set(rewards) == set(REWARDS), "nobody was scored 0"
    standard_error = 0.5 / math.sqrt(len(rewards))
    assert fmean(rewards) == pytest.approx(EXPECTED, abs=3.5 * standard_error)
    baselines = [fmean(one.trajectory.total_reward for one in group) for group in finished.groups.values()]
    assert fmean(baselines) == pytest.approx(EXPECTED, abs=4 * standard_error)
    scored_zero = sum(rewards) / NUM_ATTEMPTS
    assert scored_zero < EXPECTED - 6 * standard_error, "the test would notice failures that are scored"


def test_advantages_are_centred_on_the_survivors_alone(finished: Finished) -> None:
    trained = [one for one in finished.stored if one.row.outcome == "trained"]
    assert len(trained) > NUM_ATTEMPTS / 3
    groups = finished.groups
    for one in trained:
        baseline = fmean(sibling.trajectory.total_reward for sibling in groups[one.row.task_id])
        assert one.advantages[-1][0] == pytest.approx(one.trajectory.total_reward - baseline, abs=1e-6)


def test_no_thread_task_or_process_is_left(finished: Finished) -> None:
    assert finished.left["threads"] == [], f"plain steps hang for {PLAIN_HANG_S} s and then end"
    assert finished.left["tasks"] == []
    assert finished.processes == [], "every env was closed, and its process with it"
    for complaint in ("was destroyed but it is pending", "never awaited", "never retrieved", "Traceback"):
        assert complaint not in finished.errors, finished.errors
