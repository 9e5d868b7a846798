"""The SQL world and the games through the real commands, on `tiny`."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from command_line import SMALL_RUN, run_here, run_module
from turnwise.runlog.reader import RunReader


@pytest.mark.usefixtures("tiny_dir")
@pytest.mark.parametrize(
    "arguments",
    [
        ("text_to_sql", "env.options.difficulty=mixed", "env.options.protocol=tags"),
        ("tic_tac_toe", "env.options.opponent=minimax", "env.options.epsilon=0.3"),
    ],
)
def test_worlds_train_with_their_options(arguments: tuple[str, ...], tmp_path: Path) -> None:
    out = run_here("train", *arguments, *SMALL_RUN, f"run.dir={tmp_path / 'run'}")
    assert "step 2/2" in out
    with RunReader(tmp_path / "run") as reader:
        assert len(reader.attempts(phase="train")) == 16
        assert all(row.is_exact for row in reader.certificates())


@pytest.mark.usefixtures("tiny_dir")
def test_a_folder_in_spiders_layout_trains_from_the_command_line(tmp_path: Path) -> None:
    for name in ("one", "two"):
        database = tmp_path / "spider" / "database" / name / f"{name}.sqlite"
        database.parent.mkdir(parents=True)
        with closing(sqlite3.connect(database)) as connection:
            connection.execute("CREATE TABLE singer (name TEXT, age INTEGER)")
            connection.execute("INSERT INTO singer VALUES ('Ada', 30), ('Bo', 40)")
            connection.commit()
    row = {"question": "How many singers?", "query": "SELECT count(*) FROM singer"}
    for file, name in (("train_spider.json", "one"), ("dev.json", "two")):
        rows = [{"db_id": name, **row, "question": f"{row['question']} ({n})"} for n in range(6)]
        (tmp_path / "spider" / file).write_text(json.dumps(rows), encoding="utf-8")
    path = f"env.options.path={tmp_path / 'spider'}"
    short = "rollout.max_tokens_per_turn=16"
    out = run_here("train", "text_to_sql", path, short, *SMALL_RUN, f"run.dir={tmp_path / 'run'}")
    assert "singer(name text, age integer)" in out
    assert str(tmp_path / "spider") not in out.split("--- attempt", 1)[1]


@pytest.mark.usefixtures("tiny_dir")
def test_the_self_play_recipe_runs_a_few_steps(tmp_path: Path) -> None:
    small = ("--warmup", "4", "--steps", "2", "--openings", "2", "--games", "4", "--held-out", "8")
    out = run_module("turnwise.recipes.self_play", *small, "--dir", str(tmp_path / "run"))
    for label in ("start", "warm-up", "end"):
        assert re.search(rf"^{label}: not lost \d\.\d\d, won \d\.\d\d against random moves$", out, re.MULTILINE)
    with RunReader(tmp_path / "run") as reader:
        labels = [reader.attempt(row.id).trajectory.labels for row in reader.attempts(phase="train")]
        # The other seat may never move, because `tiny` says no numbers yet: then it has no attempt.
        assert {one["opponent"] for one in labels} == {"self"}
        assert {one["seat"] for one in labels} <= {"0", "1"}
        assert all(row.is_exact for row in reader.certificates())


@pytest.mark.usefixtures("tiny_dir")
def test_the_text_to_sql_recipe_runs_a_few_steps(tmp_path: Path) -> None:
    small = ("--warmup", "2", "--steps", "2", "--tasks", "2", "--group", "4", "--held-out", "4")
    out = run_module("turnwise.recipes.text_to_sql", "--model", "tiny", "--dir", str(tmp_path / "run"), *small)
    assert "step 2/2" in out
    assert re.search(r"^held-out success: \d\.\d\d at the start, \d\.\d\d at the end$", out, re.MULTILINE)
    with RunReader(tmp_path / "run") as reader:
        assert len(reader.attempts(phase="train")) == 16
        assert all(row.is_exact for row in reader.certificates())
