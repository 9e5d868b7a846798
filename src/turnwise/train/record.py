"""Writes down what happens in a run: to the run directory, the loggers and the view."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from turnwise.envs.base import Task
from turnwise.methods.base import Kept, Lesson
from turnwise.rollout.group import RolloutResult
from turnwise.runlog.schema import Attempt
from turnwise.runlog.writer import RunWriter
from turnwise.train.evaluate import Evaluation
from turnwise.train.loggers import MetricLogger
from turnwise.train.metrics import Learned
from turnwise.train.view import View
from turnwise.types import TensorData


class Recorder:
    """The one place that the loop reports to."""

    def __init__(self, writer: RunWriter, view: View, loggers: Sequence[MetricLogger], *, num_steps: int) -> None:
        self.writer = writer
        self.view = view
        self._loggers = loggers
        self._num_steps = num_steps

    def tasks(self, tasks: Iterable[Task], split: str) -> None:
        for task in tasks:
            self.writer.task(task.id, split, task.data)

    def warmup(self, warmup_step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        self.writer.metrics(warmup_step, metrics)
        self.writer.commit(0)
        self.view.warmup(warmup_step, num_steps, metrics)

    def evaluation(self, evaluation: Evaluation) -> None:
        row = evaluation.row
        self.writer.evaluation(row)
        self.writer.attempts(row.step, "eval", _played_attempts(evaluation.played))
        values = {"eval/success": row.success, "eval/reward": row.reward, "eval/failed_attempts": float(row.num_failed)}
        self.writer.metrics(row.step, values)
        self._log(row.step, values)
        self.writer.commit(row.step)
        self.view.evaluation(row)

    def step(
        self, step: int, played: RolloutResult, kept: Kept, learned: Sequence[Learned], metrics: Mapping[str, float]
    ) -> None:
        """One step of training; `step` counts from 1."""
        self.writer.metrics(step, metrics)
        self.writer.attempts(step, "train", _trained_attempts(learned))
        self.writer.attempts(step, "train", _dropped_attempts(played, kept))
        self._log(step, metrics)
        self.writer.commit(step)
        self.view.step(step, self._num_steps, metrics)

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()
        self.view.close()
        self.writer.close()

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        for logger in self._loggers:
            logger.log(step, values)


def logprobs_by_turn(
    lesson: Lesson, outputs: Sequence[Mapping[str, TensorData]]
) -> tuple[NDArray[np.float32] | None, ...]:
    """[S] per trained turn what the trainer gave its tokens: a lesson's datums hold them in the order of turns."""
    known: list[NDArray[np.float32]] = [np.zeros(0, np.float32)]
    for datum, output in zip(lesson.datums, outputs, strict=True):
        is_trained = datum.loss_fn_inputs["mask"].to_numpy() > 0
        known.append(output["logprobs"].to_numpy().astype(np.float32)[is_trained])
    rest = np.concatenate(known)
    found: list[NDArray[np.float32] | None] = []
    for turn in lesson.trajectory.turns:
        length = len(turn.sampled_ids) if turn.is_trained else 0
        found.append(rest[:length] if turn.is_trained else None)
        rest = rest[length:]
    assert not len(rest), "datums train tokens that no turn sampled"
    return tuple(found)


def _trained_attempts(learned: Sequence[Learned]) -> Iterator[Attempt]:
    for step in learned:
        outputs = iter(step.output.loss_fn_outputs)
        for lesson in step.lessons:
            own = [next(outputs) for _ in lesson.datums]
            yield Attempt(
                trajectory=lesson.trajectory,
                outcome="trained",
                advantages=lesson.advantages,
                trainer_logprobs=logprobs_by_turn(lesson, own),
            )


def _dropped_attempts(played: RolloutResult, kept: Kept) -> Iterator[Attempt]:
    for group, reason in zip(played.groups, kept.reasons, strict=True):
        if reason is not None:
            yield from (Attempt(trajectory=trajectory, outcome=reason) for trajectory in group.trajectories)
        yield from (Attempt(trajectory=trajectory, outcome="failed") for trajectory in group.failed)
    for dropped in played.dropped:
        yield from (Attempt(trajectory=trajectory, outcome=dropped.why) for trajectory in dropped.trajectories)
        yield from (Attempt(trajectory=trajectory, outcome="failed") for trajectory in dropped.failed)


def _played_attempts(played: RolloutResult) -> Iterator[Attempt]:
    for group in (*played.groups, *played.dropped):
        yield from (Attempt(trajectory=trajectory, outcome="evaluated") for trajectory in group.trajectories)
        yield from (Attempt(trajectory=trajectory, outcome="failed") for trajectory in group.failed)
