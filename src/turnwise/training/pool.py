"""The groups that are dealt and not yet learned from: how many may be under way, and which are learned from next.

    dealt -> queued -> running -> done -> consumed
                          |         `---> dropped, when its oldest token is beyond `max_staleness`
                          `-> queued again, when the process ends and a run goes on

Bookkeeping only: nothing is awaited here. `admit` keeps AReaL's capacity rule (arXiv:2505.24298): no more groups are
started than the next `max_staleness + 1` updates learn from. An update takes what is done, oldest first, but a group
that cannot wait any longer (`max_wait` updates) is waited for, however long it is. While `max_wait` is at most
`max_staleness`, as it is unless a run says otherwise, both together keep every token within `max_staleness` and no
group is lost. With `max_staleness` 0 a batch is admitted when the one before is learned, and waited for as a whole:
that is synchronous training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from turnwise.envs.base import Task
from turnwise.rollout.group import DroppedGroup
from turnwise.rollout.stats import RolloutStats
from turnwise.runlog.arrays import pack_trajectories, unpack_trajectories
from turnwise.runlog.schema import PoolRow
from turnwise.trajectory import TrajectoryGroup

Outcome = TrajectoryGroup | DroppedGroup


class GroupState(StrEnum):
    """How far a group has come."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    CONSUMED = "consumed"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRules:
    """How many groups an update learns from, and how old they may be."""

    batch_size: int
    """Groups that must be done before an update starts."""
    max_batch: int
    """Groups that one update takes at most."""
    max_staleness: int = 0
    """Updates that may happen between drawing a token and learning from it."""
    max_wait: int | None = None
    """Updates after which a group is waited for; None means `max_staleness`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """A group that is to be played: its task and its seed."""

    number: int
    """Counts from 0 over the whole run; task and seed follow from it."""
    task: Task
    seed: int


@dataclass(slots=True, kw_only=True, eq=False)
class PoolEntry:
    """One group in the pool, from the moment it is dealt until an update learns from it."""

    plan: GroupPlan
    admitted: int
    """Number of updates that were done when the group came in."""
    state: GroupState = GroupState.QUEUED
    num_playing: int = 0
    """How many of its attempts are being played right now."""
    outcome: Outcome | None = None
    stats: RolloutStats = field(default_factory=RolloutStats)


def num_admissible(
    *, max_staleness: int, num_trained: int, batch_size: int, num_accepted: int, num_running: int
) -> int:
    """AReaL's capacity rule: how many more groups may start.

    Args:
        num_trained: groups that finished updates have learned from; version times batch size where all are full.
        num_accepted: groups that are done: those of `num_trained`, those that wait, and those being learned from.
        num_running: groups that are queued or played.
    """
    return num_trained + (max_staleness + 1) * batch_size - num_accepted - num_running


def oldest_version(outcome: Outcome) -> int | None:
    """The weights that drew its oldest token; None where nothing was drawn."""
    versions = [turn.policy_version for trajectory in outcome.trajectories for turn in trajectory.turns]
    return min(versions, default=None)


class Pool:
    """All groups that were dealt and that no update has learned from yet."""

    def __init__(
        self, plan_group: Callable[[int], GroupPlan], rules: PoolRules, *, step: int = 0, num_dealt: int = 0
    ) -> None:
        """Make an empty pool.

        Args:
            plan_group: Gives the task and the seed of the group with a number.
            step: Number of updates done so far.
            num_dealt: Number of groups that were dealt so far.
        """
        self._plan_group = plan_group
        self._batch_size = rules.batch_size
        self._max_batch = rules.max_batch
        self._max_staleness = rules.max_staleness
        self._max_wait = rules.max_staleness if rules.max_wait is None else rules.max_wait
        self.step = step
        self.num_dealt = num_dealt
        self.entries: dict[int, PoolEntry] = {}
        """Groups that are queued, running or done, by number."""
        self._learning: Sequence[PoolEntry] = ()
        self.consumed = LengthBias()

    def admit(self, num_steps: int) -> list[PoolEntry]:
        """The new groups that may start now, if the run ends after `num_steps` updates."""
        num_done = sum(entry.state is GroupState.DONE for entry in self.entries.values())
        free = num_admissible(
            max_staleness=self._max_staleness,
            num_trained=0,
            batch_size=self._batch_size,
            num_accepted=num_done + len(self._learning),
            num_running=len(self.entries) - num_done,
        )
        num_steps_left = num_steps - self.step - bool(self._learning)
        wanted = num_steps_left * self._max_batch - len(self.entries)  # what nobody would learn from is not played
        return [self._admit() for _ in range(min(free, wanted))]

    def _admit(self) -> PoolEntry:
        entry = PoolEntry(plan=self._plan_group(self.num_dealt), admitted=self.step)
        self.entries[self.num_dealt] = entry
        self.num_dealt += 1
        return entry

    def restore(self, entry: PoolEntry) -> None:
        """Put back what another process had dealt; what was under way starts again."""
        self.entries[entry.plan.number] = entry

    def finish(self, entry: PoolEntry, outcome: Outcome) -> None:
        entry.outcome, entry.state = outcome, GroupState.DONE

    @property
    def held_up_by(self) -> list[PoolEntry]:
        """Groups that are still played, of which one at least has to end before an update can start; oldest first.

        A group may wait for `max_wait` updates. Those that have to be learned from within the next k + 1 updates are
        at most as many as these can take; what is more has to be in this one. In a synchronous run that is all of it.
        """
        for updates_left in range(self._max_wait + 1):
            due = [entry for entry in self._in_order() if entry.admitted + self._max_wait - self.step <= updates_left]
            playing = [entry for entry in due if entry.state is not GroupState.DONE]
            num_needed_now = len(due) - updates_left * self._max_batch
            if len(due) - len(playing) < num_needed_now:
                return playing
        return []

    @property
    def is_ready(self) -> bool:
        """An update can start."""
        num_done = sum(entry.state is GroupState.DONE for entry in self.entries.values())
        return num_done >= min(self._batch_size, len(self.entries)) and not self.held_up_by

    def drop_stale(self, version: int) -> list[PoolEntry]:
        """Remove the groups that are too old for weights of that version to learn from."""
        stale = [
            entry
            for entry in self._in_order()
            if entry.state is GroupState.DONE and _staleness(entry, version) > self._max_staleness
        ]
        for entry in stale:
            entry.state = GroupState.DROPPED
            del self.entries[entry.plan.number]
        return stale

    def take(self) -> list[PoolEntry]:
        """The groups of the next update, in the order of their numbers: those that are done and waited longest."""
        done = [entry for entry in self._in_order() if entry.state is GroupState.DONE]
        done.sort(key=lambda entry: entry.admitted)
        taken = sorted(done[: self._max_batch], key=lambda entry: entry.plan.number)
        for entry in taken:
            entry.state = GroupState.CONSUMED
            del self.entries[entry.plan.number]
        self._learning = taken
        self.consumed.add(taken)
        return taken

    def learned(self) -> None:
        """The update is done, so other groups may start."""
        self._learning = ()
        self.step += 1

    def give_back(self, entries: Sequence[PoolEntry]) -> None:
        """Undo a `take` whose update never came, be it learned or not, and the dropping of stale groups before it."""
        consumed = [entry for entry in entries if entry.state is GroupState.CONSUMED]
        if tuple(self._learning) == tuple(consumed):
            self._learning = ()
        else:
            self.step -= 1
        self.consumed.remove(consumed)
        self.put_back(entries)

    def put_back(self, entries: Sequence[PoolEntry]) -> None:
        """Put finished groups back that no update has learned from."""
        for entry in entries:
            entry.state = GroupState.DONE
            self.entries[entry.plan.number] = entry

    def counts(self) -> dict[str, int]:
        """How many groups are in each state."""
        counts = {str(state): 0 for state in (GroupState.QUEUED, GroupState.RUNNING, GroupState.DONE)}
        for entry in self.snapshot():
            counts[entry.state] += 1
        return counts

    def snapshot(self) -> list[PoolEntry]:
        """The groups as they are now, for a thread that looks while the loop deals and takes groups."""
        return list(self.entries.values())

    @property
    def num_drawn(self) -> int:
        """Number of tokens drawn so far for the groups in the pool."""
        return sum(entry.stats.num_drawn for entry in self.snapshot())

    def length_bias(self) -> float | None:
        """Tokens of a group that was learned from over those of one that was started, minus 1.

        Groups that are still played count with what they have drawn so far, so long ones show before they are done.
        None before anything was learned.
        """
        running = [entry.stats.num_drawn for entry in self.entries.values() if entry.state is not GroupState.QUEUED]
        return self.consumed.against(running)

    def _in_order(self) -> list[PoolEntry]:
        return [self.entries[number] for number in sorted(self.entries)]


def judged_outcomes(entry: PoolEntry) -> list[bool]:
    """Whether each judged attempt of a finished group succeeded."""
    assert entry.outcome is not None, "a group that is done has an outcome"
    return [one.is_success is True for one in entry.outcome.trajectories if one.is_judged]


def _staleness(entry: PoolEntry, version: int) -> int:
    assert entry.outcome is not None, "a group that is done has an outcome"
    oldest = oldest_version(entry.outcome)
    return 0 if oldest is None else version - oldest


class LengthBias:
    """Counts the tokens of groups that were learned from over a whole run, to show whether long groups are missing."""

    def __init__(self, num_groups: int = 0, num_tokens: int = 0) -> None:
        self.num_groups = num_groups
        self.num_tokens = num_tokens

    def add(self, entries: Sequence[PoolEntry]) -> None:
        self.num_groups += len(entries)
        self.num_tokens += sum(entry.stats.num_drawn for entry in entries)

    def remove(self, entries: Sequence[PoolEntry]) -> None:
        self.num_groups -= len(entries)
        self.num_tokens -= sum(entry.stats.num_drawn for entry in entries)

    def against(self, others: Sequence[int]) -> float | None:
        num_started, num_drawn = self.num_groups + len(others), self.num_tokens + sum(others)
        if not self.num_groups or not num_drawn:
            return None
        return (self.num_tokens / self.num_groups) / (num_drawn / num_started) - 1


def entries_to_rows(entries: Iterable[PoolEntry]) -> list[PoolRow]:
    """The entries as rows of the run directory, so that a run can go on in another process."""
    return [_row(entry) for entry in entries]


def rows_to_entries(rows: Iterable[PoolRow], plan_group: Callable[[int], GroupPlan]) -> list[PoolEntry]:
    """Bring entries back from the run directory. `plan_group` gives the task and the seed of a number.

    Groups that were done come back bit for bit. Groups that were queued or played start again from their beginning,
    with the same task and the same seed.
    """
    return [_entry(row, plan_group(row.number)) for row in rows]


def _row(entry: PoolEntry) -> PoolRow:
    number, task_id, outcome = entry.plan.number, entry.plan.task.id, entry.outcome
    if outcome is None:
        return PoolRow(number=number, task_id=task_id, admitted=entry.admitted, outcome=None)
    return PoolRow(
        number=number,
        task_id=task_id,
        admitted=entry.admitted,
        outcome=json.dumps(_outcome_fields(outcome) | {"stats": entry.stats.to_state()}),
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


def _entry(row: PoolRow, plan: GroupPlan) -> PoolEntry:
    if row.outcome is None:
        return PoolEntry(plan=plan, admitted=row.admitted)
    assert row.trajectories is not None, "a group that is done has its attempts"
    assert row.failed is not None, "and those that failed"
    fields = json.loads(row.outcome)
    stats = fields.pop("stats")
    trajectories, failed = unpack_trajectories(row.trajectories), unpack_trajectories(row.failed)
    is_dropped = "why" in fields
    kind = DroppedGroup if is_dropped else TrajectoryGroup
    outcome: Outcome = kind(**fields, trajectories=trajectories, failed=failed)
    kept = () if is_dropped else outcome.trajectories
    return PoolEntry(
        plan=plan,
        admitted=row.admitted,
        state=GroupState.DONE,
        outcome=outcome,
        stats=RolloutStats.from_state(stats, kept),
    )
