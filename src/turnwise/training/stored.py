"""The one way to stored data: attempts of another run, or a file of pairs, for a run that learns from them.

Ids mean something under the model that sampled them, and rewards in the world that gave them, so data of another model
or another world is refused, whoever reads it. A world's options may differ: easy tasks may teach for hard ones. Only
what was played for training is ever learned from; evaluations play held-out tasks. A file of tasks (`env.tasks`) has a
split of its own, and may hold out what another run has trained on: data at such tasks is left out, and a run says so.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from turnwise.config.config import Config
from turnwise.config.files import config_from_yaml
from turnwise.credit.datums import dialogue_to_datums
from turnwise.credit.preferences import PreferencePair
from turnwise.credit.shaping import NO_SHAPING, Shaping, shape_trajectory
from turnwise.doctor import Finding, Fix
from turnwise.envs.base import Task
from turnwise.envs.joint import SEPARATOR, without_level
from turnwise.errors import ConfigError, DataError
from turnwise.methods.sft import Dialogue
from turnwise.models.directories import is_same_model
from turnwise.rollout.sources import ReadDialogues, ReadPairs
from turnwise.runlog.reader import RunReader
from turnwise.runlog.schema import AttemptRow
from turnwise.training.assemble import Parts, make_shaping
from turnwise.training.pairs import read_pairs
from turnwise.trajectory import Trajectory, trajectory_from_json

Altered = Literal["rewards", "mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The world in which stored data was played, and the model that played it."""

    world: str
    model: str


def origin_of(config: Config, member: str = "") -> Origin:
    """The origin of a run's data, by names that also hold in another folder.

    Args:
        member: The member of a mix that is meant; empty: all of them, or the run has one world.
    """
    world, model = config.env.name, config.model.alias or config.model.name
    if member and member not in config.env.mix:
        known = ", ".join(config.env.mix) or "none, it has one world"
        raise ConfigError(f"no member {member!r} in this run's mix; there are: {known}")
    if config.env.mix:
        every = f"mix of {', '.join(sorted({one.name for one in config.env.mix.values()}))}"
        world = config.env.mix[member].name if member else every
    file, _, attribute = world.rpartition(":")
    if file.endswith(".py"):
        world = f"{Path(file).expanduser().resolve()}:{attribute}"
    path = Path(model).expanduser()
    return Origin(world=world, model=str(path.resolve()) if path.exists() else model)


def own_task(config: Config, task_id: str) -> tuple[str, str]:
    """The world that plays a task of a run, and the task's id there: without the member of a mix, and the level.

    So a task is the same one in a mix, in a curriculum and in a run of its own.
    """
    env, member = config.env, ""
    if env.mix:
        member, _, task_id = task_id.partition(SEPARATOR)
    own = env.mix[member] if member else env
    if own.curriculum or own.tasks:
        task_id = without_level(task_id)
    return origin_of(config, member).world, task_id


def check_origin(came: Origin, wanted: Origin, source: str, *, other: str = "this run has") -> None:
    """Refuse what another model or another world made."""
    for option, was, expected, is_same in (
        ("env.name", came.world, wanted.world, came.world == wanted.world),
        ("model.name", came.model, wanted.model, is_same_model(came.model, wanted.model)),
    ):
        if not is_same:
            raise ConfigError(
                f"{source} was played with {option}={was}; {other} {expected}. Its ids and rewards mean something else "
                "there: name data of the same world and model"
            )


class HeldOutTasks:
    """Knows the tasks that a run measures itself on, and counts the stored data at them."""

    def __init__(self, config: Config, tasks: Sequence[Task] = ()) -> None:
        whole = origin_of(config).world
        self._keys = {
            key
            for task in tasks
            for world, task_id in (own_task(config, task.id), (whole, task.id))
            for key in _task_keys(world, task_id, task.data)
        }
        self.num_met = 0
        """Attempts and pairs at one of the tasks."""

    def holds(self, world: str, task_id: str, data: Mapping[str, Any]) -> bool:
        """Whether stored data is at one of the tasks, under whatever id; it is counted then."""
        is_held_out = not self._keys.isdisjoint(_task_keys(world, task_id, data))
        self.num_met += is_held_out
        return is_held_out

    @property
    def words(self) -> str:
        """What to say where nothing else is left to learn from."""
        return f"; {self.num_met} are at tasks that this run holds out" if self.num_met else ""

    def finding(self, option: str) -> Finding | None:
        """Says how much of an option's data is left out; None: nothing is."""
        if not self.num_met:
            return None
        return Finding(
            name="held_out_data_left_out",
            seen=f"{self.num_met} attempts or pairs of {option} are at tasks that this run holds out",
            why="the policy would be measured on what it has learned; they are left out",
            fixes=(Fix(text="hold out the same tasks in both runs, such as with the same env.tasks"),),
            numbers={"left_out": self.num_met},
        )


