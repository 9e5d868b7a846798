"""What a run wrote down, as the diagnoses read it: cached, bounded, and never changed."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cached_property
from statistics import fmean

from turnwise.config.config import Config
from turnwise.config.files import config_from_yaml
from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import AttemptRow, EvaluationRow, Event, StoredAttempt
from turnwise.trajectory import Failure, Trajectory

RECENT_STEPS = 10
"""The last steps, whose numbers say how a run is now."""
MIN_SAMPLE = 64
MAX_SAMPLE = 192
"""Attempts that are read whole: those of the last steps until there are MIN_SAMPLE, and never more than MAX_SAMPLE."""


class RunHistory:
    """One run, finished or under way. Create another one to see later steps."""

    def __init__(self, run: RunReader) -> None:
        self._run = run
        self._metrics: dict[str, list[tuple[int, float]]] = {}

    @cached_property
    def config(self) -> Config:
        return config_from_yaml(self._run.config_yaml, str(self._run.directory))

    @cached_property
    def metric_names(self) -> list[str]:
        return self._run.metric_names()

    def metric(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric; steps in which it was not finite are there too."""
        if name not in self._metrics:
            self._metrics[name] = self._run.metric(name)
        return self._metrics[name]

    def values(self, name: str, last: int = 0) -> list[float]:
        """The finite values of a metric, all or those of its last steps."""
        return [value for _, value in self.metric(name)[-last:] if math.isfinite(value)]

    def recent(self, name: str) -> float | None:
        """Mean of a metric over the last steps of the run; None if none of them measured it."""
        first = self.steps[-RECENT_STEPS:][0] if self.steps else 0
        values = [value for step, value in self.metric(name) if step >= first and math.isfinite(value)]
        return fmean(values) if values else None

    def recent_sum(self, name: str) -> float:
        """Sum of a count over the last steps of the run; 0 if none of them counted it."""
        first = self.steps[-RECENT_STEPS:][0] if self.steps else 0
        return sum(value for step, value in self.metric(name) if step >= first and math.isfinite(value))

    @cached_property
    def steps(self) -> list[int]:
        """The steps of training that are done."""
        return [step for step, _ in self.metric("time/step_s")]

    @cached_property
    def by_step(self) -> list[dict[str, float]]:
        """All metrics of each step of training, in order."""
        found: dict[int, dict[str, float]] = {step: {} for step in self.steps}
        for name in self.metric_names:
            if not name.startswith(("warmup/", "critic/")):
                for step, value in self.metric(name):
                    if step in found:
                        found[step][name] = value
        return list(found.values())

    @cached_property
    def success(self) -> float | None:
        """Mean success of the last steps, or of the last evaluation if no step was played; None if it is not judged."""
        judged = self.recent("rollout/success_mean")
        if judged is None and self.evaluations and not self.steps:
            last = self.evaluations[-1].success
            return last if math.isfinite(last) else None
        return judged

    @property
    def is_solving(self) -> bool:
        """The policy does well in the very last steps, so that nothing has to be explained."""
        last = self.values("rollout/success_mean", last=3)
        return bool(last) and fmean(last) >= 0.9

    @cached_property
    def evaluations(self) -> list[EvaluationRow]:
        return self._run.evaluations()

    def events(self, kind: str) -> list[Event]:
        return self._run.events(kind)

    @property
    def has_inexact_certificate(self) -> bool:
        return any(not row.is_exact for row in self._run.certificates())

    @cached_property
    def sample(self) -> list[StoredAttempt]:
        """Attempts of the last steps, whole; of the last evaluation if none was played for training."""
        for phase in ("train", "eval"):
            rows = [row for row in self._run.attempts(phase=phase) if row.has_tokens and row.outcome != "failed"]
            steps = sorted({row.step for row in rows}, reverse=True)
            chosen: list[AttemptRow] = []
            for step in steps:
                chosen += [row for row in rows if row.step == step]
                if len(chosen) >= MIN_SAMPLE:
                    break
            if chosen:
                return [self._run.attempt(row.id) for row in chosen[:MAX_SAMPLE]]
        return []

    @cached_property
    def trajectories(self) -> list[Trajectory]:
        return [one.trajectory for one in self.sample]

    @cached_property
    def groups(self) -> list[list[Trajectory]]:
        """The sampled attempts by step and task, without groups of one."""
        found: defaultdict[tuple[int, str, int], list[Trajectory]] = defaultdict(list)
        for one in self.sample:
            found[one.row.step, one.trajectory.task_id, one.trajectory.seed].append(one.trajectory)
        return [group for group in found.values() if len(group) > 1]

    def first_failure(self, party: str) -> Failure | None:
        """The first stored failure of a party, the first one with a traceback if there is one."""
        found: Failure | None = None
        for row in self._run.attempts():
            if row.outcome == "failed":
                failure = self._run.failure(row.id)
                if failure is not None and failure.party == party:
                    if failure.traceback:
                        return failure
                    found = found or failure
        return found
