"""Held-out tasks, played and never trained on. The same tasks and seeds every time, so that evaluations compare."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.envs.base import Task, World
from turnwise.envs.joint import SEPARATOR, JointWorld, leaf_of
from turnwise.errors import TurnwiseError
from turnwise.rollout.group import Rollout, RolloutResult
from turnwise.rollout.seeds import derive_seed
from turnwise.rollout.stats import FirstFailures, RolloutStats
from turnwise.runlog.schema import EvaluationRow
from turnwise.trajectory import TrajectoryGroup
from turnwise.watch.intervals import NOT_MEASURED, Interval, mean_interval, mean_of, success_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What was played and what came out."""

    row: EvaluationRow
    played: RolloutResult
    by_opponent: Mapping[str, EvaluationRow] = field(default_factory=dict[str, EvaluationRow])
    """The same for each opponent of a panel; empty where there is one opponent, or none."""
    by_world: Mapping[str, EvaluationRow] = field(default_factory=dict[str, EvaluationRow])
    """The same for each member of a mix, or each level of a curriculum: `doors`, `doors_level2`; else empty."""


class EvaluationFailedError(TurnwiseError):
    """Not one attempt of an evaluation was judged."""


async def evaluate(
    rollouts: Mapping[str, Rollout], tasks: Sequence[Task], *, seed: int, label: str, step: int
) -> Evaluation:
    """`play_panel` for a caller that needs a number: an evaluation in which every attempt failed has none."""
    failures = FirstFailures()
    for rollout in rollouts.values():
        rollout.stats.failures = failures
    evaluation = await play_panel(rollouts, tasks, seed=seed, label=label, step=step)
    if failures.first is not None and not evaluation.row.num_attempts:
        raise EvaluationFailedError(
            f"all {evaluation.row.num_failed} attempts of the evaluation failed, so there is no result; the first "
            f"time by {failures.first.party}: {failures.first.detail}"
        ) from failures.first
    return evaluation


async def play_panel(
    rollouts: Mapping[str, Rollout], tasks: Sequence[Task], *, seed: int, label: str, step: int
) -> Evaluation:
    """`play_evaluation` against each opponent of a panel, one after the other; the row is over all of them.

    If no game against one of them was judged, the row has no number: over the others it would not compare with other
    evaluations.
    """
    parts = {
        name: await play_evaluation(rollout, tasks, seed=seed, label=label, step=step)
        for name, rollout in rollouts.items()
    }
    if len(parts) == 1:
        return next(iter(parts.values()))
    played = RolloutResult(
        groups=tuple(group for part in parts.values() for group in part.played.groups),
        dropped=tuple(group for part in parts.values() for group in part.played.dropped),
        stats=RolloutStats.merged(part.played.stats for part in parts.values()),
    )
    rows = {name: part.row for name, part in parts.items()}
    row = summarize(played, label=label, step=step)
    if not all(one.num_attempts for one in rows.values()):
        row = replace(row, **_interval_columns(success=NOT_MEASURED, reward=NOT_MEASURED))
    return Evaluation(row=row, played=played, by_opponent=rows)


def metric_word(name: str) -> str:
    """An opponent's name as a part of a metric's name."""
    return re.sub(r"\W+", "_", name).strip("_")


def panel_metrics(evaluation: Evaluation) -> dict[str, float]:
    """The reward against each opponent of a panel."""
    return {f"opponent/eval_reward_{metric_word(name)}": row.reward for name, row in evaluation.by_opponent.items()}


async def play_evaluation(rollout: Rollout, tasks: Sequence[Task], *, seed: int, label: str, step: int) -> Evaluation:
    """Play every task `rollout.config.group_size` times. Failed attempts are counted and not scored."""
    played = await rollout.play(tasks, seed=derive_seed(seed, "eval"))
    rows = _rows_by_world(played, rollout.world, label=label, step=step)
    row = summarize(played, label=label, step=step)
    if isinstance(rollout.world, JointWorld) and rollout.world.kind == "world":
        row = _mean_row(row, [rows[name] for name in rollout.world.parts if name in rows])
    return Evaluation(row=row, played=played, by_world=rows)


def world_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Success and reward of each member of a mix, or each level of a curriculum."""
    found: dict[str, float] = {}
    for name, row in evaluation.by_world.items():
        found |= {f"world/eval_success_{name}": row.success, f"world/eval_reward_{name}": row.reward}
    return found


def _rows_by_world(played: RolloutResult, world: World, *, label: str, step: int) -> dict[str, EvaluationRow]:
    """One row for each member of a mix, and one for each level of it that was played."""
    found: dict[str, EvaluationRow] = {}
    leaf_by_task = {group.task_id: leaf_of(world, group.task_id) for group in (*played.groups, *played.dropped)}
    names = {part for leaf in leaf_by_task.values() for part in (leaf, leaf.partition(SEPARATOR)[0]) if part}
    for name in sorted(names):
        inside = {task for task, leaf in leaf_by_task.items() if leaf == name or leaf.startswith(f"{name}{SEPARATOR}")}
        own = RolloutResult(
            groups=tuple(group for group in played.groups if group.task_id in inside),
            dropped=tuple(group for group in played.dropped if group.task_id in inside),
            stats=played.stats,
        )
        found[name.replace(SEPARATOR, "_")] = summarize(own, label=label, step=step)
    return found


def _mean_row(row: EvaluationRow, rows: Sequence[EvaluationRow]) -> EvaluationRow:
    """The row of a mix: every world counts the same. One that judges no success has a reward only.

    A world in which all attempts failed leaves no number: a mean over the others does not compare with other means.
    """
    known = rows if all(one.num_attempts for one in rows) else ()
    success = mean_of([Interval(one.success, one.success_low, one.success_high) for one in known])
    reward = mean_of([Interval(one.reward, one.reward_low, one.reward_high) for one in known])
    return replace(row, **_interval_columns(success=success, reward=reward))


def summarize(played: RolloutResult, *, label: str, step: int) -> EvaluationRow:
    """The numbers of an evaluation, with intervals over tasks. A task that several opponents played is one task."""
    by_task: dict[str, list[TrajectoryGroup]] = {}
    for group in played.groups:
        by_task.setdefault(group.task_id, []).append(group)
    outcomes = _outcomes(by_task.values())
    success = NOT_MEASURED if outcomes is None else success_interval(outcomes)
    reward = mean_interval([[reward for group in own for reward in group.rewards] for own in by_task.values()])
    failed = [len(group.failed) for group in (*played.groups, *played.dropped)]
    return EvaluationRow(
        step=step,
        label=label,
        num_tasks=len(by_task),
        num_attempts=sum(len(group.trajectories) for group in played.groups),
        num_failed=sum(failed),
        **_interval_columns(success=success, reward=reward),
    )


def _interval_columns(**intervals: Interval) -> dict[str, Any]:
    """Each interval as the three columns of a row: `success`, `success_low` and `success_high`."""
    ends = {"": "value", "_low": "low", "_high": "high"}
    return {f"{name}{end}": getattr(one, part) for name, one in intervals.items() for end, part in ends.items()}


def _outcomes(tasks: Iterable[Sequence[TrajectoryGroup]]) -> list[list[bool]] | None:
    """By task; None when the env never says. An attempt that a limit cut short did not succeed."""
    attempts = [[t for group in own for t in group.trajectories] for own in tasks]
    if all(t.is_success is None for own in attempts for t in own):
        return None
    return [[t.is_success is True for t in own if t.is_judged] for own in attempts]