def _task_keys(world: str, task_id: str, data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What makes a task the same as another one."""
    yield world, task_id
    if data:
        yield world, json.dumps(dict(data), sort_keys=True)


def _data_of(run: RunReader, task_id: str) -> Mapping[str, Any]:
    """A task's data; empty where a run did not write it down, which only its id names then."""
    try:
        return run.task(task_id)
    except DataError:
        return {}


@contextmanager
def open_stored(path: str, config: Config, option: str) -> Generator[tuple[RunReader, Config]]:
    """A run whose attempts `config` may learn from, and its own config; `option` is what named it."""
    with RunReader(path) as run:
        stored = config_from_yaml(run.config_yaml, str(run.directory))
        check_origin(origin_of(stored, config.data.world), origin_of(config), f"{option}={path}")
        yield run, stored


def train_rows(run: RunReader, member: str = "") -> list[AttemptRow]:
    """The attempts that may be learned from: played for training, not failed, and with their tokens.

    Args:
        member: The member of a mix whose attempts are meant; empty: all.
    """
    own = f"{member}{SEPARATOR}" if member else ""
    rows = [row for row in run.attempts(phase="train") if row.has_tokens and row.outcome != "failed"]
    return [row for row in rows if row.task_id.startswith(own)]


def altered(row: AttemptRow, stored: Config) -> set[Altered]:
    """The parts of a stored attempt that the run's method changed after it was played.

    Nothing, since run directories of version 5.
    """
    if row.is_as_played or row.phase == "eval":
        return set()
    found: set[Altered] = set()
    if set(stored.reward.changed_options()) - {"on_truncated"}:
        found.add("rewards")
    if stored.reward.on_truncated == "mask" or stored.method.branches:
        found.add("mask")
    return found


def check_stored_data(parts: Parts) -> None:
    """Refuse stored data that a run cannot learn from, before a model is loaded."""
    config, source, held_out = parts.config, parts.method.source, HeldOutTasks(parts.config, parts.held_out)
    if isinstance(source, ReadPairs):
        read_training_pairs(source, config, held_out)
    elif isinstance(source, ReadDialogues) and is_dialogue_file(source.path):
        read_file_dialogues(source.path, config, held_out)
    elif isinstance(source, ReadDialogues) and source.path:
        with open_stored(source.path, config, "data.dialogues"):
            pass
    critic = config.critic
    if not (parts.needs_critic and critic.pretrain_steps):
        return
    if is_dialogue_file(critic.pretrain_from):
        read_critic_attempts(critic.pretrain_from, config, held_out)
    elif critic.pretrain_from not in ("rollouts", "demonstrations"):
        with open_stored(critic.pretrain_from, config, "critic.pretrain_from"):
            pass


def read_training_pairs(source: ReadPairs, config: Config, held_out: HeldOutTasks) -> list[PreferencePair]:
    """The pairs of a file, each of which has something to train on both sides; none at a held-out task."""
    stored, option = read_pairs(Path(source.path)), f"data.pairs={source.path}"
    for origin in dict.fromkeys(Origin(world=one.world, model=one.model) for one in stored):
        check_origin(origin, origin_of(config), option)
    if source.only_branch_turn and any(one.kind == "dpo" for one in stored):
        raise ConfigError(
            f"{option} holds the best against the worst of some dialogues (--kind dpo), and "
            f"method={config.method.name} regresses on the difference of any two; make "
            "pairs with: turnwise pairs ... --kind refuel"
        )
    masked = [i for i, one in enumerate(stored) if one.pair.is_masked(only_branch_turn=source.only_branch_turn)]
    if masked:
        what = "at the turn where they part" if source.only_branch_turn else "in any turn"
        raise ConfigError(
            f"{option}: {len(masked)} of {len(stored)} pairs, the first in row {masked[0]}, have a side with nothing "
            f"to train {what}; method={config.method.name} compares two sides. Make the file again with: turnwise pairs"
        )
    found = [one.pair for one in stored if not held_out.holds(one.world, one.pair.chosen.task_id, one.task)]
    if not found:
        raise ConfigError(f"{option} holds no pair to learn from{held_out.words}")
    return found


def read_run_dialogues(path: str, config: Config, held_out: HeldOutTasks) -> list[Dialogue]:
    """The successes that a run had in training, or the dialogues of a file, in the ids that were sampled."""
    if is_dialogue_file(path):
        return read_file_dialogues(path, config, held_out)
    found: list[Dialogue] = []
    with open_stored(path, config, "data.dialogues") as (run, stored):
        for row in train_rows(run, config.data.world):
            if row.is_success and not held_out.holds(*own_task(stored, row.task_id), _data_of(run, row.task_id)):
                ids = replies_of(run.attempt(row.id).trajectory)
                if ids:
                    found.append(Dialogue(datums=tuple(dialogue_to_datums(ids))))
    if not found:
        raise ConfigError(
            f"data.dialogues={path} holds no success of its training with tokens to train; there is nothing to imitate"
            f"{held_out.words}"
        )
    return found


def is_dialogue_file(path: str) -> bool:
    """Whether an option names a file of attempts, not a run."""
    return path.endswith(".jsonl")


def read_file_dialogues(path: str, config: Config, held_out: HeldOutTasks) -> list[Dialogue]:
    """The attempts of a pool that `turnwise pools` wrote: their replies, or the world's words in them."""
    option, found = f"data.dialogues={path}", list[Dialogue]()
    for one in _file_attempts(path, config, option, held_out):
        ids = world_words(one.trajectory) if one.learn == "world" else replies_of(one.trajectory)
        if ids:
            found.append(Dialogue(datums=tuple(dialogue_to_datums(ids))))
    if not found:
        raise ConfigError(f"{option} holds nothing to learn from{held_out.words}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileAttempt:
    """One line of a file that `turnwise pools` wrote."""

    trajectory: Trajectory
    """With its rewards as they were played."""
    learn: str
    """The side whose words a dialogue teaches: `replies` or `world`."""


def _file_attempts(path: str, config: Config, option: str, held_out: HeldOutTasks) -> Iterator[_FileAttempt]:
    """The attempts of a file, all of this run's world and model; `option` is what named it."""
    place = Path(path).expanduser()
    if not place.is_file():
        raise ConfigError(f"{option} is not there; expected a file that turnwise pools wrote, or a run directory")
    for number, line in enumerate(place.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            one = _FileAttempt(trajectory=trajectory_from_json(row["trajectory"]), learn=row.get("learn", "replies"))
            origin = Origin(world=row["world"], model=row["base_model"])
        except (ValueError, KeyError, TypeError, DataError) as cause:
            raise ConfigError(
                f"{option}, line {number} is no attempt: {cause!r}; expected a line that turnwise pools wrote"
            ) from cause
        check_origin(origin, origin_of(config), f"{option}, line {number}")
        if not held_out.holds(origin.world, one.trajectory.task_id, {}):
            yield one


def replies_of(trajectory: Trajectory) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(context, what is learned) of each turn that is trained: the replies, as they were sampled."""
    return [(turn.prompt_ids, turn.sampled_ids) for turn in trajectory.turns if turn.is_trained]


def world_words(trajectory: Trajectory) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(context, what is learned) of each turn but the last: what the world said to the reply, which is not learned.

    A turn whose successor rewrites the history has no such words of its own, and is left out.
    """
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for turn, following in pairwise(trajectory.turns):
        context = (*turn.prompt_ids, *turn.sampled_ids)
        if following.prompt_ids[: len(context)] == context and len(following.prompt_ids) > len(context):
            found.append((context, following.prompt_ids[len(context) :]))
    return found


def read_critic_attempts(path: str, config: Config, held_out: HeldOutTasks) -> list[Trajectory]:
    """The attempts of a run's training, or of a file, with the rewards that this run credits them with."""
    option, wanted = f"critic.pretrain_from={path}", make_shaping(config)
    if is_dialogue_file(path):
        attempts = [shape_trajectory(one.trajectory, wanted) for one in _file_attempts(path, config, option, held_out)]
        if not attempts:
            raise ConfigError(f"{option} holds no attempt; there is nothing to learn from{held_out.words}")
        return attempts
    with open_stored(path, config, "critic.pretrain_from") as (run, stored):
        rows = [
            row
            for row in train_rows(run)
            if not held_out.holds(*own_task(stored, row.task_id), _data_of(run, row.task_id))
        ]
        shapings = [_shaping_left(row, stored, wanted, option) for row in rows]
        found = [shape_trajectory(run.attempt(row.id).trajectory, one) for row, one in zip(rows, shapings, strict=True)]
    if not found:
        raise ConfigError(f"{option} holds no attempt with its tokens; there is nothing to learn from{held_out.words}")
    return found


def _shaping_left(row: AttemptRow, stored: Config, wanted: Shaping, option: str) -> Shaping:
    """The shaping that a row's rewards still need: all of it, unless they are stored as shaped."""
    if "rewards" in altered(row, stored):
        if make_shaping(stored) == wanted:
            return NO_SHAPING
        raise ConfigError(
            f"{option} was written by an older turnwise, with its rewards shaped, and this run shapes them in another "
            "way; set the same reward section, or critic.pretrain_from=rollouts"
        )
    if not row.is_as_played and wanted.reward.potential:
        raise ConfigError(
            f"{option} was written by an older turnwise, without the potentials that reward.potential reads; set "
            "critic.pretrain_from=rollouts"
        )
    return wanted


def check_pairable(rows: Sequence[AttemptRow], stored: Config, run: str, *, only_branch_turn: bool) -> None:
    """Refuse attempts of an older turnwise whose rewards, or masks that pairs would train by, are a method's own."""
    what = {name for row in rows for name in altered(row, stored)} - ({"mask"} if only_branch_turn else set())
    if what:
        named = " and ".join(
            {"rewards": "shaped rewards", "mask": "the method's own mask"}[name] for name in sorted(what)
        )
        raise ConfigError(
            f"{run} was written by an older turnwise, which stored {named} in place of what was played; play pairs "
            f"with its policy instead: turnwise pairs {run}, without --stored"
        )
