"""Any world, with the tasks of a file in place of its own draws: the option `env.tasks`.

    {"id": "rooms-redblured", "split": "train", "data": {"rooms": [...]}, "difficulty": 1}

One line is one task. `difficulty` is the level of the world that the task belongs to (`env.difficulty`); without it,
the world is taken as the run's options make it. A file may hold tasks of several levels: each is played in the world of
its own level. A task that is in both splits is refused, because a policy would be measured on what it learned from; so
is a task that the world cannot play, such as one that was written for another world. Levels may know the same task by
the same name; then the file calls it `level2/NAME`, and the world of level 2 plays it as `NAME`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from turnwise.envs.base import Env, Split, Task, World
from turnwise.envs.joint import SEPARATOR, level_name
from turnwise.envs.sync import as_env
from turnwise.envs.wrapped import WorldWrapper
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.runtime.blocking import run_to_end
from turnwise.runtime.raised_at import describe_error
from turnwise.trajectory import Message

NO_LEVEL = -1
"""The level of a task that has none."""
MakeLevel = Callable[[int], World]
"""Makes the world of a level."""
_NUM_OWN = 16
"""Tasks that the world draws, to see which data its tasks hold."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ListedTask:
    """A task of a file."""

    task: Task
    split: Split
    difficulty: int = NO_LEVEL

    @property
    def own_task(self) -> Task:
        """The task as the world of its level knows it."""
        return dataclasses.replace(self.task, id=self.task.id.removeprefix(level_id("", self.difficulty)))


def level_id(task_id: str, level: int) -> str:
    """The name of a level's task where another level has a task of the same name."""
    return f"{level_name(level)}{SEPARATOR}{task_id}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ListedWorld(WorldWrapper):
    """A world that plays listed tasks."""

    inner: World
    listed: tuple[ListedTask, ...]
    levels: Mapping[int, World] = dataclasses.field(default_factory=dict[int, World])
    """The world of each level that a task names."""

    @property
    def max_turns(self) -> int:
        return max(world.max_turns for world in (self.inner, *self.levels.values()))

    @property
    def max_tokens(self) -> int:
        return max(world.max_tokens for world in (self.inner, *self.levels.values()))

    def tasks(self, split: Split, count: int, seed: int) -> Sequence[Task]:  # noqa: ARG002 - the file says which
        """The first `count` tasks of the file; fewer if it has fewer."""
        return [one.task for one in self.listed if one.split == split][:count]

    def make_env(self, task: Task, seed: int) -> Env:
        listed = next((one for one in self.listed if one.task.id == task.id), None)
        if listed is None:
            return self.inner.make_env(task, seed)
        own = dataclasses.replace(task, id=listed.own_task.id)
        return self.levels.get(listed.difficulty, self.inner).make_env(own, seed)

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        """Demonstrations of the world's own tasks, because listed tasks have no script; none of a held-out task.

        The world's own split is not the file's: a task of its train split may be held out here.
        """
        found = self.inner.demonstrations(count, seed)
        played = self.inner.tasks("train", count, seed) if found else ()
        if len(played) != len(found):
            return found  # no scripts of the tasks that it draws
        held_out = [one.own_task for one in self.listed if one.split == "test"]
        ids, contents = {task.id for task in held_out}, [task.data for task in held_out if task.data]
        pairs = zip(played, found, strict=True)
        return [dialogue for task, dialogue in pairs if task.id not in ids and task.data not in contents]


def list_world(world: World, path: Path, make_level: MakeLevel) -> ListedWorld:
    """`world` with the tasks of a file."""
    listed = read_tasks(path)
    levels = {level: make_level(level) for level in sorted({one.difficulty for one in listed} - {NO_LEVEL})}
    for level, own in {NO_LEVEL: world, **levels}.items():
        _check_playable(path, own, [one.own_task for one in listed if one.difficulty == level])
    return ListedWorld(inner=world, listed=listed, levels=levels)


