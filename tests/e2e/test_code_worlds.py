"""The worlds that run code through the real commands, on `tiny`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import turnwise
from command_line import SMALL_RUN, run_here, run_module
from turnwise.runlog.reader import RunReader


@pytest.mark.usefixtures("tiny_dir")
def test_repos_are_fixed_with_tool_calls_from_the_command_line(tmp_path: Path) -> None:
    options = ("env.options.protocol=tool_call", "env.options.max_turns=3", "warmup.steps=0")
    out = run_here("train", "swe", *SMALL_RUN, *options, f"run.dir={tmp_path / 'run'}")
    assert "step 2/2" in out
    with RunReader(tmp_path / "run") as reader:
        assert len(reader.attempts(phase="train")) == 16
        assert all(row.is_exact for row in reader.certificates())


@pytest.mark.usefixtures("tiny_dir")
def test_a_file_in_mbpps_layout_trains_from_the_command_line(tmp_path: Path) -> None:
    rows = [
        {
            "task_id": number,
            "text": f"Write a function to add {number}.",
            "code": f"def add(n):\n    return n + {number}",
            "test_list": [f"assert add({n}) == {n + number}" for n in (0, 5, 7)],
        }
        for number in range(20)
    ]
    path = tmp_path / "mbpp.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = (f"env.options.path={path}", "env.options.partial_credit=0.5", f"run.dir={tmp_path / 'run'}")
    out = run_here("train", "code", *SMALL_RUN, *options)
    assert re.search(r"Write a function to add \d+\.", out)
    assert "step 2/2" in out


@pytest.mark.parametrize("world", ["code", "swe"])
def test_without_bubblewrap_a_run_is_refused_with_what_to_install(world: str, tmp_path: Path) -> None:
    said = run_module(
        "turnwise.cli", "train", world, *SMALL_RUN, f"run.dir={tmp_path / 'run'}", code=2, PATH=str(tmp_path)
    )
    assert said.startswith("turnwise: bubblewrap is not installed; install it with")
    assert "`sandbox: subprocess`" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("tiny_dir")
@pytest.mark.parametrize(
    ("recipe", "options", "last"),
    [
        (
            "code",
            ("--warmup", "1", "--steps", "1", "--tasks", "1", "--held-out", "2"),
            r"held out \(end\): success \d\.\d\d, repaired \d\.\d\d of \d",
        ),
        (
            "swe",
            ("--warmup", "1", "--rounds", "1", "--tasks", "1", "--held-out", "1"),
            r"held out  \d of 1 repos fixed",
        ),
    ],
)
def test_the_recipes_run(recipe: str, options: tuple[str, ...], last: str, turnwise_home: Path, tmp_path: Path) -> None:
    small = ("--model", "tiny", "--group", "2", "--dir", str(tmp_path / "run"))
    out = run_module(f"turnwise.recipes.{recipe}", *small, *options, TURNWISE_HOME=str(turnwise_home))
    assert turnwise.Run.open(tmp_path / "run").metrics["step"][-1] == 1
    assert re.search(last, out.strip().splitlines()[-1])
