"""What each step learns from: attempts that are played for it, or stored data that is read once.

`Supply` is what the loop asks for batches. Where the policy plays, its `Stream` plays the pool's groups in the
background and hands out batches of them: groups go on while the trainer learns, and over its updates. Each turn of a
dialogue is drawn with the newest weights that exist when the turn begins (`kv_across_updates: recompute`), or all
turns with the weights that drew the first one (`keep`), and with `end` a dialogue ends after the turn in which newer
weights came. The logprobs are always those of the weights that drew the turn, and the turn says which these were.
Which task and seed a group gets depends on its number and the run's seed alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, cast

from turnwise.client.publish import NewestSampler, VersionedSampler
from turnwise.credit.branching import with_branched_share
from turnwise.credit.shaping import shape_group
from turnwise.doctor import Finding
from turnwise.envs.base import Task
from turnwise.envs.joint import LEVEL_LABEL, leaves
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.methods.base import Kept, Method, checked_kept
from turnwise.methods.sft import Dialogue
from turnwise.opponents.seating import scripted_twin
from turnwise.renderers.base import Renderer
from turnwise.rollout.branch import BranchRollout, check_can_branch
from turnwise.rollout.group import DroppedGroup, Quarantine, Rollout, RolloutResult, cancel_all
from turnwise.rollout.seeds import derive_seed
from turnwise.rollout.self_play import SelfPlayRollout, split_seats
from turnwise.rollout.sources import PlayBranches, PlayGroups, ReadDialogues, ReadPairs
from turnwise.rollout.stats import FirstFailures, RolloutStats
from turnwise.runtime.blocking import in_thread
from turnwise.training.assemble import Parts
from turnwise.training.checkpoint import RunState
from turnwise.training.demonstrations import read_demonstrations
from turnwise.training.pool import (
    GroupPlan,
    GroupState,
    LengthBias,
    Pool,
    PoolEntry,
    PoolRules,
    entries_to_rows,
    judged_outcomes,
    oldest_version,
    rows_to_entries,
)
from turnwise.training.stored import HeldOutTasks, check_stored_data, read_run_dialogues, read_training_pairs
from turnwise.training.task_order import ShuffledItems
from turnwise.trajectory import TrajectoryGroup
from turnwise.watch.watchdog import Watchdog

NOTHING_PLAYED = RolloutResult(groups=(), dropped=(), stats=RolloutStats())


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one update learns from, and how old it is."""

    entries: Sequence[PoolEntry]
    stale: Sequence[PoolEntry]
    """Groups that grew too old, and are learned from by nobody."""
    staleness: Sequence[int]
    """For each group in which something was drawn: the updates since its oldest token."""

    def result(self) -> RolloutResult:
        """What was played, in one result: groups in the order of their numbers."""
        stats = [*(entry.stats for entry in self.entries), *(_as_stale(entry) for entry in self.stale)]
        outcomes: list[TrajectoryGroup | DroppedGroup | None] = []
        for entry in self.entries:
            outcome = entry.outcome
            outcomes += split_seats(outcome) if isinstance(outcome, TrajectoryGroup) else [outcome]
        return RolloutResult.of(outcomes, RolloutStats.merged(stats))


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
        self.failures = FirstFailures()
        self._newest = NewestSampler(sampler.client, sampler.version)
        self._watchdog = watchdog
        self._slots = asyncio.Semaphore(parts.rollout.max_concurrency)
        self._playing: dict[asyncio.Task[None], PoolEntry] = {}
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
        for entry in [*self._waiting(), *self.pool.admit(self._num_batches)]:
            self._playing[asyncio.create_task(self._play(entry))] = entry

    def publish(self, sampler: VersionedSampler) -> None:
        """Sample with these weights from now on."""
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
        stale: list[PoolEntry] = []
        try:
            while True:
                self._settle()
                stale += self.pool.drop_stale(version)
                self._start()
                if self.pool.is_ready:
                    break
                holding = self.pool.held_up_by
                waited_for = [task for task, entry in self._playing.items() if entry in holding]
                await self._watchdog.any_of(waited_for or list(self._playing), self._waits_for)
        except BaseException:
            self.pool.put_back(stale)  # a run that goes on drops them again, and counts what they drew
            raise
        entries = self.pool.take()
        oldest = [oldest_version(entry.outcome) for entry in entries if entry.outcome is not None]
        return Taken(entries=entries, stale=stale, staleness=[version - one for one in oldest if one is not None])

    async def close(self) -> None:
        """End what is being played. It stays in the pool as queued, to be played again by a run that goes on."""
        await cancel_all(list(self._playing))
        for entry in self._playing.values():
            if entry.state is not GroupState.DONE:
                self._num_cut_tokens += entry.stats.num_drawn
                entry.state, entry.num_playing, entry.stats = GroupState.QUEUED, 0, RolloutStats()
        self._playing.clear()

    @property
    def num_untaken_tokens(self) -> int:
        """Tokens that were drawn for groups that no update has taken; after `close`, those that it cut off included."""
        return self.pool.num_drawn + self._num_cut_tokens

    @property
    def num_attempts_playing(self) -> int:
        return sum(entry.num_playing for entry in self.pool.snapshot())

    def _waiting(self) -> list[PoolEntry]:
        """Places that came back from a checkpoint and nobody plays yet."""
        playing = set(self._playing.values())
        return [p for p in self.pool.entries.values() if p.state is GroupState.QUEUED and p not in playing]

    def _settle(self) -> None:
        """Look after the groups that ended; a bug in one of them is raised here."""
        for task in [task for task in self._playing if task.done()]:
            del self._playing[task]
            task.result()
        if self._quarantine.world is not None:
            raise TurnwiseError(
                f"the world {self._parts.world.name} keeps failing: {self._quarantine.world}"
            ) from self.failures.first

    async def _play(self, entry: PoolEntry) -> None:
        rollout = self._rollout(entry.plan.task)
        entry.stats = rollout.stats
        rollout.slots = _GroupSlots(self._slots, entry)
        self.pool.finish(entry, await rollout.play_group(entry.plan.task, entry.plan.seed))

    def _rollout(self, task: Task) -> Rollout:
        parts, source, quarantine = self._parts, self._parts.method.source, self._quarantine
        rules = parts.rules(task)
        if isinstance(source, PlayBranches):
            rollout = BranchRollout(
                parts.world, self._newest, self._renderer, rules, plan=source, quarantine=quarantine
            )
        else:
            assert isinstance(source, PlayGroups)
            kind = SelfPlayRollout if parts.config.opponent.train == "both" else Rollout
            rollout = kind(parts.world, self._newest, self._renderer, rules, quarantine=quarantine)
        rollout.stats.failures = self.failures
        picks: Mapping[str, Callable[[], VersionedSampler]] = {
            "recompute": lambda: self._newest,
            "keep": self._newest.pinned,
            "end": self._newest.until_update,
        }
        rollout.pick_sampler = picks[parts.config.rollout.kv_across_updates]
        return rollout

    def _waits_for(self) -> str:
        """The groups that hold up the loop, in words."""
        holding = self.pool.held_up_by
        counts = ", ".join(f"{count} {state}" for state, count in self.pool.counts().items())
        if holding and self._parts.config.train.max_staleness:
            tasks = ", ".join(entry.plan.task.id for entry in holding[:3])
            return f"groups that have waited long enough ({tasks}); in the pool: {counts}"
        return f"a batch of groups; in the pool: {counts}"


