"""Checkpoints of a run: weights, optimizer state, and how far the run had come.

They live in the run's directory (`checkpoints/<model id>/weights/<name>`), so a run can be moved as a whole.
`RunState`, which stands beside the row of a checkpoint, says where the parts of the loop stood. There is no random
generator in it: every task and every seed follows from the run's seed and a number. So a resumed run does what an
uninterrupted one would have done. `Start` is what a run that begins, or goes on, reads from all this.

A run with a critic saves it under the same name; the state beside the row says where, and so does the policy's
`checkpoint.json` where the files are here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from turnwise.client.base import TrainingClient
from turnwise.client.checkpoints import CheckpointStore, read_info, remove_directory, weights_fingerprint
from turnwise.config.config import Config
from turnwise.config.files import config_from_yaml
from turnwise.errors import CheckpointError, ServiceError
from turnwise.opponents.pool import SNAPSHOT_FILES, PoolState
from turnwise.rollout.group import QuarantineState
from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import START_WEIGHTS, CheckpointRow, EvaluationRow, PoolRow
from turnwise.runlog.writer import RunWriter
from turnwise.training.critic import Critic, PlateauState
from turnwise.training.task_order import TaskOrderState
from turnwise.watch.alarms import AlarmState

CRITIC_PATH, CRITIC_BATCHES = "critic_path", "critic_pretrained"
"""What a policy's checkpoint says of its critic."""
NOTHING_DONE = CheckpointRow(step=0, warmup_steps=0, path="")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of the loop's parts at a checkpoint, besides weights and optimizer."""

    version: int = 0
    """Updates that moved the policy's weights."""
    num_dealt: int = 0
    """Tasks that were given out to be played."""
    num_empty_steps: int = 0
    """Steps in a row, up to now, that left nothing to learn from."""
    why_empty: Mapping[str, int] = field(default_factory=dict[str, int])
    num_consumed_groups: int = 0
    num_consumed_tokens: int = 0
    quarantine: QuarantineState | None = None
    alarms: AlarmState | None = None
    critic_path: str = ""
    """The path of the saved critic; empty if the method has none."""
    critic_pretrained: int = 0
    """Batches of the critic's pre-training that were done."""
    critic_plateau: PlateauState | None = None
    """Whether those batches still helped; None where the method has no critic."""
    opponents: PoolState | None = None
    """The pool of opponents; None where there is none."""
    deal: TaskOrderState | None = None
    """The levels that a curriculum dealt, and their success; None without a curriculum."""
    pool: tuple[PoolRow, ...] = ()
    """Groups that were dealt and not yet learned from."""

    def to_json(self) -> str:
        """All but the pool, which has rows of its own."""
        return json.dumps({key: value for key, value in asdict(self).items() if key != "pool"})


def read_state(row: CheckpointRow, pool: list[PoolRow], *, tasks_per_step: int) -> RunState:
    """The state that was saved with a checkpoint; one without any was made between two synchronous steps."""
    if row.state is None:
        return RunState(version=row.step, num_dealt=row.step * tasks_per_step)
    return RunState(**json.loads(row.state), pool=tuple(pool))


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The state from which a run begins: nothing, or a checkpoint."""

    done: CheckpointRow = NOTHING_DONE
    evaluated: frozenset[tuple[str, int]] = frozenset()
    """(label, step) of the evaluations that are on record already."""
    checkpoints: tuple[CheckpointRow, ...] = ()
    is_new: bool = True
    num_drawn: int = 0
    """Tokens that the steps and the critic's pre-training took so far."""
    num_drawn_before: int = 0
    """Tokens that the critic's pre-training took."""
    critic_batches: int = 0
    """Batches of the critic's pre-training that the checkpoint includes."""
    state: RunState | None = None
    """The state of the loop's parts."""
    best: EvaluationRow | None = None
    """The evaluation whose checkpoint is kept beside the latest."""


NEW_RUN = Start()


