"""Plays the pool's groups in the background and hands out batches of them.

Groups go on while the trainer learns, and over its updates. Each turn of a dialogue is drawn with the newest weights
there are when it begins (`kv_across_updates: recompute`), or all with those that drew its first (`keep`); either way
logprobs are those of the weights that drew, and the turn says which these were.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from turnwise.client.publish import NewestSampler, VersionedSampler
from turnwise.errors import TurnwiseError
from turnwise.renderers.base import Renderer
from turnwise.rollout.branch import BranchRollout
from turnwise.rollout.group import Quarantine, Rollout, RolloutResult, cancel_all
from turnwise.rollout.sources import PlayBranches, PlayGroups
from turnwise.rollout.stats import RolloutStats
from turnwise.training.assemble import Parts
from turnwise.training.pool import Place, Pool, State, oldest_version
from turnwise.watch.watchdog import Watchdog


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one update learns from, and how old it is."""

    places: Sequence[Place]
    stale: Sequence[Place]
    """Groups that grew too old, and are learned from by nobody."""
    staleness: Sequence[int]
    """Of each group in which something was drawn: updates since its oldest token."""

    def result(self) -> RolloutResult:
        """As if it had been played in one go, in the order of the deals."""
        stats = [*(place.stats for place in self.places), *(_as_stale(place) for place in self.stale)]
        return RolloutResult.of([place.outcome for place in self.places], RolloutStats.merged(stats))


class Stream:
    """The playing half of a run. Use it as an async context manager: nothing outlives it."""

    def __init__(
        self,
        parts: Parts,
        renderer: Renderer,
        pool: Pool,
        quarantine: Quarantine,
        sampler: VersionedSampler,
        watchdog: Watchdog,
    ) -> None:
        self._parts = parts
        self._renderer = renderer
        self.pool = pool
        self._quarantine = quarantine
        self._newest = NewestSampler(sampler.client, sampler.version)
        self._watchdog = watchdog
        self._room = asyncio.Semaphore(parts.rollout.max_concurrency)
        self._playing: dict[asyncio.Task[None], Place] = {}
        self._num_batches = 0
        self._num_cut_tokens = 0

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def begin(self, num_batches: int) -> None:
        """The run ends after `num_batches`; start what may be played ahead."""
        self._num_batches = num_batches
        if self._parts.config.train.max_staleness:  # else evaluations have the sampler for themselves
            self._start()

    def _start(self) -> None:
        for place in [*self._waiting(), *self.pool.admit(self._num_batches)]:
            self._playing[asyncio.create_task(self._play(place))] = place

    def publish(self, sampler: VersionedSampler) -> None:
        """From now on these are the newest weights."""
        self._newest.follow(sampler)

    def learned(self, num_batches: int) -> None:
        """The last batch was learned from; other groups start in the room that it left."""
        self.pool.learned()
        self.begin(num_batches)

    async def take(self) -> Taken:
        """Wait until enough groups are done for an update, and take them out of the pool.

        When nothing at all happens any more, the watchdog says so and raises.
        """
        version = self._newest.version
        stale: list[Place] = []
        try:
            while True:
                self._settle()
                stale += self.pool.drop_stale(version)
                self._start()
                if self.pool.is_ready:
                    break
                holding = self.pool.held_up_by
                waited_for = [task for task, place in self._playing.items() if place in holding]
                await self._watchdog.any_of(waited_for or list(self._playing), self._waits_for)
        except BaseException:
            self.pool.put_back(stale)  # a run that goes on drops them again, and counts what they drew
            raise
        places = self.pool.take()
        oldest = [oldest_version(place.outcome) for place in places if place.outcome is not None]
        return Taken(places=places, stale=stale, staleness=[version - one for one in oldest if one is not None])

    async def close(self) -> None:
        """End what is being played. It stays in the pool as queued, to be played again by a run that goes on."""
        await cancel_all(list(self._playing))
        for place in self._playing.values():
            if place.state is not State.DONE:
                self._num_cut_tokens += place.stats.num_drawn
                place.state, place.num_playing, place.stats = State.QUEUED, 0, RolloutStats()
        self._playing.clear()

    @property
    def num_untaken_tokens(self) -> int:
        """Tokens that were drawn for groups that no update has taken; after `close`, those that it cut off included."""
        return self.pool.num_drawn + self._num_cut_tokens

    @property
    def num_attempts_playing(self) -> int:
        return sum(place.num_playing for place in self.pool.places.values())

    def _waiting(self) -> list[Place]:
        """Places that came back from a checkpoint and nobody plays yet."""
        playing = set(self._playing.values())
        return [p for p in self.pool.places.values() if p.state is State.QUEUED and p not in playing]

    def _settle(self) -> None:
        """Look after the groups that ended; a bug in one of them is raised here."""
        for task in [task for task in self._playing if task.done()]:
            del self._playing[task]
            task.result()
        if self._quarantine.world is not None:
            raise TurnwiseError(f"the world {self._parts.world.name} keeps failing: {self._quarantine.world}")

    async def _play(self, place: Place) -> None:
        rollout = self._rollout()
        place.stats = rollout.stats
        rollout.slots = _Door(self._room, place)
        self.pool.finish(place, await rollout.play_group(place.deal.task, place.deal.seed))

    def _rollout(self) -> Rollout:
        parts, source, quarantine = self._parts, self._parts.method.source, self._quarantine
        if isinstance(source, PlayBranches):
            rollout = BranchRollout(
                parts.world, self._newest, self._renderer, parts.rollout, plan=source, quarantine=quarantine
            )
        else:
            assert isinstance(source, PlayGroups)
            rollout = Rollout(parts.world, self._newest, self._renderer, parts.rollout, quarantine=quarantine)
        if parts.config.rollout.kv_across_updates == "keep":
            pick: Callable[[], VersionedSampler] = self._newest.pinned
            rollout.pick_sampler = pick
        return rollout

    def _waits_for(self) -> str:
        """In words, which groups hold the loop up."""
        holding = self.pool.held_up_by
        counts = ", ".join(f"{count} {state}" for state, count in self.pool.counts().items())
        if holding and self._parts.config.train.max_staleness:
            tasks = ", ".join(place.deal.task.id for place in holding[:3])
            return f"groups that have waited long enough ({tasks}); in the pool: {counts}"
        return f"a batch of groups; in the pool: {counts}"


class _Door:
    """The way of one group's attempts into the room that all attempts share."""

    def __init__(self, room: asyncio.Semaphore, place: Place) -> None:
        self._room = room
        self._place = place

    async def __aenter__(self) -> None:
        await self._room.acquire()
        self._place.state = State.RUNNING
        self._place.num_playing += 1

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._place.num_playing -= 1
        self._room.release()


def _as_stale(place: Place) -> RolloutStats:
    """What a group that is dropped for its age leaves in the numbers: every attempt counts as dropped."""
    stats, kept = RolloutStats.merged([place.stats]), place.stats.kept
    stats.kept = []
    if kept:
        stats.dropped["stale"] += len(kept)
    return stats
