"""Several worlds in one run, from the command line: killed, resumed, evaluated, replayed and certified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from campaigns.train_kills import start
from turnwise.cli import main
from turnwise.runlog.reader import RunReader

STEPS = 4
LUCK = Path(__file__).with_name("killed_in_mix_world.py")
OPTIONS = (
    *("mix", "env.mix=doors=2,guess_number=1", "env.mix.doors.curriculum=true", "env.mix.doors.curriculum_window=2"),
    *(f"env.mix.doors.name={LUCK}:KilledInMix", "model=tiny", "warmup.steps=0", "train.tasks_per_step=3"),
    *("train.save_every=1", "train.max_empty_steps=1000", f"train.steps={STEPS}", "train.num_tasks=8"),
    *("rollout.group_size=3", "rollout.deterministic=true", "rollout.same_start=false", "eval.tasks=3", "eval.every=0"),
    *("eval.keep_best=false", "run.dialogues=0"),
)


def _schedule(directory: Path) -> tuple[list[tuple[int, str, float]], dict[str, list[tuple[int, float]]]]:
    """(step, task, reward) of every attempt of training, and what the run says about worlds and levels."""
    with RunReader(directory) as run:
        names = [name for name in run.metric_names() if name.startswith(("world/", "curriculum/"))]
        attempts = sorted((row.step, row.task_id, row.reward) for row in run.attempts(phase="train"))
        return attempts, {name: run.metric(name) for name in names}


@pytest.mark.usefixtures("tiny_dir")
def test_a_mix_with_a_curriculum_that_is_killed_keeps_its_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, killed, marker = tmp_path / "whole", tmp_path / "killed", tmp_path / "marker"
    assert main(["train", *OPTIONS, f"run.dir={whole}"]) == 0
    process = start(*OPTIONS, f"env.mix.doors.options.marker={marker}", f"run.dir={killed}")
    try:
        process.communicate(timeout=240)
    finally:
        process.kill()
    assert (process.returncode, marker.exists()) == (-9, True)
    with RunReader(killed) as run:
        assert 1 <= len(run.metric("time/step_s")) < STEPS
    assert main(["train", "--resume", str(killed)]) == 0
    attempts, metrics = _schedule(whole)
    assert _schedule(killed) == (attempts, metrics)
    assert sum(value for _, value in metrics["world/groups_doors"]) == 2 * STEPS
    assert sum(value for _, value in metrics["world/groups_guess_number"]) == STEPS
    assert metrics["curriculum/rate_doors_level0"][-1][1] >= 0.5 >= metrics["curriculum/rate_doors_level2"][-1][1]
    _check_commands(killed, capsys)


def _check_commands(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What reads a run reads this one too."""
    capsys.readouterr()
    assert main(["eval", str(directory), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = told["by_world"]
    assert set(rows) == {"doors", "doors_level0", "doors_level1", "doors_level2", "guess_number"}
    assert told["success"] == pytest.approx((rows["doors"]["success"] + rows["guess_number"]["success"]) / 2)
    assert main(["certify", str(directory)]) == 0
    with RunReader(directory) as run:
        last = {row.task_id.partition("/")[0]: row.id for row in run.attempts()}
    for attempt in last.values():
        assert main(["replay", str(directory), "--attempt", str(attempt)]) == 0
