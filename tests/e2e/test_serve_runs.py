"""`turnwise serve RUN RUN`: the policies of runs, by name, from the real command line."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx2
import pytest

import turnwise as tw
from service_process import ServerProcess
from turnwise.cli import main
from turnwise.client.checkpoints import CheckpointStore

pytestmark = pytest.mark.model

SMALL: Any = {"rollout": {"group_size": 2}, "eval": {"tasks": 0}, "warmup": {"steps": 2}, "observer": tw.Observer()}


def train(place: Path, seed: int) -> Path:
    stop = ["e", " ", "1"] if seed else []
    options = {**SMALL, "train": {"seed": seed, "tasks_per_step": 2}, "rollout": {"group_size": 2, "stop": stop}}
    with tw.train("guess_number", model="tiny", steps=1, directory=place, **options):
        return place


def test_two_runs_answer_by_their_names_as_their_policies_do(tiny_dir: Path, tmp_path: Path) -> None:
    assert tiny_dir.is_dir()
    runs = [train(tmp_path / name, seed) for seed, name in enumerate(("calm", "bold"))]
    asked = {"messages": [{"role": "user", "content": "Guess."}], "max_tokens": 12, "temperature": 0}
    with ServerProcess(tmp_path / "data", *map(str, runs)) as server, httpx2.Client(base_url=server.url) as http:
        listed = [model["id"] for model in http.get("/v1/models").json()["data"]]
        said = {
            name: http.post("/v1/chat/completions", json={"model": name, **asked}, timeout=120).json()
            for name in ("calm", "bold")
        }
    assert listed == ["tiny", "calm", "bold"]
    for run in runs:
        with tw.Run.open(run).last as policy:
            expected = policy.sample("Guess.", max_tokens=12, temperature=0.0)
        assert said[run.name]["choices"][0]["message"]["content"] == expected


def test_what_cannot_be_served_together_is_refused(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bases = (tiny_dir, shutil.copytree(tiny_dir, tmp_path / "another_base"))
    with tw.ServiceClient(data_dir=tmp_path / "store") as service:
        saved = [service.create_lora_training_client(str(base), rank=4).save_state("one").result() for base in bases]
    one, other = (CheckpointStore(tmp_path / "store").directory(each.path) for each in saved)
    here = ["serve", "--port", "0", "--data-dir", str(tmp_path / "data")]
    cases = (
        ([f"a:{one}", f"b:{other}"], "share one base model"),
        ([f"a:{one}", f"a:{one}"], "are both called 'a'"),
        ([str(tiny_dir)], f"--model {tiny_dir}"),
        ([], "nothing to serve"),
        (["--model", str(tiny_dir), "--step", "last"], "--step last is for runs"),
    )
    for targets, message in cases:
        assert main([*here, *targets]) == 2
        assert message in capsys.readouterr().err
