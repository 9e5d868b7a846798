"""`turnwise compare` as people run it: equal tokens, a run that fails, a grid that is broken off."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from command_line import run_module, start_cli
from turnwise.cli import main
from turnwise.runlog.reader import RunReader, is_run

WORLD = f"{Path(__file__).with_name('echo_world.py')}:EchoWorld"
SMALL = (
    *("model=tiny", "train.steps=2", "train.tasks_per_step=2", "train.num_tasks=8", "rollout.group_size=4"),
    *("eval.tasks=2", "eval.every=1"),
)


def _write_as_before_the_rooms(file: Path) -> None:
    """Spell the config of a stored result as runs did that had the sections `generator` and no `engine`."""
    content = json.loads(file.read_text())
    config = content["config"]
    rollout, engine = config.pop("rollout"), config.pop("engine")
    config["generator"] = {
        "n_samples_per_prompt": rollout["group_size"],
        "sampling_params": {"temperature": rollout["temperature"], "top_p": 1.0, "top_k": -1},
        "max_turns": rollout["max_turns"],
        "same_start": rollout["same_start"],
        "max_num_seqs": engine["max_num_seqs"],
    }
    config["model"]["device"] = engine["device"]
    file.write_text(json.dumps(content))


@pytest.mark.usefixtures("tiny_dir")
def test_every_method_samples_the_same_tokens_and_starts_from_one_warm_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "compare"
    methods = "methods=sft,grpo,la_grpo,ppo[critic.pretrain_steps=1]"
    command = ["compare", methods, f"env={WORLD}", "seeds=1", "jobs=2", "warmup.steps=3", *SMALL, f"--out={out}"]
    assert main(command) == 0
    results = {one["label"]: one for one in json.loads((out / "compare.json").read_text())["results"]}
    budget = results["grpo"]["sampled_tokens"]
    assert results["grpo"]["steps"] == 2
    assert budget <= results["la_grpo"]["sampled_tokens"] < 2 * budget
    assert results["la_grpo"]["trained_tokens"] < results["grpo"]["trained_tokens"] == budget
    assert (results["sft"]["sampled_tokens"], results["sft"]["steps"]) == (0, 2), "it reads, and ends by its steps"
    pretrained = results["ppo[critic.pretrain_steps=1]"]
    assert pretrained["curve"][0][0] == 0 < pretrained["curve"][1][0], "a critic's tokens come before the first step's"
    assert pretrained["curve"][0][2] == pretrained["curve"][1][2]
    assert pretrained["sampled_tokens"] >= budget
    assert [step for step, _, _ in pretrained["critic"]] == [0, *range(1, pretrained["steps"] + 1)]
    assert all(len(errors) == 5 and min(errors) > 0 for _, errors, _ in pretrained["critic"])
    assert results["grpo"]["critic"] == []

    databases = sorted(out.glob("*/*/run.db"))
    assert len(databases) == 5, "four runs and their warm-up"
    warm = {file.parent.name: RunReader(file.parent).metric("warmup/loss") for file in databases}
    assert len({tuple(losses) for losses in warm.values()}) == 1
    assert all(len(losses) == 3 for losses in warm.values())
    starts = {one["start_weights"] for one in results.values()}
    assert len(starts) == 1, "all of them started from the weights of that warm-up"
    assert starts != {""}
    for name in ("compare.svg", "compare.md", "compare.txt"):
        assert (out / name).stat().st_size
    assert "held-out success" in capsys.readouterr().out

    before = {file: file.stat().st_mtime_ns for file in databases}
    assert main(command) == 0, "what is done is not done again"
    assert {file: file.stat().st_mtime_ns for file in databases} == before
    for file in databases:
        shutil.rmtree(file.parent)
    (out / "compare.md").unlink()
    assert main(command) == 0, "what a run came to is kept beside it"
    assert not list(out.glob("*/*/run.db"))
    assert {one["label"]: one for one in json.loads((out / "compare.json").read_text())["results"]} == results
    for file in out.glob("*/*.json"):
        _write_as_before_the_rooms(file)
    assert main(command) == 0, "a result of an older turnwise, which spelled options otherwise, is kept too"
    assert not list(out.glob("*/*/run.db"))
    assert main([*command, "train.learning_rate=0.01"]) == 2
    assert "choose another --out" in capsys.readouterr().err


@pytest.mark.usefixtures("tiny_dir")
def test_a_run_that_fails_is_named_and_leaves_the_others_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "compare"
    methods = f"methods=grpo,ppo[critic.pretrain_from={tmp_path / 'not_there'}],rloo"
    code = main(["compare", methods, f"env={WORLD}", "seeds=1", "tokens=100", "jobs=2", *SMALL, f"dir={out}"])
    said = capsys.readouterr().out
    assert code == 1
    found = json.loads((out / "compare.json").read_text())
    assert [one["label"] for one in found["results"]] == ["grpo", "rloo"]
    (failure,) = found["failures"]
    assert "ppo" in failure
    assert failure in said
    (log,) = out.glob("*/ppo*.log")
    assert str(log) in failure
    assert "not_there" in log.read_text()


@pytest.mark.usefixtures("tiny_dir")
def test_a_grid_that_was_broken_off_goes_on_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "compare"
    command = ["compare", "methods=grpo,rloo", f"env={WORLD}", "seeds=1"]
    command += ["jobs=2", "tokens=6000", *SMALL, "train.save_every=1", "eval.every=0", f"dir={out}"]
    with (tmp_path / "said").open("w") as said:
        process = start_cli(*command, stdout=said, stderr=said, start_new_session=True)
    deadline = time.monotonic() + 120
    while sum(_num_steps(place) > 2 for place in out.glob("*/*-seed0")) < 2:
        assert process.poll() is None, (tmp_path / "said").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=120) == 130, (tmp_path / "said").read_text()
    places = sorted(place for place in out.glob("*/*-seed0") if place.is_dir())
    done = {place: _num_steps(place) for place in places}
    assert len(done) == 2
    run_module("turnwise.cli", *command)
    for place, num_steps in done.items():
        with RunReader(place) as run:
            assert [event.step for event in run.events("resumed")] == [num_steps], "not from the start"
            assert sum(value for _, value in run.metric("rollout/tokens_drawn")) >= 6000


def _num_steps(place: Path) -> int:
    if not is_run(place):
        return 0
    with RunReader(place) as run:
        return len(run.metric("rollout/tokens_drawn"))
