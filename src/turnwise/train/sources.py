"""What each step learns from: attempts that are played for it, or stored data that is read once.

The one place that knows the kinds of `turnwise.sources`. What is dealt depends on its number and the run's seed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from turnwise.credit.shaping import shape_group
from turnwise.envs.base import Task
from turnwise.errors import ConfigError
from turnwise.methods.base import Kept, Method
from turnwise.methods.sft import Dialogue
from turnwise.renderers.base import Renderer
from turnwise.rollout.branch import check_can_branch
from turnwise.rollout.group import RolloutResult
from turnwise.rollout.quarantine import Quarantine
from turnwise.rollout.seeds import derive_seed
from turnwise.rollout.stats import RolloutStats
from turnwise.sources import PlayBranches, PlayGroups, ReadDialogues, ReadPairs
from turnwise.train.assemble import Parts
from turnwise.train.deck import Deck
from turnwise.train.pool import Deal, LengthBias, Pool
from turnwise.train.pool_rows import places_to_rows, rows_to_places
from turnwise.train.run_state import RunState
from turnwise.train.stored import check_stored_data, read_run_dialogues, read_training_pairs
from turnwise.train.stream import Stream, Taken
from turnwise.train.versions import VersionedSampler
from turnwise.train.warmup import read_demonstrations
from turnwise.train.watchdog import Watchdog
from turnwise.trajectory import TrajectoryGroup

NOTHING_PLAYED = RolloutResult(groups=(), dropped=(), stats=RolloutStats())


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one step learns from."""

    played: RolloutResult
    """Its groups have their rewards shaped; its stats count what the env gave."""
    kept: Kept
    as_played: Sequence[TrajectoryGroup] = ()
    """The groups of `played`, with the rewards that the env gave."""
    items: Sequence[Any]
    """What `method.lessons` takes: groups, or whatever the method's reader gave."""
    taken: Taken | None = None
    """Where it was played: the places that its groups had in the pool."""

    @property
    def tasks(self) -> list[Task]:
        """The tasks that were played; none where stored data was read."""
        return [] if self.taken is None else [place.deal.task for place in self.taken.places]


class Supply:
    """What the steps of one run learn from, one batch after the other. Nothing is played after `close`."""

    def __init__(self, parts: Parts, renderer: Renderer, watchdog: Watchdog) -> None:
        self._parts = parts
        self._renderer = renderer
        self._watchdog = watchdog
        self._quarantine = Quarantine(
            task_after=parts.rollout.quarantine_task_after, world_after=parts.rollout.quarantine_world_after
        )
        self._stored: Deck[Any] | None = None
        self.stream: Stream | None = None
        """What plays; None where stored data is read."""

    @property
    def is_played(self) -> bool:
        """The policy itself makes the data, so what is trained can be held against what was sampled."""
        return isinstance(self._parts.method.source, PlayGroups | PlayBranches)

    async def check(self) -> None:
        """Refuse what no step could learn from, before anything is spent."""
        check_stored_data(self._parts)
        match self._parts.method.source:
            case PlayBranches():
                await check_can_branch(self._parts.world, self._parts.rollout.limits)
            case ReadDialogues() | ReadPairs():
                self._read()
            case PlayGroups():
                pass

    def open(self, sampler: VersionedSampler, step: int, state: RunState, num_steps: int) -> None:
        """Begin after `step` steps, with what the run had in its pool then."""
        if not self.is_played:
            return
        train = self._parts.config.train
        pool = Pool(
            self._deal,
            batch_size=train.batch_size,
            max_batch=train.tasks_per_step,
            max_staleness=train.max_staleness,
            max_wait=train.max_wait or None,
            step=step,
            num_dealt=state.num_dealt,
        )
        pool.consumed = LengthBias(state.num_consumed_groups, state.num_consumed_tokens)
        for place in rows_to_places(state.pool, self._deal):
            pool.restore(place)
        if state.quarantine is not None:
            self._quarantine.restore(state.quarantine)
        arguments = (self._parts, self._renderer, pool, self._quarantine, sampler, self._watchdog)
        self.stream = Stream(*arguments)
        self.stream.begin(num_steps)

    async def batch(self, step: int) -> Batch:
        """Wait for, or read, what the step of that number, from 0, learns from."""
        if self.stream is None:
            items = self._read().batch(step)
            return Batch(played=NOTHING_PLAYED, kept=Kept(groups=(), reasons=()), items=items)
        parts, taken = self._parts, await self.stream.take()
        result = taken.result()
        played = replace(result, groups=tuple(shape_group(group, parts.shaping) for group in result.groups))
        kept = cast(Method, parts.method).keep(played.groups)
        return Batch(played=played, kept=kept, as_played=result.groups, items=kept.groups, taken=taken)

    def publish(self, sampler: VersionedSampler) -> None:
        """From now on these are the newest weights."""
        if self.stream is not None:
            self.stream.publish(sampler)

    def learned(self, sampler: VersionedSampler, num_steps: int) -> None:
        """A step is done: these are the newest weights, and there is room for other groups."""
        self.publish(sampler)
        if self.stream is not None:
            self.stream.learned(num_steps)

    async def close(self) -> None:
        if self.stream is not None:
            await self.stream.close()

    def state(self, before: RunState) -> RunState:
        """The run's state with what is known here."""
        if self.stream is None:
            return before
        pool = self.stream.pool
        return replace(
            before,
            num_dealt=pool.num_dealt,
            num_consumed_groups=pool.consumed.num_groups,
            num_consumed_tokens=pool.consumed.num_tokens,
            quarantine=self._quarantine.to_state(),
            pool=tuple(places_to_rows(pool.places.values())),
        )

    def _deal(self, number: int) -> Deal:
        """Task and seed of a number; a task that comes twice in one batch has attempts of its own each time."""
        tasks, train = self._parts.tasks, self._parts.config.train
        batch, place = divmod(number, train.tasks_per_step)
        dealt = [task.id for task in tasks.batch(batch)[:place]]
        task = tasks.item(number)
        seed = derive_seed(derive_seed(train.seed, "train", batch), task.id, dealt.count(task.id))
        return Deal(number=number, task=task, seed=seed)

    def _read(self) -> Deck[Any]:
        """Stored data, read when it is first asked for."""
        if self._stored is None:
            parts, source = self._parts, self._parts.method.source
            seed = derive_seed(parts.config.train.seed, "stored")
            if isinstance(source, ReadPairs):
                items: Sequence[Any] = read_training_pairs(source, parts.config)
            else:
                assert isinstance(source, ReadDialogues)
                items = self._read_dialogues(source, seed)
            self._stored = Deck(items, parts.config.train.tasks_per_step, seed)
        return self._stored

    def _read_dialogues(self, source: ReadDialogues, seed: int) -> list[Dialogue]:
        parts = self._parts
        if source.path:
            return read_run_dialogues(source.path, parts.config)
        demonstrations = read_demonstrations(parts.world, self._renderer, parts.config.train.num_tasks, seed)
        if not demonstrations:
            raise ConfigError(f"{parts.world.name} has no scripted dialogues; set data.dialogues to a run")
        return [Dialogue(datums=tuple(datums)) for datums in demonstrations]