class RunCheckpoints:
    """Saves the latest few states of one run."""

    def __init__(
        self,
        trainer: TrainingClient,
        writer: RunWriter,
        start: Start,
        *,
        max_kept: int,
        critic: Critic | None = None,
        delete: Callable[[str], None] | None = None,
    ) -> None:
        """Save nothing yet.

        Args:
            start: Where the run begins; it names the checkpoints that are there, and the best of them.
            max_kept: How many of the latest are kept; the best one is kept too.
            critic: Saved with every checkpoint of the policy.
            delete: Deletes a checkpoint by its path; default: from the run's directory.
        """
        self._trainer = trainer
        self._writer = writer
        self._kept = list(start.checkpoints)
        self._max_kept = max_kept
        self._critic = critic
        self._delete = delete or CheckpointStore(writer.directory).delete
        self._best = start.best
        if self._kept:
            self._link()  # a process that died may have left links to what is gone

    def has(self, step: int) -> bool:
        """There is a checkpoint of that step."""
        return any(row.step == step for row in self._kept)

    def is_best(self, row: EvaluationRow) -> bool:
        """No evaluation before this one found a better policy that is kept; of equals, the later is taken.

        Nothing is kept of the model before its first step (`start`): that is the base model.
        """
        is_measured = row.label != "start" and not math.isnan(evaluation_score(row))
        return is_measured and (self._best is None or _is_as_good(row, self._best))

    async def keep_best(self, row: EvaluationRow) -> None:
        """From now on the checkpoint of that evaluation is the one that never goes for its age."""
        assert self.has(row.step), "what is kept was saved before"
        self._best = row
        await self._prune(row.step)

    async def save(self, step: int, warmup_steps: int, state: RunState | None = None) -> CheckpointRow:
        """Write the state after `step` steps; the oldest beyond `max_kept` goes.

        Whenever the process ends in here, a whole checkpoint is on record: the files come first, then the row and the
        pool in one transaction, and only then does the oldest go.
        """
        name = self._free_name(f"step-{step:06d}" if step or not warmup_steps else f"warmup-{warmup_steps:06d}")
        critic = await self._save_critic(name)
        metadata = None if critic is None else {CRITIC_PATH: critic.path, CRITIC_BATCHES: str(critic.num_pretrained)}
        saved = await self._trainer.save_state(name, overwrite=True, user_metadata=metadata)
        if state is not None and critic is not None:
            state = replace(
                state,
                critic_path=critic.path,
                critic_pretrained=critic.num_pretrained,
                critic_plateau=critic.plateau,
            )
        text = None if state is None else state.to_json()
        row = CheckpointRow(step=step, warmup_steps=warmup_steps, path=saved.path, state=text)
        self._kept.append(row)
        if step == 0:
            self._name_start(saved.path)
        self._writer.checkpoint(row)
        self._writer.pool(step, () if state is None else state.pool)
        self._writer.commit(step)
        await self._prune(step)
        return row

    def _name_start(self, path: str) -> None:
        """Record which weights the first step begins from, where the files are here: runs with others are compared."""
        place = CheckpointStore(self._writer.directory).directory(path)
        info = read_info(place) if place.is_dir() else None
        if info is not None:
            self._writer.set_meta(START_WEIGHTS, weights_fingerprint(info))

    @property
    def pools(self) -> list[PoolState]:
        """The pools of opponents that the kept checkpoints go on with."""
        return _pools(self._kept)

    async def remove(self, path: str) -> None:
        """Delete a checkpoint that is none of these, such as a snapshot for the pool of opponents."""
        await self._remove(path)

    async def reload(self) -> None:
        """Give the trainer a fresh optimizer: its weights are written, read and forgotten again."""
        saved = await self._trainer.save_state("reload", overwrite=True)
        await self._trainer.load_state(saved.path)
        await self._remove(saved.path)

    async def _prune(self, step: int) -> None:
        """Let go of what is neither among the latest few nor the best."""
        gone = self._outdated()
        self._kept = [row for row in self._kept if row not in gone]
        for old in gone:
            critic = saved_critic(self._writer.directory, old)
            if critic is not None:
                await self._remove(critic.path)
            await self._remove(old.path)
            if all(row.step != old.step for row in self._kept):
                self._writer.forget_checkpoint(old.step)
        self._writer.commit(step)
        self._link()

    def _link(self) -> None:
        """Point `latest` and `best` in the run's directory to their checkpoints, where the files are here."""
        best_step = None if self._best is None else self._best.step
        best = next((row for row in reversed(self._kept) if row.step == best_step), None)
        for name, row in (("latest", self._kept[-1]), ("best", best)):
            place = None if row is None else CheckpointStore(self._writer.directory).directory(row.path)
            if place is not None and place.is_dir():
                _point(self._writer.directory / name, place)

    def _outdated(self) -> list[CheckpointRow]:
        """What is older than the latest few, but for the best; of one step, only the last saved can be that."""
        old = self._kept[: -self._max_kept]
        best_step = None if self._best is None else self._best.step
        best = next((row for row in reversed(self._kept) if row.step == best_step), None)
        return [row for row in old if row is not best]

    def _free_name(self, name: str) -> str:
        """A name that no checkpoint has which may be needed: files are never written over."""
        taken = {row.path.rpartition("/")[2] for row in self._kept}
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        return next(free for free in names if free not in taken)

    async def _save_critic(self, name: str) -> SavedCritic | None:
        """Write the critic first: a policy's checkpoint never names one that is not there."""
        if self._critic is None:
            return None
        saved = await self._critic.client.save_state(name, overwrite=True)
        critic = self._critic
        return SavedCritic(path=saved.path, num_pretrained=critic.num_pretrained, plateau=critic.plateau.to_state())

    async def _remove(self, path: str) -> None:
        with contextlib.suppress(ServiceError):  # one that stays costs a service elsewhere some room, not the run
            await asyncio.to_thread(self._delete, path)


