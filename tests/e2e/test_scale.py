"""`turnwise scale` from the command line: before and after, on the same tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnwise.cli import main

pytestmark = pytest.mark.usefixtures("tiny_dir")
SMALL = ("model=tiny", "train.steps=1", "train.tasks_per_step=2", "rollout.group_size=2", "eval.tasks=0")


def test_scale_measures_the_start_and_the_end_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, picture = str(tmp_path / "run"), tmp_path / "scale.svg"
    warm = ("warmup.steps=20", "warmup.demonstrations=16")
    assert main(["train", "guess_number", *SMALL, *warm, f"run.dir={run}"]) == 0
    capsys.readouterr()
    play = ("--samples", "3", "eval.tasks=4", "--out", str(picture))
    assert main(["scale", run, *play, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(found["points"]) == ["before", "after"]
    for points in found["points"].values():
        samples = [(p["budget"], p["num_tasks"]) for p in points if p["kind"] == "pass@k"]
        assert samples == [(1, 4), (2, 4), (3, 4)]
        rates = [p["success"] for p in points if p["kind"] == "pass@k"]
        assert rates == sorted(rates)
    # The same play as `turnwise eval`: what a single sample reaches is the success rate that it prints.
    assert main(["eval", run, "eval.tasks=4", "eval.samples=3", "--json"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    after = next(p for p in found["points"]["after"] if (p["kind"], p["budget"]) == ("pass@k", 1))
    assert after["success"] == pytest.approx(row["success"])
    assert picture.read_text().startswith("<svg")
    first, last = (next(p for p in found["points"][name] if p["kind"] == "pass@k") for name in ("before", "after"))
    change = next(one for one in found["changes"] if (one["kind"], one["budget"]) == ("pass@k", 1))
    assert change["change"] == pytest.approx(last["success"] - first["success"])
    assert change["change_low"] <= change["change"] <= change["change_high"]

    assert main(["scale", "tiny", "--env", "guess_number", *play]) == 0
    out = capsys.readouterr().out
    assert "before" not in out
    assert "pass@k 3" in out
    refused = {
        ("scale", run, "eval.temperature=0", *play): "samples of a task are alike",
        ("scale", "tiny", *play): "add --env NAME",
        ("scale", run, "eval.samples=4", *play): "--samples N",
        ("scale", run, "--orm", run, *play): "is no outcome model",
        ("scale", run, "--critic", *play): "--critic needs a run with a critic",
        ("scale", run, "--critic", "--orm", run, *play): "expected one of them",
    }
    for words, message in refused.items():
        assert main(list(words)) == 2, words
        assert message in capsys.readouterr().err


def test_before_rl_is_after_the_warm_up_and_the_critic_and_a_vote_pick_among_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    warm = ("warmup.steps=30", "warmup.demonstrations=64", "warmup.learning_rate=5e-3", "critic.pretrain_steps=0")
    assert main(["train", "calculator", "method=ppo", *SMALL, *warm, f"run.dir={run}", "train.save_every=1"]) == 0
    capsys.readouterr()
    play = ("--samples", "4", "eval.tasks=4", "--out", str(tmp_path / "scale.svg"), "--json")
    assert main(["scale", run, "--critic", *play]) == 0
    said = capsys.readouterr()
    assert "before: step 0 of the run, after its warm-up" in said.err
    found = json.loads(said.out.splitlines()[-1])
    kinds = {point["kind"] for point in found["points"]["after"]}
    assert {"best of k", "majority of k"} <= kinds
    # What the warm-up alone reaches is what the checkpoint of step 0 reaches.
    assert main(["eval", run, "--step", "0", "eval.tasks=4", "eval.samples=4", "--json"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    before = next(p for p in found["points"]["before"] if (p["kind"], p["budget"]) == ("pass@k", 1))
    assert before["success"] == pytest.approx(row["success"])
