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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from turnwise.envs.base import Task
from turnwise.rollout.group import DroppedGroup
from turnwise.rollout.stats import RolloutStats
from turnwise.trajectory import TrajectoryGroup

Outcome = TrajectoryGroup | DroppedGroup


class State(StrEnum):
    """Of a group, and of the attempts in it."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    CONSUMED = "consumed"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """What the deck gave: a task, and the seed of the group that is played at it."""

    number: int
    """From 0; it decides the other two."""
    task: Task
    seed: int


@dataclass(slots=True, kw_only=True, eq=False)
class Place:
    """One group in the pool."""

    deal: Deal
    admitted: int
    """The step, counted in updates done, at which it came in."""
    state: State = State.QUEUED
    num_playing: int = 0
    """Its attempts that are being played right now."""
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
    """All groups between the deck and the trainer."""

    def __init__(
        self,
        deal: Callable[[int], Deal],
        *,
        batch_size: int,
        max_batch: int,
        max_staleness: int = 0,
        max_wait: int | None = None,
        step: int = 0,
        num_dealt: int = 0,
    ) -> None:
        """An empty pool.

        Args:
            deal: the deal of a number.
            batch_size: groups that have to be done before an update starts.
            max_batch: groups that one update takes at most.
            max_wait: updates after which a group is waited for; None: `max_staleness`.
            step: updates done so far.
            num_dealt: deals that were given out so far.
        """
        self._deal = deal
        self._batch_size = batch_size
        self._max_batch = max_batch
        self._max_staleness = max_staleness
        self._max_wait = max_staleness if max_wait is None else max_wait
        self.step = step
        self.num_dealt = num_dealt
        self.places: dict[int, Place] = {}
        """Queued, running and done, by number."""
        self._learning: Sequence[Place] = ()
        self.consumed = LengthBias()

    def admit(self, num_steps: int) -> list[Place]:
        """As many new groups as may start, given that the run ends after `num_steps` updates."""
        num_done = sum(place.state is State.DONE for place in self.places.values())
        free = num_admissible(
            max_staleness=self._max_staleness,
            num_trained=0,
            batch_size=self._batch_size,
            num_accepted=num_done + len(self._learning),
            num_running=len(self.places) - num_done,
        )
        num_steps_left = num_steps - self.step - bool(self._learning)
        wanted = num_steps_left * self._max_batch - len(self.places)  # what nobody would learn from is not played
        return [self._admit() for _ in range(min(free, wanted))]

    def _admit(self) -> Place:
        place = Place(deal=self._deal(self.num_dealt), admitted=self.step)
        self.places[self.num_dealt] = place
        self.num_dealt += 1
        return place

    def restore(self, place: Place) -> None:
        """Put back what another process had dealt; what was under way starts again."""
        self.places[place.deal.number] = place

    def finish(self, place: Place, outcome: Outcome) -> None:
        place.outcome, place.state = outcome, State.DONE

    @property
    def held_up_by(self) -> list[Place]:
        """Groups that are still played, of which one at least has to end before an update can start; oldest first.

        A group may wait for `max_wait` updates. Those that have to be learned from within the next k + 1 updates are
        at most as many as these can take; what is more has to be in this one. In a synchronous run that is all of it.
        """
        for updates_left in range(self._max_wait + 1):
            due = [place for place in self._in_order() if place.admitted + self._max_wait - self.step <= updates_left]
            playing = [place for place in due if place.state is not State.DONE]
            num_needed_now = len(due) - updates_left * self._max_batch
            if len(due) - len(playing) < num_needed_now:
                return playing
        return []

    @property
    def is_ready(self) -> bool:
        """An update can start."""
        num_done = sum(place.state is State.DONE for place in self.places.values())
        return num_done >= min(self._batch_size, len(self.places)) and not self.held_up_by

    def drop_stale(self, version: int) -> list[Place]:
        """Remove the groups that are too old for weights of that version to learn from."""
        stale = [
            place
            for place in self._in_order()
            if place.state is State.DONE and _staleness(place, version) > self._max_staleness
        ]
        for place in stale:
            place.state = State.DROPPED
            del self.places[place.deal.number]
        return stale

    def take(self) -> list[Place]:
        """The groups of the next update, in the order of their numbers: those that are done and waited longest."""
        done = [place for place in self._in_order() if place.state is State.DONE]
        done.sort(key=lambda place: place.admitted)
        taken = sorted(done[: self._max_batch], key=lambda place: place.deal.number)
        for place in taken:
            place.state = State.CONSUMED
            del self.places[place.deal.number]
        self._learning = taken
        self.consumed.add(taken)
        return taken

    def learned(self) -> None:
        """The batch is learned: there is room for others."""
        self._learning = ()
        self.step += 1

    def give_back(self, places: Sequence[Place]) -> None:
        """Undo a `take` whose update never came, be it learned or not, and the dropping of stale groups before it."""
        consumed = [place for place in places if place.state is State.CONSUMED]
        if tuple(self._learning) == tuple(consumed):
            self._learning = ()
        else:
            self.step -= 1
        self.consumed.remove(consumed)
        self.put_back(places)

    def put_back(self, places: Sequence[Place]) -> None:
        """Groups that are done and nobody has learned from."""
        for place in places:
            place.state = State.DONE
            self.places[place.deal.number] = place

    def counts(self) -> dict[str, int]:
        """How many groups are in each state."""
        counts = {str(state): 0 for state in (State.QUEUED, State.RUNNING, State.DONE)}
        for place in self.places.values():
            counts[place.state] += 1
        return counts

    @property
    def num_drawn(self) -> int:
        """Tokens that were drawn for the groups in it so far."""
        return sum(place.stats.num_drawn for place in self.places.values())

    def length_bias(self) -> float | None:
        """Tokens of a group that was learned from over those of one that was started, minus 1.

        Groups that are still played count with what they have drawn so far, so long ones show before they are done.
        None before anything was learned.
        """
        running = [place.stats.num_drawn for place in self.places.values() if place.state is not State.QUEUED]
        return self.consumed.against(running)

    def _in_order(self) -> list[Place]:
        return [self.places[number] for number in sorted(self.places)]


def _staleness(place: Place, version: int) -> int:
    assert place.outcome is not None, "a group that is done has an outcome"
    oldest = oldest_version(place.outcome)
    return 0 if oldest is None else version - oldest


class LengthBias:
    """Tokens of the groups that were learned from, over a whole run."""

    def __init__(self, num_groups: int = 0, num_tokens: int = 0) -> None:
        self.num_groups = num_groups
        self.num_tokens = num_tokens

    def add(self, places: Sequence[Place]) -> None:
        self.num_groups += len(places)
        self.num_tokens += sum(place.stats.num_drawn for place in places)

    def remove(self, places: Sequence[Place]) -> None:
        self.num_groups -= len(places)
        self.num_tokens -= sum(place.stats.num_drawn for place in places)

    def against(self, others: Sequence[int]) -> float | None:
        num_started, num_drawn = self.num_groups + len(others), self.num_tokens + sum(others)
        if not self.num_groups or not num_drawn:
            return None
        return (self.num_tokens / self.num_groups) / (num_drawn / num_started) - 1