def _point(link: Path, target: Path) -> None:
    """Make or move a link, at once; the run can be moved with it, because it is relative."""
    temporary = link.with_name(f".{link.name}.new")
    with contextlib.suppress(OSError):  # a file system without links, or something else of that name, costs no run
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(os.path.relpath(target, link.parent), target_is_directory=True)
        temporary.replace(link)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCritic:
    """A critic that was saved with a policy."""

    path: str
    num_pretrained: int
    """Batches that it had learned alone."""
    plateau: PlateauState | None = None
    """How long they had not helped; None where nobody wrote it down."""


def saved_critic(data_dir: Path, row: CheckpointRow) -> SavedCritic | None:
    """The critic of a checkpoint; None where there is none."""
    state: dict[str, Any] = {} if row.state is None else json.loads(row.state)
    if state.get(CRITIC_PATH):
        return SavedCritic(
            path=state[CRITIC_PATH],
            num_pretrained=int(state[CRITIC_BATCHES]),
            plateau=state.get("critic_plateau"),
        )
    info = read_info(CheckpointStore(data_dir).directory(row.path))
    known: Mapping[str, str] = {} if info is None else info.user_metadata
    if CRITIC_PATH not in known:
        return None
    return SavedCritic(path=known[CRITIC_PATH], num_pretrained=int(known[CRITIC_BATCHES]))


def _rows_with_files(run: RunReader, config: Config) -> list[CheckpointRow]:
    """The checkpoints whose files are there, oldest first; a service elsewhere keeps its own."""
    is_elsewhere, store = bool(config.model.base_url), CheckpointStore(run.directory)
    return [row for row in run.checkpoints() if is_elsewhere or store.has(row.path)]


def last_checkpoint(run: RunReader) -> CheckpointRow:
    """The latest checkpoint whose files are there; a run goes on from it."""
    rows = _rows_with_files(run, config_from_yaml(run.config_yaml, str(run.directory)))
    if rows:
        return rows[-1]
    if run.checkpoints():
        place = CheckpointStore(run.directory).directory(run.checkpoints()[-1].path)
        raise CheckpointError(f"the files of this run's checkpoints are missing; expected {place}: copy them back")
    raise CheckpointError(f"{run.directory} has no checkpoint yet; turnwise train --resume begins it again")


