"""The pool over the end of a process: places to rows of the run directory and back.

Groups that are done come back as they were, bit for bit. Groups that were queued or played start again from their
beginning, with the same task and the same seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from turnwise.rollout.group import DroppedGroup
from turnwise.rollout.stats import RolloutStats
from turnwise.runlog.groups import pack_trajectories, unpack_trajectories
from turnwise.runlog.schema import PoolRow
from turnwise.training.pool import Deal, Outcome, Place, State
from turnwise.trajectory import TrajectoryGroup


def places_to_rows(places: Iterable[Place]) -> list[PoolRow]:
    return [_row(place) for place in places]


def rows_to_places(rows: Iterable[PoolRow], deal: Callable[[int], Deal]) -> list[Place]:
    """`deal` gives the task and the seed of a number, as it did when the row was written."""
    return [_place(row, deal(row.number)) for row in rows]


def _row(place: Place) -> PoolRow:
    number, task_id, outcome = place.deal.number, place.deal.task.id, place.outcome
    if outcome is None:
        return PoolRow(number=number, task_id=task_id, admitted=place.admitted, outcome=None)
    return PoolRow(
        number=number,
        task_id=task_id,
        admitted=place.admitted,
        outcome=json.dumps(_outcome_fields(outcome) | {"stats": place.stats.to_state()}),
        trajectories=pack_trajectories(outcome.trajectories),
        failed=pack_trajectories(outcome.failed),
    )


def _outcome_fields(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, DroppedGroup):
        return {"task_id": outcome.task_id, "why": outcome.why, "detail": outcome.detail}
    return {
        "task_id": outcome.task_id,
        "branch_turn": outcome.branch_turn,
        "branch_probability": outcome.branch_probability,
    }


def _place(row: PoolRow, deal: Deal) -> Place:
    if row.outcome is None:
        return Place(deal=deal, admitted=row.admitted)
    assert row.trajectories is not None, "a group that is done has its attempts"
    assert row.failed is not None, "and those that failed"
    fields = json.loads(row.outcome)
    stats = fields.pop("stats")
    trajectories, failed = unpack_trajectories(row.trajectories), unpack_trajectories(row.failed)
    is_dropped = "why" in fields
    kind = DroppedGroup if is_dropped else TrajectoryGroup
    outcome: Outcome = kind(**fields, trajectories=trajectories, failed=failed)
    kept = () if is_dropped else outcome.trajectories
    return Place(
        deal=deal,
        admitted=row.admitted,
        state=State.DONE,
        outcome=outcome,
        stats=RolloutStats.from_state(stats, kept),
    )
