"""`turnwise train search` through the real command line on `tiny`: in one process, against a server, and judged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from command_line import SMALL_RUN, run_here
from local_server import serving, unused_address
from turnwise.runlog.reader import RunReader


def _check(directory: Path) -> None:
    with RunReader(directory) as run:
        assert len(run.attempts(phase="train")) == 16
        assert all(row.is_exact for row in run.certificates())
        assert run.checkpoints()[-1].step == 2


@pytest.mark.usefixtures("tiny_dir")
def test_search_trains_without_a_server(tmp_path: Path) -> None:
    out = run_here(
        "train", "search", *SMALL_RUN, "env.options.kind=mixed", "env.options.max_turns=4", f"run.dir={tmp_path}/r"
    )
    assert "step 2/2" in out
    _check(tmp_path / "r")


@pytest.fixture(scope="module")
def retriever(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("retriever")
    run_here("retriever", "corpus", str(folder / "fiction.jsonl"))
    command = [sys.executable, "-m", "turnwise.cli", "retriever", "serve", "--port", "0", "--cache", "none"]
    with subprocess.Popen(
        [*command, "--corpus", str(folder / "fiction.jsonl")], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        address = re.search(r"on (http://\S+)", process.stderr.readline())
        assert address is not None
        yield address[1]
        process.terminate()


@pytest.mark.usefixtures("tiny_dir")
def test_search_trains_against_a_retriever_server(retriever: str, tmp_path: Path) -> None:
    run_here("train", "search", *SMALL_RUN, f"env.options.retriever_url={retriever}", f"run.dir={tmp_path}/r")
    _check(tmp_path / "r")


def test_the_world_keeps_the_rules_against_a_server(retriever: str) -> None:
    assert "search: keeps all the rules" in run_here("check-env", "search", f"retriever_url={retriever}")


def test_a_server_that_is_away_breaks_a_rule_and_not_the_command() -> None:
    out = run_here("check-env", "search", f"retriever_url={unused_address()}", "deadline_s=0.5", code=1)
    assert "retriever" in out
    assert "Traceback" not in out


@pytest.mark.usefixtures("tiny_dir")
def test_any_world_trains_with_a_judge_from_the_command_line(tmp_path: Path) -> None:
    app = FastAPI()

    @app.post("/v1/chat/completions", response_model=None)
    async def complete() -> dict[str, Any]:
        return {"choices": [{"message": {"content": "Score: 5"}}]}

    with serving(app) as address:
        run_here(
            "train",
            "turnwise.judges:judged_by_model",
            *SMALL_RUN,
            "env.options.world=search",
            "env.options.world_options={max_turns: 2}",
            "env.options.rubric=It searched before it answered.",
            f"env.options.base_url={address}/v1",
            "env.options.model=any",
            "env.options.gate=always",
            "env.options.weight=0.2",
            f"run.dir={tmp_path}/r",
        )
    _check(tmp_path / "r")
    with RunReader(tmp_path / "r") as run:
        assert run.metric("rollout/reward_judge_mean") == [(1, pytest.approx(0.1)), (2, pytest.approx(0.1))]
        assert run.metric("rollout/env_judge_asked_mean")[-1] == (2, 1.0)


@pytest.mark.usefixtures("tiny_dir")
def test_the_recipe_runs_from_warm_up_to_the_judge(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "turnwise.recipes.search",
            "--steps",
            "1",
            "--warmup",
            "1",
            "--eval-tasks",
            "2",
            "--judge",
            "--dir",
            str(tmp_path / "run"),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("step 1/1  ") for line in lines)
    assert [line.partition(":")[0] for line in lines if line.startswith("held out, ")] == [
        "held out, start",
        "held out, warm-up",
        "held out, end",
    ]