def remove_orphans(directory: Path, kept: Sequence[CheckpointRow]) -> None:
    """Delete checkpoints that no row knows: a process ended between writing the files and writing them down."""
    critics = [saved_critic(directory, row) for row in kept]
    paths = [saved.path for saved in (*kept, *critics) if saved is not None]
    CheckpointStore(directory).keep_only(paths, kinds=("weights",))


def remove_snapshots(directory: Path, kept: Sequence[CheckpointRow]) -> None:
    """Delete snapshots of opponents that no kept checkpoint has: they came after the one that the run goes on from."""
    store = CheckpointStore(directory)
    needed = {store.directory(path) for pool in _pools(kept) for path in pool["snapshots"].values()}
    for place in directory.glob(f"checkpoints/*/sampler_weights/{SNAPSHOT_FILES}*"):
        if place not in needed:
            remove_directory(place)


def saved_pool(directory: Path, path: str) -> PoolState | None:
    """The pool of opponents that a run had at the checkpoint with this path; None if it had none."""
    with RunReader(directory) as run:
        return next(iter(_pools([row for row in run.checkpoints() if row.path == path])), None)


def _pools(rows: Sequence[CheckpointRow]) -> list[PoolState]:
    """The pools of opponents in the states of checkpoints."""
    states = [json.loads(row.state) for row in rows if row.state is not None]
    return [state["opponents"] for state in states if state.get("opponents")]


def evaluation_score(row: EvaluationRow) -> float:
    """What checkpoints are compared by: held-out success, or the reward where the world judges no success."""
    return row.reward if math.isnan(row.success) else row.success


def _is_as_good(row: EvaluationRow, best: EvaluationRow) -> bool:
    """Compare by success, or by reward if neither measured any.

    One that measured none beside one that did had none: all of its attempts were cut short.
    """
    if math.isnan(row.success) and math.isnan(best.success):
        return row.reward >= best.reward
    own, other = (0.0 if math.isnan(one.success) else one.success for one in (row, best))
    return own >= other


def best_evaluation(run: RunReader, up_to: int | None = None) -> EvaluationRow | None:
    """The evaluation of the best checkpoint that is there, of equals the later; None where none was evaluated, or the
    run keeps no best.

    Args:
        up_to: look at no step after this one.
    """
    config = config_from_yaml(run.config_yaml, str(run.directory))
    if not config.eval.keep_best:
        return None
    there = {row.step for row in _rows_with_files(run, config)}
    rows = [
        row
        for row in run.evaluations()
        if row.step in there
        and (up_to is None or row.step <= up_to)
        and row.label != "start"
        and not math.isnan(evaluation_score(row))
    ]
    return max(rows, key=lambda row: (evaluation_score(row), row.step), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenCheckpoint:
    """A checkpoint of a run, and why it is this one."""

    row: CheckpointRow
    why: str


def choose_checkpoint(run: RunReader, which: str) -> ChosenCheckpoint:
    """`best`, `last`, or the number of a step. Where nothing was evaluated, or the run keeps no best, best is last."""
    rows = {row.step: row for row in run.checkpoints()}
    if which in ("best", "last"):
        best = best_evaluation(run) if which == "best" else None
        if best is not None:
            return ChosenCheckpoint(row=rows[best.step], why=_why_best(best))
        row = last_checkpoint(run)
        return ChosenCheckpoint(row=row, why=f"step {row.step}, the last checkpoint")
    if not which.isdecimal() or int(which) not in rows:
        known = ", ".join(str(known) for known in rows) or "none"
        raise CheckpointError(
            f"{run.directory} has no checkpoint of step {which}; there are: {known}. Expected one of them, best or last"
        )
    return ChosenCheckpoint(row=rows[int(which)], why=f"step {which}, as asked")


def _why_best(row: EvaluationRow) -> str:
    measured = f"{row.reward:.3f} held-out reward" if math.isnan(row.success) else f"{row.success:.1%} held-out success"
    return f"step {row.step}, the best of the kept checkpoints with {measured}; --step last takes the last one"
