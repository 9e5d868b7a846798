"""Held-out tasks, played and never trained on. The same tasks and seeds every time, so that evaluations compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.envs.base import Task
from turnwise.errors import TurnwiseError
from turnwise.rollout.group import Rollout, RolloutResult
from turnwise.rollout.seeds import derive_seed
from turnwise.rollout.stats import FirstFailures
from turnwise.runlog.schema import EvaluationRow
from turnwise.trajectory import TrajectoryGroup
from turnwise.watch.intervals import NOT_MEASURED, mean_interval, success_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What was played and what came out."""

    row: EvaluationRow
    played: RolloutResult


class EvaluationFailedError(TurnwiseError):
    """Not one attempt of an evaluation was judged."""


async def evaluate(rollout: Rollout, tasks: Sequence[Task], *, seed: int, label: str, step: int) -> Evaluation:
    """`play_evaluation` for somebody who wants a number: an evaluation in which every attempt failed has none."""
    rollout.stats.failures = failures = FirstFailures()
    evaluation = await play_evaluation(rollout, tasks, seed=seed, label=label, step=step)
    if failures.first is not None and not evaluation.row.num_attempts:
        raise EvaluationFailedError(
            f"all {evaluation.row.num_failed} attempts of the evaluation failed, so there is no result; the first "
            f"time by {failures.first.party}: {failures.first.detail}"
        ) from failures.first
    return evaluation


async def play_evaluation(rollout: Rollout, tasks: Sequence[Task], *, seed: int, label: str, step: int) -> Evaluation:
    """Play every task `rollout.config.group_size` times. Failed attempts are counted and not scored."""
    played = await rollout.play(tasks, seed=derive_seed(seed, "eval"))
    return Evaluation(row=summarize(played, label=label, step=step), played=played)


def summarize(played: RolloutResult, *, label: str, step: int) -> EvaluationRow:
    outcomes = _outcomes(played.groups)
    success = NOT_MEASURED if outcomes is None else success_interval(outcomes)
    reward = mean_interval([group.rewards for group in played.groups])
    failed = [len(group.failed) for group in (*played.groups, *played.dropped)]
    return EvaluationRow(
        step=step,
        label=label,
        num_tasks=len(played.groups),
        num_attempts=sum(len(group.trajectories) for group in played.groups),
        num_failed=sum(failed),
        success=success.value,
        success_low=success.low,
        success_high=success.high,
        reward=reward.value,
        reward_low=reward.low,
        reward_high=reward.high,
    )


def _outcomes(groups: Sequence[TrajectoryGroup]) -> list[list[bool]] | None:
    """By task; None when the env never says. An attempt that a limit cut short did not succeed."""
    if all(t.is_success is None for group in groups for t in group.trajectories):
        return None
    return [[t.is_success is True for t in group.trajectories if t.is_judged] for group in groups]