class _GroupSlots:
    """The slots that all attempts share, as the attempts of one group take them; counts how many are playing."""

    def __init__(self, slots: asyncio.Semaphore, entry: PoolEntry) -> None:
        self._slots = slots
        self._entry = entry

    async def __aenter__(self) -> None:
        await self._slots.acquire()
        self._entry.state = GroupState.RUNNING
        self._entry.num_playing += 1

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entry.num_playing -= 1
        self._slots.release()


def _check_judged(entry: PoolEntry) -> None:
    """Refuse a curriculum in a world that never says whether an attempt succeeded: all levels would look alike."""
    attempts = () if entry.outcome is None else entry.outcome.trajectories
    if any(LEVEL_LABEL in one.labels and not one.is_judged for one in attempts):
        raise TurnwiseError(
            f"{entry.plan.task.id}: the world ended an attempt without saying whether it succeeded, and its curriculum "
            "chooses levels by that; set is_success in the env's last step, or leave the curriculum out"
        )


def _as_stale(entry: PoolEntry) -> RolloutStats:
    """What a group that is dropped for its age leaves in the numbers: every attempt counts as dropped."""
    stats, kept = RolloutStats.merged([entry.stats]), entry.stats.kept
    stats.kept = []
    if kept:
        stats.dropped["stale"] += len(kept)
    return stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one step learns from."""

    played: RolloutResult
    """What was played. The groups have shaped rewards; the stats count the env's own rewards."""
    kept: Kept
    as_played: Sequence[TrajectoryGroup] = ()
    """The groups of `played`, with the rewards that the env gave."""
    items: Sequence[Any]
    """What `method.lessons` takes: groups, or whatever the method's reader gave."""
    taken: Taken | None = None
    """The entries that its groups had in the pool, for groups that were played."""

    @property
    def tasks(self) -> list[Task]:
        """The tasks that were played; none where stored data was read."""
        return [] if self.taken is None else [one.plan.task for one in (*self.taken.entries, *self.taken.stale)]

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
                entries=[entry for one in taken for entry in one.entries],
                stale=[entry for one in taken for entry in one.stale],
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
        self.failures = FirstFailures()
        """Receives every failure of an attempt as it happens."""
        self._stored: ShuffledItems[Any] | None = None
        self.left_out: Finding | None = None
        """Says which stored data is left out; None: nothing is."""
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
                for world in leaves(self._parts.world).values():
                    await check_can_branch(scripted_twin(world), self._parts.rollout)
            case ReadDialogues() | ReadPairs():
                await in_thread(self._read)
            case PlayGroups():
                pass

    def open(self, sampler: VersionedSampler, num_done: int, state: RunState, num_batches: int) -> None:
        """Begin after `num_done` batches, with what the run had in its pool then."""
        if not self.is_played:
            return
        train = self._parts.config.train
        rules = PoolRules(
            batch_size=train.batch_size,
            max_batch=train.tasks_per_step,
            max_staleness=train.max_staleness,
            max_wait=train.max_wait or None,
        )
        pool = Pool(self._plan_group, rules, step=num_done, num_dealt=state.num_dealt)
        if state.deal is not None:
            self._parts.tasks.restore(state.deal)
        pool.consumed = LengthBias(state.num_consumed_groups, state.num_consumed_tokens)
        for entry in rows_to_entries(state.pool, self._plan_group):
            pool.restore(entry)
        if state.quarantine is not None:
            self._quarantine.restore(state.quarantine)
        self.stream = Stream(self._parts, self._renderer, pool, self._quarantine, sampler, self._watchdog)
        self.stream.failures = self.failures
        self.stream.begin(num_batches)

    async def batch(self, number: int) -> Batch:
        """Wait for, or read, the batch of that number, from 0."""
        if self.stream is None:
            items = self._read().batch(number)
            return Batch(played=NOTHING_PLAYED, kept=Kept(groups=(), reasons=()), items=items)
        parts, taken = self._parts, await self.stream.take()
        result = taken.result()
        for entry in (*taken.entries, *taken.stale):
            _check_judged(entry)
            parts.tasks.count(entry.plan.number, judged_outcomes(entry))
        num_ended = sum(dropped.why == "ended_before_branch" for dropped in result.dropped)
        groups = with_branched_share([shape_group(group, parts.shaping) for group in result.groups], num_ended)
        played = replace(result, groups=groups)
        kept = checked_kept(cast(Method, parts.method).keep(played.groups), parts.method, len(played.groups))
        return Batch(played=played, kept=kept, as_played=result.groups, items=kept.groups, taken=taken)

    def publish(self, sampler: VersionedSampler) -> None:
        """Sample with these weights from now on."""
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
                self.stream.pool.give_back([*batch.taken.entries, *batch.taken.stale])

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
        pool, per_batch = self.stream.pool, self._parts.config.train.tasks_per_step
        oldest = min(pool.entries, default=pool.num_dealt)
        return replace(
            before,
            deal=self._parts.tasks.to_state(oldest - oldest % per_batch),
            num_dealt=pool.num_dealt,
            num_consumed_groups=pool.consumed.num_groups,
            num_consumed_tokens=pool.consumed.num_tokens,
            quarantine=self._quarantine.to_state(),
            pool=tuple(entries_to_rows(pool.entries.values())),
        )

    def _plan_group(self, number: int) -> GroupPlan:
        """Task and seed of a number; a task that comes twice in one batch has attempts of its own each time."""
        tasks, train = self._parts.tasks, self._parts.config.train
        batch, position = divmod(number, train.tasks_per_step)
        dealt = [tasks.item(earlier).id for earlier in range(number - position, number)]
        task = tasks.item(number)
        seed = derive_seed(derive_seed(train.seed, "train", batch), task.id, dealt.count(task.id))
        return GroupPlan(number=number, task=task, seed=seed)

    def _read(self) -> ShuffledItems[Any]:
        """Stored data, read when it is first asked for."""
        if self._stored is None:
            parts, source = self._parts, self._parts.method.source
            seed = derive_seed(parts.config.train.seed, "stored")
            if isinstance(source, ReadPairs):
                held_out = HeldOutTasks(parts.config, parts.held_out)
                items: Sequence[Any] = read_training_pairs(source, parts.config, held_out)
                self.left_out = held_out.finding(f"data.pairs={source.path}")
            else:
                assert isinstance(source, ReadDialogues)
                items = self._read_dialogues(source, seed)
            self._stored = ShuffledItems(items, parts.config.train.tasks_per_step, seed)
        return self._stored

    def _read_dialogues(self, source: ReadDialogues, seed: int) -> list[Dialogue]:
        parts = self._parts
        if source.path:
            held_out = HeldOutTasks(parts.config, parts.held_out)
            found = read_run_dialogues(source.path, parts.config, held_out)
            self.left_out = held_out.finding(f"data.dialogues={source.path}")
            return found
        count, limit = parts.config.train.num_tasks, parts.context_length
        shown = read_demonstrations(parts.world, self._renderer, count, seed, context_length=limit)
        if not shown.dialogues:
            raise ConfigError(f"{parts.world.name} has no scripted dialogues; set data.dialogues to a run")
        self.left_out = shown.left_out
        return [Dialogue(datums=tuple(datums)) for datums in shown.dialogues]
