"""`turnwise cluster simulate --from RUN` reads its rates from a real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import run_here
from turnwise.runlog.reader import RunReader

ECHO = f"{Path(__file__).with_name('echo_world.py')}:EchoWorld"
SMALL = ("model=tiny", "train.tasks_per_step=2", "rollout.group_size=3", "eval.tasks=0")


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_dir")
def test_a_run_is_repeated_with_its_own_rates_and_settings(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    run_here("train", ECHO, *SMALL, "train.steps=2", f"run.dir={directory}")
    simulate = ("cluster", "simulate", "--from", str(directory))
    assert "has 2 steps with times; at least 3 are needed" in run_here(*simulate, code=2)
    run_here("train", "--resume", str(directory), "train.steps=5")

    options = (*simulate, "--devices", "1,2", "--steps", "3")
    found = json.loads(run_here(*options, "--json"))
    with RunReader(directory) as run:
        seconds = [value for _, value in run.metric("time/step_s")][1:]
    check = found["run"]
    assert check["measured_s"] == pytest.approx(sum(seconds) / len(seconds)), "all steps but the first"
    assert check["error"] == pytest.approx(check["predicted_s"] / check["measured_s"] - 1)
    assert 0 < check["predicted_s"] < 100 * check["measured_s"]
    assert [row["devices"] for row in found["regimes"]] == [1, 2]
    printed = run_here(*options)
    said = f"{check['predicted_s']:.3g} s per step simulated, {check['measured_s']:.3g} s measured"
    assert said in printed, "the same seed gives the same numbers"

    slower = json.loads(run_here(*options, "--json", "--trainer-rate", "0.01"))
    assert slower["run"] == check, "a rate that replaces the run's does not change how the run is repeated"
    assert slower["regimes"][0]["step_s"] > found["regimes"][0]["step_s"]
