"""What each step learns from: attempts that are played for it, or stored data that is read once.

The one place that knows the kinds of `turnwise.rollout.sources`. What is dealt depends on its number and the run's
seed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from turnwise.client.publish import VersionedSampler
from turnwise.credit.branching import with_branched_share
from turnwise.credit.shaping import shape_group
from turnwise.envs.base import Task
from turnwise.errors import ConfigError
from turnwise.methods.base import Kept, Method
from turnwise.methods.sft import Dialogue
from turnwise.renderers.base import Renderer
from turnwise.rollout.branch import check_can_branch
from turnwise.rollout.group import Quarantine, RolloutResult
from turnwise.rollout.seeds import derive_seed
from turnwise.rollout.sources import PlayBranches, PlayGroups, ReadDialogues, ReadPairs
from turnwise.rollout.stats import RolloutStats
from turnwise.training.assemble import Parts
from turnwise.training.pool import Deal, LengthBias, Pool
from turnwise.training.pool_rows import places_to_rows, rows_to_places
from turnwise.training.run_state import RunState
from turnwise.training.stored import check_stored_data, read_run_dialogues, read_training_pairs
from turnwise.training.stream import Stream, Taken
from turnwise.training.task_order import Deck
from turnwise.training.warmup import read_demonstrations
from turnwise.trajectory import TrajectoryGroup
from turnwise.watch.watchdog import Watchdog

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

    @classmethod
    def merged(cls, batches: Sequence[Batch]) -> Batch:
        """The batches of one optimizer step as one."""
        if len(batches) == 1:
            return batches[0]
        played = [batch.played for batch in batches]
        taken = [batch.taken for batch in batches if batch.taken is not None]
        return cls(
            played=RolloutResult(
                groups=tuple(group for one in played for group in one.groups),
                dropped=tuple(group for one in played for group in one.dropped),
                stats=RolloutStats.merged(one.stats for one in played),
            ),
            kept=Kept(
                groups=tuple(group for batch in batches for group in batch.kept.groups),
                reasons=tuple(reason for batch in batches for reason in batch.kept.reasons),
            ),
            as_played=[group for batch in batches for group in batch.as_played],
            items=[item for batch in batches for item in batch.items],
            taken=Taken(
                places=[place for one in taken for place in one.places],
                stale=[place for one in taken for place in one.stale],
                staleness=[age for one in taken for age in one.staleness],
            )
            if taken
            else None,
        )


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
                await check_can_branch(self._parts.world, self._parts.rollout)
            case ReadDialogues() | ReadPairs():
                self._read()
            case PlayGroups():
                pass

    def open(self, sampler: VersionedSampler, num_done: int, state: RunState, num_batches: int) -> None:
        """Begin after `num_done` batches, with what the run had in its pool then."""
        if not self.is_played:
            return
        train = self._parts.config.train
        pool = Pool(
            self._deal,
            batch_size=train.batch_size,
            max_batch=train.tasks_per_step,
            max_staleness=train.max_staleness,
            max_wait=train.max_wait or None,
            step=num_done,
            num_dealt=state.num_dealt,
        )
        pool.consumed = LengthBias(state.num_consumed_groups, state.num_consumed_tokens)
        for place in rows_to_places(state.pool, self._deal):
            pool.restore(place)
        if state.quarantine is not None:
            self._quarantine.restore(state.quarantine)
        arguments = (self._parts, self._renderer, pool, self._quarantine, sampler, self._watchdog)
        self.stream = Stream(*arguments)
        self.stream.begin(num_batches)

    async def batch(self, number: int) -> Batch:
        """Wait for, or read, the batch of that number, from 0."""
        if self.stream is None:
            items = self._read().batch(number)
            return Batch(played=NOTHING_PLAYED, kept=Kept(groups=(), reasons=()), items=items)
        parts, taken = self._parts, await self.stream.take()
        result = taken.result()
        num_ended = sum(dropped.why == "ended_before_branch" for dropped in result.dropped)
        groups = with_branched_share([shape_group(group, parts.shaping) for group in result.groups], num_ended)
        played = replace(result, groups=groups)
        kept = cast(Method, parts.method).keep(played.groups)
        return Batch(played=played, kept=kept, as_played=result.groups, items=kept.groups, taken=taken)

    def publish(self, sampler: VersionedSampler) -> None:
        """From now on these are the newest weights."""
        if self.stream is not None:
            self.stream.publish(sampler)

    def learned(self, num_batches: int) -> None:
        """A batch was learned from; there is room for other groups until the run has had `num_batches`."""
        if self.stream is not None:
            self.stream.learned(num_batches)

    def give_back(self, batches: Sequence[Batch]) -> None:
        """Batches whose optimizer step never came: they wait in the pool again, for a run that goes on."""
        if self.stream is not None:
            for batch in reversed(batches):
                assert batch.taken is not None, "what a stream gave was taken from its pool"
                self.stream.pool.give_back([*batch.taken.places, *batch.taken.stale])

    async def close(self) -> None:
        if self.stream is not None:
            await self.stream.close()

    @property
    def num_untaken_tokens(self) -> int:
        """Tokens that were drawn for groups that no step has learned from, or dropped."""
        return 0 if self.stream is None else self.stream.num_untaken_tokens

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
