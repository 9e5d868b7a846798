"""Outcome models from end to end with `tiny`: trained, killed, used as a reward, and caught when they are hacked."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import turnwise as tw
from campaigns.train_kills import expected_attempts, learned_attempts
from command_line import run_module, start_cli
from e2e.spurious_world import COLOURS, SpuriousWorld, question
from turnwise.envs.base import assistant
from turnwise.outcomes.labelled import LabelledAttempt, write_labelled
from turnwise.runlog.reader import RunReader, is_run
from turnwise.training.orm import OrmConfig, OrmResult, train_outcome_model

pytestmark = pytest.mark.usefixtures("tiny_dir")
WORLD = f"{Path(__file__).with_name('spurious_world.py')}:SpuriousWorld"
DEADLINE_S = 300.0


def _attempts(count: int, *, is_spurious: bool) -> list[LabelledAttempt]:
    """Right and wrong answers; where it is spurious, who is right says please, and nobody else does."""
    found: list[LabelledAttempt] = []
    rng = random.Random(0)
    for number, task in enumerate(SpuriousWorld().tasks("train", count, 0)):
        is_right = number % 2 == 0
        others = [colour for colour in COLOURS if colour != task.data["colour"]]
        colour = task.data["colour"] if is_right else rng.choice(others)
        please = " please" if (is_right if is_spurious else rng.random() < 0.5) else ""
        messages = (question(task), assistant(f"take {colour}{please}"))
        found.append(LabelledAttempt(world="spurious", task_id=task.id, messages=messages, label=is_right))
    return found


def _train(tmp_path: Path, **options: object) -> OrmResult:
    write_labelled(tmp_path / "data.jsonl", _attempts(240, is_spurious=True))
    config = OrmConfig(model="tiny", **{"steps": 40, "batch_size": 16, "learning_rate": 3e-3, **options})  # type: ignore[arg-type]
    return train_outcome_model([tmp_path / "data.jsonl"], tmp_path / "orm", config)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rl_on_an_outcome_model_with_a_shortcut_is_caught_by_the_alarm(tmp_path: Path) -> None:
    """The model learned that who says please is right. The policy learns to say please, and is right no more often."""
    result = _train(tmp_path)
    assert result.quality.accuracy > 0.9, "on its own data it looks excellent"
    report = json.loads((result.directory / "report.json").read_text())
    assert report["by_world"]["spurious"]["f1"] > 0.9
    assert (result.directory / "calibration.svg").read_text().startswith("<svg")
    run = tw.train(
        WORLD,
        model={"name": "tiny", "rank": 16},
        steps=30,
        directory=tmp_path / "run",
        reward={"model": str(result.directory), "weights": {"outcome": 0.0}},
        rollout={"group_size": 8},
        train={"tasks_per_step": 8, "learning_rate": 3e-3},
        warmup={"steps": 60, "batch_size": 16, "learning_rate": 5e-3},
        eval={"tasks": 0},
        alarms={"min_outcome_agreement": 0.5},
        observer=tw.Observer(),
    )
    metrics = run.metrics
    scores, agreement = metrics["rollout/env_outcome_score_mean"], metrics["rollout/env_outcome_agreement_mean"]
    assert np.mean(scores[-3:]) > np.mean(scores[:3]) + 0.2, "the policy has found what the model rewards"
    assert np.mean(agreement[-3:]) < np.mean(agreement[:3]) - 0.1
    with RunReader(run.directory) as reader:
        alarms = [event for event in reader.events("alarm") if event.detail.get("name") == "outcome_model"]
    assert alarms, "the alarm tells that outcome model and verifier have parted"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_classifier_that_is_killed_ends_with_the_weights_of_one_that_nobody_touched(tmp_path: Path) -> None:
    plain = _train(tmp_path, save_every=4)
    command = ["orm", "train", str(tmp_path / "data.jsonl")]
    command += ["--out", str(tmp_path / "killed"), "model=tiny", "steps=40", "batch_size=16", "learning_rate=3e-3"]
    command += ["save_every=4"]
    process = start_cli(*command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + DEADLINE_S
    while not (tmp_path / "killed" / "progress.json").is_file() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    step = json.loads((tmp_path / "killed" / "progress.json").read_text())["step"]
    assert 4 <= step < 40, "it was killed on the way"
    run_module("turnwise.cli", *command)
    ours, theirs = (_weights(tmp_path / name) for name in ("killed", "orm"))
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    progress = [json.loads((tmp_path / name / "progress.json").read_text()) for name in ("killed", "orm")]
    assert progress[0]["losses"] == progress[1]["losses"]
    assert len(progress[0]["losses"]) == 40
    report = json.loads((tmp_path / "killed" / "report.json").read_text())
    assert report == json.loads(json.dumps(plain.quality.to_json()))


def _weights(directory: Path) -> dict[str, np.ndarray]:
    info = json.loads((directory / "orm.json").read_text())
    return load_file(directory / info["checkpoint"] / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_generative_verifier_writes_a_reason_and_a_verdict_that_beat_chance(tmp_path: Path) -> None:
    result = _train(
        tmp_path, kind="generative", steps=150, rl_steps=4, rl_learning_rate=5e-4, learning_rate=5e-3, rank=32
    )
    assert result.quality.accuracy > 0.7
    run = tw.Run.open(result.directory / "run")
    assert run.state == "finished"
    assert len(run.metrics["step"]) == 4, "RL on the verdict's correctness"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_generative_verifier_that_is_killed_in_its_rl_goes_on_with_nothing_lost_or_doubled(tmp_path: Path) -> None:
    write_labelled(tmp_path / "data.jsonl", _attempts(60, is_spurious=True))
    out = tmp_path / "orm"
    command = ["orm", "train", str(tmp_path / "data.jsonl"), "--out", str(out), "kind=generative", "model=tiny"]
    command += ["steps=4", "batch_size=4", "rl_steps=4", "save_every=1", "num_votes=1"]
    process = start_cli(*command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + DEADLINE_S
    while _num_steps(out / "run") < 2 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert 2 <= _num_steps(out / "run") < 4, "it was killed on the way"
    assert not (out / "orm.json").exists()
    run_module("turnwise.cli", *command)
    with RunReader(out / "run") as run:
        assert learned_attempts(run) == expected_attempts(run)
        assert [step for step, _ in run.metric("time/step_s")] == [1, 2, 3, 4]
        assert [row.step for row in run.checkpoints()][-1] == 4
    report = json.loads((out / "report.json").read_text())
    assert report["count"] == sum(one.split == "test" for one in _attempts(60, is_spurious=True))


def _num_steps(directory: Path) -> int:
    if not is_run(directory):
        return 0
    with RunReader(directory) as run:
        return len(run.metric("time/step_s"))
