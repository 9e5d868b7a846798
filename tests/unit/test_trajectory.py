"""What a trajectory says about itself, and that an end reason is declared in one place."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import turnwise
from turnwise.trajectory import EndReason

SOURCE = Path(turnwise.__file__).parent

WITH_A_NEW_REASON = """
import importlib.util, pathlib, sys, tempfile
import turnwise

path = pathlib.Path(turnwise.__file__).parent / "trajectory.py"
marker = '    TERMINATED = '
added = '    MAX_CALLS = "max_calls", "the attempt made too many calls", True'
text = path.read_text().replace(marker, added + chr(10) + marker)
spec = importlib.util.spec_from_file_location("turnwise.trajectory", path)
module = importlib.util.module_from_spec(spec)
sys.modules["turnwise.trajectory"] = module
exec(compile(text, str(path), "exec"), module.__dict__)

from turnwise.rollout.stats import RolloutStats, success_rate
from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import AttemptRecord
from turnwise.runlog.writer import RunWriter
from turnwise.trajectory import EndReason, Message, Trajectory, Turn

reply = Message(role="assistant", content="hi")
turn = Turn(prompt_ids=(1,), sampled_ids=(2,), sampler_logprobs=(-1.0,), policy_version=0, reply=reply)
made = Trajectory(task_id="t", attempt=0, seed=0, turns=(turn,), end_reason=EndReason.MAX_CALLS)
assert made.is_truncated and made.is_judged
stats = RolloutStats()
stats.add_kept_group([made], [])
assert stats.metrics()["rollout/stop_max_calls_share"] == 1.0
with tempfile.TemporaryDirectory() as folder:
    writer = RunWriter.create(pathlib.Path(folder) / "run", "model: {}", max_size_mb=64)
    writer.attempts(1, "train", [AttemptRecord(trajectory=made, outcome="trained")])
    writer.commit(1)
    with RunReader(writer.directory) as run:
        assert run.attempt(1).trajectory == made
        assert run.attempts()[0].end_reason == "max_calls"
    writer.close()
"""


def test_one_line_in_trajectory_py_adds_an_end_reason_that_metrics_and_run_files_know() -> None:
    done = subprocess.run([sys.executable, "-c", WITH_A_NEW_REASON], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_end_reason_is_named_where_it_is_declared_and_where_it_is_decided() -> None:
    """All others ask `is_truncation`, `is_repeatable` or `description`."""
    users: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for name in re.findall(r"EndReason\.([A-Z_]+)", path.read_text()):
            users.setdefault(name, set()).add(str(path.relative_to(SOURCE)))
    general = {"TERMINATED", "FAILED"}  # the two ends that everybody who makes a trajectory knows
    for name, files in users.items():
        assert name in general or files <= {"trajectory.py", "rollout/play.py", "rollout/limits.py"}, (name, files)


def test_limits_of_the_rollout_count_as_truncation_and_the_tasks_own_ends_do_not() -> None:
    cut = {reason for reason in EndReason if reason.is_truncation}
    other = {EndReason.TIME_LIMIT, EndReason.UPDATED}
    assert cut == {EndReason.TRUNCATED, EndReason.MAX_TURNS, EndReason.MAX_TOKENS, *other}
    assert {reason for reason in EndReason if not reason.is_repeatable} == {*other, EndReason.FAILED}
    assert all(reason.description and str(reason) == reason.value for reason in EndReason)
