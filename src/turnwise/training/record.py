"""Writes down what happens in a run: into the run directory, and to the observers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from turnwise.config.config import Config
from turnwise.config.files import config_to_yaml
from turnwise.doctor import Finding, finding_lines
from turnwise.doctor.diagnose import FINDING_EVENT
from turnwise.envs.base import Task
from turnwise.errors import AttemptFailed
from turnwise.methods.base import Kept
from turnwise.rollout.certify import Certificate
from turnwise.rollout.drift import WorstToken
from turnwise.rollout.group import RolloutResult
from turnwise.runlog.schema import AttemptRecord, CheckpointRow, EvaluationRow, Phase
from turnwise.runlog.writer import RunWriter
from turnwise.training.evaluate import Evaluation
from turnwise.training.metrics import Learned, logprobs_by_turn
from turnwise.training.supply import Batch, Taken
from turnwise.trajectory import Trajectory
from turnwise.watch.alarms import Alarm
from turnwise.watch.observer import Observer, Observers

MAX_TOLD = 2
"""Findings that are told while a run goes on; `turnwise doctor` tells all of them."""


class Recorder:
    """The one place that the loop reports to."""

    def __init__(self, writer: RunWriter, observers: Sequence[Observer], *, num_steps: int) -> None:
        self.writer = writer
        self.observers = Observers(observers)
        self._num_steps = num_steps
        self.phase_name = "starting"
        self._largest_gap = 0.0

    def phase(self, name: str) -> None:
        """What is going on now."""
        self.phase_name = name
        self.observers.phase(name)

    def tasks(self, tasks: Iterable[Task], split: str) -> None:
        for task in tasks:
            self.writer.task(task.id, split, task.data)

    def warmup(self, warmup_step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        self.writer.metrics(warmup_step, metrics)
        self.writer.commit(0)
        self.observers.warmup(warmup_step, num_steps, metrics)

    def critic(self, batch: int, num_batches: int, metrics: Mapping[str, float]) -> None:
        """One batch of the critic's pre-training; `batch` counts from 1."""
        named = {f"critic/{key}": value for key, value in metrics.items()}
        self.writer.metrics(batch, named)
        self.writer.commit(0)
        self.observers.critic(batch, num_batches, named)

    def evaluation(self, evaluation: Evaluation) -> None:
        row = evaluation.row
        self.writer.evaluation(row)
        self._attempts(row.step, "eval", _played_attempts(evaluation.played))
        values = {"eval/success": row.success, "eval/reward": row.reward, "eval/failed_attempts": float(row.num_failed)}
        self.writer.metrics(row.step, values)
        self.observers.metrics(row.step, values)
        self.writer.commit(row.step)
        self.observers.evaluation(row)

    def checkpoint(self, row: CheckpointRow) -> None:
        """A checkpoint is on record; `RunCheckpoints.save` wrote it."""
        self.observers.checkpoint(row)

    def worlds(self, rows: Mapping[str, EvaluationRow]) -> None:
        """Say what an evaluation in several worlds gave in each."""
        for name, row in rows.items():
            measured = f"reward {row.reward:.3f}" if math.isnan(row.success) else f"success {row.success:.1%}"
            self.observers.message(f"  {name}: {measured}, {row.num_attempts} attempts at {row.num_tasks} tasks")

    def held_out_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of an evaluation besides its row: the critic's errors, rewards by opponent. They replace those that
        `step` had."""
        self.writer.metrics(step, metrics)
        self.observers.metrics(step, metrics)
        self.writer.commit(step)

    def step(
        self,
        step: int,
        batch: Batch,
        learned: Sequence[Learned],
        metrics: Mapping[str, float],
        certificate: Certificate | None,
    ) -> None:
        """One step of training; `step` counts from 1."""
        self.writer.metrics(step, metrics)
        played = {_key(one): one for group in batch.as_played for one in group.trajectories}
        self._attempts(step, "train", _trained_attempts(learned, played))
        self._attempts(step, "train", _dropped_attempts(batch.played, batch.kept, played))
        self._attempts(step, "train", _left_attempts(batch.kept, learned, played))
        if batch.taken is not None:
            self._attempts(step, "train", _stale_attempts(batch.taken))
        if certificate is not None:
            self.writer.certificate(step, certificate.to_json(), is_exact=certificate.is_exact)
        self.observers.metrics(step, metrics)
        self.writer.commit(step)
        self.observers.step(step, self._num_steps, metrics)

    def alarm(self, step: int, alarm: Alarm) -> None:
        """A number left its band, or came back."""
        kind = "alarm_over" if alarm.is_over else "alarm"
        self.writer.event(step, kind, name=alarm.name, value=alarm.value, bound=alarm.bound, text=str(alarm))
        self.writer.commit(step)
        self.observers.message(f"step {step}: {alarm}")

    def worst_token(self, step: int, worst: WorstToken | None) -> None:
        """Note where sampler and trainer disagree most, each time that it is worse than before in this process."""
        if worst is None or abs(worst.gap) <= self._largest_gap:
            return
        self._largest_gap = abs(worst.gap)
        self.writer.event(step, "worst_token", gap=abs(worst.gap), text=str(worst))
        self.writer.commit(step)

    def first_failure(self, step: int, error: AttemptFailed) -> None:
        """A party failed an attempt for the first time in this process."""
        self.writer.event(step, "first_failure", party=str(error.party), detail=error.detail)
        self.writer.commit(step)
        self.observers.message(f"first failure by {error.party}: {error.detail}; failed attempts are not scored")

    def opponent_lost(self, step: int, why: str) -> None:
        """An opponent of the pool could not be loaded again, and is left out."""
        self.writer.event(step, "opponent_lost", why=why)
        self.writer.commit(step)
        self.observers.message(f"warning: {why}")

    def learners_changed(self, step: int, text: str) -> None:
        """A learner process was lost; it was started again, or the run goes on with fewer."""
        self.writer.event(step, "learners_changed", text=text)
        self.writer.commit(step)
        self.observers.message(f"warning: {text}")

    def findings(self, step: int, findings: Sequence[Finding]) -> None:
        """Why a step had nothing to learn from; a reader of the run comes to the same findings."""
        if findings:
            self.observers.message("\n".join([f"step {step} had no signal:", *finding_lines(findings[:MAX_TOLD])]))

    def finding(self, finding: Finding) -> None:
        """Something that was found before the first step. It is kept, because nobody could find it later."""
        self.writer.event(0, FINDING_EVENT, **finding.to_json())
        self.writer.commit(0)
        self.observers.message("\n".join(["before the first step:", *finding.lines()]))

    def not_moved(self, step: int, why: str) -> None:
        """The run ends, and no step of it moved the weights."""
        self.writer.event(step, "not_moved", why=why)
        self.writer.commit(step)
        self.observers.message(f"step {step}: no step moved the weights: {why}")

    def steered(self, step: int, config: Config, name: str, value: float) -> None:
        """A setting was changed from outside; a run that goes on later has it too."""
        self._num_steps = config.train.steps
        self.writer.set_meta("config", config_to_yaml(config))
        self.writer.event(step, "steered", setting=name, value=value)
        self.writer.commit(step)
        self.observers.message(f"step {step}: {name} is {value:g} from here on")

    def solved(self, step: int, num_steps: int) -> None:
        """The run ends before its last step, because nothing is left to learn."""
        self.writer.event(step, "solved", steps=num_steps)
        self.writer.commit(step)
        self.observers.message(
            f"step {step}: solved, every attempt of the last {num_steps} steps succeeded; training ends here"
        )

    def tokens_spent(self, step: int, num_steps: int, num_drawn: int, bound: int) -> None:
        """The run ends before its last step, because it may sample no more tokens."""
        self.writer.event(step, "tokens_spent", steps=num_steps, sampled_tokens=num_drawn, bound=bound)
        self.writer.commit(step)
        said = f"{num_drawn:,} tokens are sampled, train.max_sampled_tokens={bound}"
        self.observers.message(f"step {step} of {num_steps}: {said}; training ends here")

    def left_over(self, step: int, num_tokens: int) -> None:
        """The tokens of groups that were played ahead, and that no step came to learn from."""
        self.writer.metrics(step, {"pool/tokens_drawn": float(num_tokens)})
        self.writer.commit(step)

    def close(self) -> None:
        self.observers.close()
        self.writer.close()

    def _attempts(self, step: int, phase: Phase, attempts: Iterable[AttemptRecord]) -> None:
        """Write attempts down and tell the observers, one by one: they are made while they are written."""

        def told() -> Iterator[AttemptRecord]:
            for attempt in attempts:
                yield attempt
                self.observers.attempt(step, phase, attempt)

        self.writer.attempts(step, phase, told())


_Key = tuple[str, int, int]
_Played = Mapping[_Key, Trajectory]
"""Attempts as they were played; methods learn from copies with shaped rewards and a mask of their own."""


def _trained_attempts(learned: Sequence[Learned], played: _Played) -> Iterator[AttemptRecord]:
    for step in learned:
        outputs = iter(step.output.loss_fn_outputs)
        for lesson in step.lessons:
            own = [next(outputs) for _ in lesson.datums]
            if lesson.trajectory is None:
                continue
            yield AttemptRecord(
                trajectory=played[_key(lesson.trajectory)],
                credited=lesson.trajectory,
                outcome="trained",
                advantages=lesson.advantages,
                trainer_logprobs=logprobs_by_turn(lesson, own),
                critic_values=None if lesson.values is None else lesson.values.turns,
            )


def _left_attempts(kept: Kept, learned: Sequence[Learned], played: _Played) -> Iterator[AttemptRecord]:
    """Attempts of groups that were kept, which the method itself left aside."""
    taken = {_key(lesson.trajectory) for step in learned for lesson in step.lessons if lesson.trajectory is not None}
    for group in kept.groups:
        for trajectory in group.trajectories:
            if _key(trajectory) not in taken:
                yield AttemptRecord(trajectory=played[_key(trajectory)], credited=trajectory, outcome="left")


def _key(trajectory: Trajectory) -> _Key:
    return trajectory.task_id, trajectory.attempt, trajectory.seed


def _dropped_attempts(shaped: RolloutResult, kept: Kept, played: _Played) -> Iterator[AttemptRecord]:
    for group, reason in zip(shaped.groups, kept.reasons, strict=True):
        if reason is not None:
            yield from (
                AttemptRecord(trajectory=played[_key(t)], credited=t, outcome=reason) for t in group.trajectories
            )
        yield from (AttemptRecord(trajectory=trajectory, outcome="failed") for trajectory in group.failed)
    for dropped in shaped.dropped:
        yield from (AttemptRecord(trajectory=trajectory, outcome=dropped.why) for trajectory in dropped.trajectories)
        yield from (AttemptRecord(trajectory=trajectory, outcome="failed") for trajectory in dropped.failed)


def _stale_attempts(taken: Taken) -> Iterator[AttemptRecord]:
    """Attempts of groups that nobody learns from because they grew too old."""
    for entry in taken.stale:
        assert entry.outcome is not None, "it was judged by its age"
        yield from (AttemptRecord(trajectory=trajectory, outcome="stale") for trajectory in entry.outcome.trajectories)
        yield from (AttemptRecord(trajectory=trajectory, outcome="failed") for trajectory in entry.outcome.failed)


def _played_attempts(played: RolloutResult) -> Iterator[AttemptRecord]:
    for group in (*played.groups, *played.dropped):
        yield from (AttemptRecord(trajectory=trajectory, outcome="evaluated") for trajectory in group.trajectories)
        yield from (AttemptRecord(trajectory=trajectory, outcome="failed") for trajectory in group.failed)
