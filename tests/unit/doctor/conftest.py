"""Runs that are written by hand: a healthy one, in which a test changes what it is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from turnwise.config.files import config_to_yaml, load_config
from turnwise.doctor import diagnose
from turnwise.runlog.schema import AttemptRecord, EvaluationRow
from turnwise.runlog.writer import RunWriter
from turnwise.trajectory import EndReason, Message, Trajectory, Turn

Metrics = dict[str, float]


def make_turn(text: str = "8", *, ids: Sequence[int] = (5, 6), reward: float = 0.0, **more: Any) -> Turn:
    fields: dict[str, Any] = {
        "prompt_ids": (1, 2, 3),
        "sampled_ids": tuple(ids),
        "sampler_logprobs": (-0.5,) * len(ids),
        "policy_version": 0,
        "reply": Message(role="assistant", content=text),
        "observation": (Message(role="user", content="Higher."),),
        "reward_parts": {"outcome": reward},
    }
    return Turn(**{**fields, **more})


def make_attempt(*turns: Turn, attempt: int = 0, task: str = "t", is_success: bool | None = None) -> Trajectory:
    turns = turns or (make_turn(ids=(5, attempt + 7)),)
    return Trajectory(
        task_id=task, attempt=attempt, seed=3, turns=turns, end_reason=EndReason.TERMINATED, is_success=is_success
    )


class WrittenRun:
    """A run of ten steps whose success rises; every part can be replaced before `names` reads it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.overrides: list[str] = []
        self.steps: list[Metrics] = [
            {
                "time/step_s": 1.0,
                "rollout/attempts": 16.0,
                "rollout/tries": 16.0,
                "rollout/groups_kept": 4.0,
                "rollout/success_mean": 0.3 + 0.04 * step,
                "rollout/reward_mean": 0.3 + 0.04 * step,
                "rollout/entropy_estimate": 1.0 - 0.02 * step,
                "method/groups_trained": 3.0,
                "method/groups_dropped_constant": 1.0,
                "train/grad_norm": 0.3,
                "train/learning_rate": 3e-4,
                "train/loss": 0.1,
            }
            for step in range(10)
        ]
        half = [make_attempt(make_turn(ids=(5, i), reward=i % 2), attempt=i, is_success=i % 2 == 1) for i in range(16)]
        self.attempts: list[Trajectory] = half
        self.failed: list[Trajectory] = []
        self.evaluations: list[EvaluationRow] = []

    def set(self, **values: float | Sequence[float]) -> None:
        """Give a metric, with __ for the slash, one value in all steps, or a value for each; success earns reward."""
        if "rollout__success_mean" in values:
            values.setdefault("rollout__reward_mean", values["rollout__success_mean"])
        for name, value in values.items():
            for index, step in enumerate(self.steps):
                step[name.replace("__", "/")] = value if isinstance(value, int | float) else value[index]

    def evaluation(self, label: str, step: int, success: float, *, width: float = 0.05, num_failed: int = 0) -> None:
        low, high = success - width, success + width
        numbers: Any = {"success": success, "success_low": low, "success_high": high}
        rewards: Any = {"reward": success, "reward_low": low, "reward_high": high}
        counts = {"num_tasks": 64, "num_attempts": 64 - num_failed, "num_failed": num_failed}
        self.evaluations.append(EvaluationRow(step=step, label=label, **counts, **numbers, **rewards))

    def write(self) -> Path:
        config = load_config("guess_number", ["model=tiny", "warmup.steps=0", *self.overrides])
        writer = RunWriter.create(self.directory, config_to_yaml(config), max_size_mb=64)
        for number, metrics in enumerate(self.steps, start=1):
            writer.metrics(number, metrics)
        last = len(self.steps)
        writer.attempts(last, "train", [AttemptRecord(trajectory=one, outcome="trained") for one in self.attempts])
        writer.attempts(last, "train", [AttemptRecord(trajectory=one, outcome="failed") for one in self.failed])
        for row in self.evaluations:
            writer.evaluation(row)
        writer.commit(last)
        writer.close()
        return self.directory

    @property
    def names(self) -> list[str]:
        """Write the run, and name what is found in it."""
        return [finding.name for finding in diagnose(self.write())]


@pytest.fixture
def run(tmp_path: Path) -> WrittenRun:
    return WrittenRun(tmp_path / "run")


@pytest.fixture
def new_run(tmp_path: Path) -> Callable[[], WrittenRun]:
    """More than one run in a test."""
    count = iter(range(1000))
    return lambda: WrittenRun(tmp_path / f"run-{next(count)}")
