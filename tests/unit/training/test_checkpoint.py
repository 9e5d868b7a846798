"""Which checkpoints of a run are kept, and which one a command takes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from turnwise.client.checkpoints import CheckpointStore
from turnwise.client.fake import RecordingTrainer, ScriptedSampler
from turnwise.config.config import Config
from turnwise.config.files import config_to_yaml
from turnwise.errors import CheckpointError
from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import EvaluationRow
from turnwise.runlog.writer import RunWriter
from turnwise.training.checkpoint import RunCheckpoints, Start, best_evaluation, choose_checkpoint
from turnwise.watch.intervals import success_interval


def _evaluation(step: int, success: float, *, reward: float = 0.0, label: str = "step") -> EvaluationRow:
    return EvaluationRow(
        step=step,
        label=label,
        num_tasks=4,
        num_attempts=4,
        num_failed=0,
        **dict.fromkeys(("success", "success_low", "success_high"), success),
        **dict.fromkeys(("reward", "reward_low", "reward_high"), reward),
    )


class _Run:
    """A run directory in which evaluations come out as told."""

    def __init__(self, directory: Path, config: Config | None = None) -> None:
        self.directory = directory
        self.writer = RunWriter.create(directory, config_to_yaml(config or Config()), max_size_mb=8)
        self.checkpoints = self.store()

    def store(self, best: EvaluationRow | None = None) -> RunCheckpoints:
        trainer = RecordingTrainer(ScriptedSampler(lambda _: [7]))
        start = Start(checkpoints=tuple(RunReader(self.directory).checkpoints()), best=best)
        return RunCheckpoints(trainer, self.writer, start, max_kept=2)

    async def evaluate(self, row: EvaluationRow) -> None:
        """What the loop does after an evaluation, with files that are really there."""
        self.writer.evaluation(row)
        self.writer.commit(row.step)
        if self.checkpoints.is_best(row):
            if not self.checkpoints.has(row.step):
                await self.save(row.step)
            await self.checkpoints.keep_best(row)

    async def save(self, step: int) -> None:
        row = await self.checkpoints.save(step, 0)
        CheckpointStore(self.directory).directory(row.path).mkdir(parents=True, exist_ok=True)

    def steps(self) -> list[int]:
        return [row.step for row in RunReader(self.directory).checkpoints()]

    def chosen(self, which: str = "best") -> int:
        return choose_checkpoint(RunReader(self.directory), which).row.step


async def test_the_best_checkpoint_outlives_later_worse_ones_and_is_the_one_that_commands_take(tmp_path: Path) -> None:
    run = _Run(tmp_path / "run")
    await run.evaluate(_evaluation(2, 0.5))
    await run.evaluate(_evaluation(4, 0.9))
    for step in (5, 6, 7, 8):
        await run.save(step)
        await run.evaluate(_evaluation(step, 0.6))
    assert run.steps() == [4, 7, 8]
    assert run.chosen() == 4
    assert run.chosen("last") == 8
    assert run.chosen("7") == 7
    assert "step 4, the best" in choose_checkpoint(RunReader(run.directory), "best").why
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5; there are: 4, 7, 8"):
        run.chosen("5")


async def test_of_equals_the_later_one_is_kept_and_the_base_model_never_is(tmp_path: Path) -> None:
    run = _Run(tmp_path / "run")
    await run.evaluate(_evaluation(0, 0.99, label="start"))
    assert run.steps() == []
    await run.evaluate(_evaluation(2, 0.5))
    await run.evaluate(_evaluation(4, 0.5))
    assert run.chosen() == 4


async def test_where_the_world_judges_no_success_the_reward_decides(tmp_path: Path) -> None:
    run = _Run(tmp_path / "run")
    await run.evaluate(_evaluation(2, math.nan, reward=0.7))
    await run.evaluate(_evaluation(4, math.nan, reward=0.4))
    await run.save(5)
    assert run.chosen() == 2


async def test_attempts_that_were_all_cut_short_are_no_success_whatever_they_earned(
    tmp_path: Path,
) -> None:
    """Points on the way are no success; a reward beside shares of success would be the best by far."""
    run = _Run(tmp_path / "run")
    await run.evaluate(_evaluation(2, math.nan, reward=7.0))
    assert run.chosen() == 2, "so far nobody knows that the world judges"
    await run.evaluate(_evaluation(4, 0.1, reward=3.0))
    await run.evaluate(_evaluation(6, math.nan, reward=7.0))
    for step in (7, 8, 9):
        await run.save(step)
    assert run.chosen() == 4
    rows = RunReader(run.directory).evaluations()
    assert [row.success for row in rows] == [0.0, 0.1, 0.0]
    assert rows[0].success_high == pytest.approx(success_interval([[False]] * 4).high)
    again = run.store(best_evaluation(RunReader(run.directory)))
    assert again.is_best(_evaluation(10, 0.1))
    assert not again.is_best(_evaluation(10, math.nan, reward=7.0))


async def test_a_run_that_goes_on_remembers_its_best_even_if_it_died_before_it_was_marked(tmp_path: Path) -> None:
    run = _Run(tmp_path / "run")
    await run.evaluate(_evaluation(2, 0.9))
    await run.save(4)
    run.writer.evaluation(_evaluation(4, 0.95))  # evaluated and saved, and then the process ended
    run.writer.commit(4)
    best = best_evaluation(RunReader(run.directory), up_to=4)
    assert best is not None
    assert (best.step, best.success) == (4, 0.95)
    run.checkpoints = run.store(best)
    for step in (6, 8, 10):
        await run.save(step)
    assert run.steps() == [4, 8, 10]
    earlier = best_evaluation(RunReader(run.directory), up_to=3)
    assert earlier is None, "the checkpoint of step 2 is gone by now"


async def test_a_run_that_keeps_no_best_is_taken_at_its_end(tmp_path: Path) -> None:
    run = _Run(tmp_path / "run", Config.model_validate({"eval": {"keep_best": False}}))
    await run.evaluate(_evaluation(2, 0.9))
    await run.save(4)
    await run.evaluate(_evaluation(4, 0.5))
    assert run.chosen() == 4


async def test_latest_and_best_are_links_that_move_with_the_run(tmp_path: Path) -> None:
    run = _Run(tmp_path / "run")
    await run.evaluate(_evaluation(2, 0.5))
    await run.evaluate(_evaluation(4, 0.9))
    await run.save(5)
    run.store(best=_evaluation(4, 0.9))
    moved = run.directory.rename(tmp_path / "moved")
    assert (moved / "latest").resolve() == next(moved.glob("checkpoints/*/*/step-000005"))
    assert (moved / "best").resolve() == next(moved.glob("checkpoints/*/*/step-000004"))
