"""The world `workspace` through the command line: a run with screens, files and a shell, and its replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import run_here
from turnwise.runlog.reader import RunReader
from turnwise.view.one_attempt import attempt_json

pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.mark.usefixtures("tiny_dir")
def test_an_attempt_with_screens_and_a_shell_replays_exactly_from_its_record(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    short = ("train.steps=1", "train.tasks_per_step=2", "rollout.group_size=4", "eval.tasks=0")
    warm = ("warmup.steps=160", "warmup.demonstrations=192")
    run_here("train", "workspace_tiny", "env.options.interface=both", *short, *warm, f"run.dir={directory}")
    heard: dict[int, str] = {}
    with RunReader(directory) as run:
        for row in run.attempts():
            turns = attempt_json(run, row.id, "tiny")["turns"]
            heard[row.id] = "\n".join(message["content"] for turn in turns for message in turn["observation"])
    with_a_shell = [number for number, text in heard.items() if "orders.csv was saved to /work." in text]
    assert with_a_shell, heard
    for number in with_a_shell[:2]:
        assert "replayed exactly" in run_here("replay", str(directory), "--attempt", str(number))
