"""Learning rates over a run: the formulas, and that every step of a real loop is given its own."""

from __future__ import annotations

import math

import pytest

from turnwise.config.training import TrainConfig
from turnwise.errors import ConfigError
from turnwise.runlog.schema import CheckpointRow
from turnwise.training.checkpoint import Start
from turnwise.training.progress import rate_factor
from unit.training.conftest import MakeRig, Rig


def test_schedules_follow_their_formulas() -> None:
    def factors(**options: object) -> list[float]:
        train = TrainConfig.model_validate({"steps": 4, **options})
        return [rate_factor(train, step, 0) for step in range(4)]

    assert factors() == [1, 1, 1, 1]
    assert factors(lr_schedule="linear") == pytest.approx([1, 0.75, 0.5, 0.25])
    assert factors(lr_schedule="linear", lr_floor=0.2) == pytest.approx([1, 0.8, 0.6, 0.4])
    cosine = [(1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    assert factors(lr_schedule="cosine") == pytest.approx(cosine)
    assert factors(lr_schedule="cosine", lr_floor=0.1) == pytest.approx([0.1 + 0.9 * share for share in cosine])
    assert factors(lr_warmup=2) == pytest.approx([0.5, 1, 1, 1])
    assert factors(lr_warmup=2, lr_schedule="linear") == pytest.approx([0.5, 0.75, 0.5, 0.25])


def test_a_bound_on_tokens_ends_the_schedule_where_it_ends_the_run() -> None:
    train = TrainConfig(steps=1_000_000, max_sampled_tokens=1000, lr_schedule="linear")
    assert [rate_factor(train, 3, drawn) for drawn in (0, 250, 1000, 1200)] == pytest.approx([1, 0.75, 0, 0], abs=1e-5)
    steps_first = TrainConfig(steps=4, max_sampled_tokens=1000, lr_schedule="linear")
    assert rate_factor(steps_first, 2, 10) == pytest.approx(0.5)


def test_options_that_nothing_would_read_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"lr_floor=0.1 is not read by lr_schedule=constant"):
        TrainConfig(lr_floor=0.1)
    with pytest.raises(ConfigError, match=r"accumulate=2 .* substeps=2"):
        TrainConfig(accumulate=2, substeps=2)


def _rates(rig: Rig) -> list[float]:
    calls = [call for call in rig.trainer.calls if call.method == "optim_step"]
    return [call.arguments["adam_params"].learning_rate for call in calls]


async def test_every_step_of_a_run_and_of_one_that_goes_on_has_the_rate_of_its_number(make_rig: MakeRig) -> None:
    sections = {"train": {"steps": 4, "learning_rate": 1e-3, "lr_schedule": "linear"}, "eval": {"tasks": 0}}
    rig = make_rig(sections)
    await rig.loop().run()
    assert _rates(rig) == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    again = make_rig(sections)
    again.directory = rig.directory.with_name("resumed")
    await again.loop().run(Start(done=CheckpointRow(step=2, warmup_steps=0, path="tinker://x/weights/y")))
    assert _rates(again) == pytest.approx([5e-4, 2.5e-4])


def test_tokens_of_a_critics_pre_training_leave_the_schedule_at_its_beginning() -> None:
    train = TrainConfig(steps=1_000_000, max_sampled_tokens=30_000, lr_schedule="linear")
    assert rate_factor(train, 0, 12_000, 12_000) == 1
    assert rate_factor(train, 5, 21_000, 12_000) == pytest.approx(0.5, abs=1e-4)
    assert rate_factor(train, 9, 30_000, 12_000) == pytest.approx(0)