def _check_playable(path: Path, world: World, tasks: Sequence[Task]) -> None:
    """Refuse a task without some of the data that the world's own tasks hold, unless the world makes an env of it."""
    if not tasks:
        return
    try:
        own = [frozenset(task.data) for task in world.tasks("train", _NUM_OWN, 0)]
    except TurnwiseError:
        return  # a world that draws none has none to compare with
    always = frozenset[str]().union(*own).intersection(*own)
    checked: set[frozenset[str]] = set()
    for task in tasks:
        held = frozenset(task.data)
        if always <= held or held in checked:
            continue
        checked.add(held)
        try:
            env = world.make_env(task, 0)
        except Exception as cause:
            raise ConfigError(
                f"env.tasks={path}: {world.name} cannot play task {task.id}. Its data holds {_names(held)}; the data "
                f"of a task of {world.name} holds {_names(always)}. Was the file written for another world? Making "
                f"the env ended in {describe_error(cause)}"
            ) from cause
        run_to_end(as_env(env).close())


def _names(keys: frozenset[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing"


def write_tasks(path: Path, tasks: Iterable[ListedTask]) -> None:
    """Write a file of tasks; it appears whole or not at all."""
    lines = [
        json.dumps({"id": one.task.id, "split": one.split, "difficulty": one.difficulty, "data": dict(one.task.data)})
        for one in tasks
    ]
    part = path.with_name(f"{path.name}.part")
    part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    part.replace(path)


def read_tasks(path: Path) -> tuple[ListedTask, ...]:
    """Read a file of tasks."""
    place = path.expanduser()
    if not place.is_file():
        raise ConfigError(f"env.tasks={path} is not there; expected a file with one JSON object per line")
    found: dict[str, ListedTask] = {}
    for number, line in enumerate(place.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        one = _read_line(line, f"env.tasks={path}, line {number}")
        if one.task.id in found:
            raise ConfigError(f"env.tasks={path}, line {number}: task {one.task.id} is there twice; expected it once")
        found[one.task.id] = one
    if not found:
        raise ConfigError(f"env.tasks={path} holds no task; expected one JSON object per line")
    _check_apart(path, found.values())
    return tuple(found.values())


def _check_apart(path: Path, tasks: Iterable[ListedTask]) -> None:
    """Refuse a task that is in both splits, under whatever id."""
    seen: dict[tuple[int, str], ListedTask] = {}
    for one in tasks:
        if not one.task.data:
            continue  # without data, the id alone identifies a task
        twin = seen.setdefault((one.difficulty, json.dumps(one.task.data, sort_keys=True)), one)
        if twin.split != one.split:
            raise ConfigError(
                f"env.tasks={path}: {twin.task.id} ({twin.split}) and {one.task.id} ({one.split}) hold the same data; "
                "a task that is trained on cannot be held out: leave one of them out"
            )


def _read_line(line: str, where: str) -> ListedTask:
    expected = '{"id": ..., "split": "train" or "test", "data": {...}}'
    try:
        row: Any = json.loads(line)
    except ValueError as cause:
        raise ConfigError(f"{where} is not JSON: {cause}; expected {expected}") from cause
    if not isinstance(row, dict):
        raise ConfigError(f"{where} holds {type(row).__name__}; expected {expected}")
    fields = cast(dict[str, Any], row)
    split, level, data = fields.get("split", "train"), fields.get("difficulty", NO_LEVEL), fields.get("data", {})
    if not isinstance(fields.get("id"), str) or split not in get_args(Split) or not isinstance(data, dict):
        raise ConfigError(f"{where}: id={fields.get('id')!r}, split={split!r}; expected {expected}")
    if not isinstance(level, int):
        raise ConfigError(f"{where}: difficulty={level!r}; expected the number of a level, from 0")
    return ListedTask(task=Task(id=fields["id"], data=cast(dict[str, Any], data)), split=split, difficulty=level)
