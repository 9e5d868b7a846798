"""Several worlds as one: the members of a mix (`env.mix`), or the levels of a difficulty dial (`env.curriculum`).

    guess_number/guess-1-16-s5-p3            a task of a mix: the member's name, then the member's own id
    level2/rooms-redblured                   a task of a curriculum
    doors/level2/rooms-redblured             a member of a mix that has a curriculum

The id of a task says which part plays it. So a group, which is attempts at one task, never mixes parts, and everything
that a run writes down about an attempt says where it was played. Its labels say so too (`world`, `level`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from turnwise.envs.base import Env, Split, Task, World
from turnwise.errors import DataError
from turnwise.trajectory import WORLD_LABEL, Message

PartKind = Literal["world", "level"]
SEPARATOR = "/"
LEVEL_PREFIX = "level"
LEVEL_LABEL = "level"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JointWorld:
    """Several worlds, by name; each plays its own tasks."""

    name: str
    kind: PartKind
    parts: Mapping[str, World]
    sources: Mapping[str, str]
    """What each part was made of, such as `guess_number`: parts with one source may know the same tasks."""
    tested: tuple[str, ...] = ()
    """The parts that have held-out tasks; empty: all."""
    apart: frozenset[str] = frozenset()
    """Contents of tasks that are held out: no part trains on them, nor shows them."""

    @property
    def max_turns(self) -> int:
        """The most of all parts; `leaf_of` has the limit of a task's own."""
        return max(part.max_turns for part in self.parts.values())

    @property
    def max_tokens(self) -> int:
        return max(part.max_tokens for part in self.parts.values())

    def tasks(self, split: Split, count: int, seed: int) -> Sequence[Task]:
        """`count` tasks, as many of each part; a few less if some are held out by another part."""
        found = [task for name, own in self._divide(count) for task in self._tasks_of(name, split, own, seed)]
        return found if split == "test" else [task for task in found if not self.is_apart(task)]

    def make_env(self, task: Task, seed: int) -> Env:
        name, own = self.own_task(task)
        return self.parts[name].make_env(own, seed)

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        """The same number of tasks of each part, in the order of `tasks`, without those that another part holds out."""
        found: list[Sequence[Message]] = []
        for name, own in self._divide(count):
            shown = self.parts[name].demonstrations(own, seed)
            played = self._tasks_of(name, "train", own, seed) if shown else ()
            if len(played) != len(shown):  # no scripts of the tasks that it draws
                found += shown
                continue
            found += [one for task, one in zip(played, shown, strict=True) if not self.is_apart(task)]
        return found

    def own_task(self, task: Task) -> tuple[str, Task]:
        """The part that plays a task, and the task as that part knows it."""
        name, _, own_id = task.id.partition(SEPARATOR)
        if name not in self.parts or not own_id:
            raise DataError(f"task {task.id} belongs to none of {', '.join(self.parts)}; expected NAME/ID")
        return name, Task(id=own_id, data=task.data)

    def joint_task(self, name: str, task: Task) -> Task:
        """A part's task as this world knows it."""
        return Task(id=f"{name}{SEPARATOR}{task.id}", data=task.data)

    def kept_apart(self, held_out: Iterable[Task]) -> JointWorld:
        """The same world, which neither trains on these tasks nor shows them, in whichever part they come up."""
        return dataclasses.replace(self, apart=frozenset(key for task in held_out for key in self.contents(task)))

    def is_apart(self, task: Task) -> bool:
        """Whether some part holds this task out."""
        return not self.apart.isdisjoint(self.contents(task))

    def contents(self, task: Task) -> Iterator[str]:
        """What makes a task the same as another one, of whichever part."""
        name, own = self.own_task(task)
        part = self.parts[name]
        if isinstance(part, JointWorld):
            yield from part.contents(own)
            return
        yield f"{self.sources[name]} {own.id}"
        if own.data:
            yield f"{self.sources[name]} {json.dumps(own.data, sort_keys=True)}"

    def _tasks_of(self, name: str, split: Split, count: int, seed: int) -> list[Task]:
        found = self.parts[name].tasks(split, count, seed) if count else ()
        return [self.joint_task(name, task) for task in found]

    def _divide(self, count: int) -> list[tuple[str, int]]:
        """How many of `count` each part gives; the first ones give one more."""
        each, more = divmod(count, len(self.parts))
        return [(name, each + (index < more)) for index, name in enumerate(self.parts)]


def level_name(level: int) -> str:
    """The name of the part that plays a level."""
    return f"{LEVEL_PREFIX}{level}"


def without_level(task_id: str) -> str:
    """A task's id without the level that a curriculum, or a file with tasks of several levels, put before it.

    >>> without_level("level2/board-3"), without_level("board-3"), without_level("levels/3")
    ('board-3', 'board-3', 'levels/3')
    """
    name, _, own = task_id.partition(SEPARATOR)
    is_level = name.startswith(LEVEL_PREFIX) and name.removeprefix(LEVEL_PREFIX).isdecimal()
    return own if is_level else task_id


def leaf_of(world: World, task_id: str) -> str:
    """The names of the parts that play a task: `doors/level2`; empty for a world that has no parts."""
    if not isinstance(world, JointWorld):
        return ""
    name, own = world.own_task(Task(id=task_id))
    inner = leaf_of(world.parts[name], own.id)
    return f"{name}{SEPARATOR}{inner}" if inner else name


def leaves(world: World) -> dict[str, World]:
    """The worlds that play, by the names that `leaf_of` gives; a world without parts by the empty name."""
    if not isinstance(world, JointWorld):
        return {"": world}
    return {
        f"{name}{SEPARATOR}{inner}" if inner else name: leaf
        for name, part in world.parts.items()
        for inner, leaf in leaves(part).items()
    }


def wrap_leaves(world: World, wrap: Callable[[World], World]) -> World:
    """The same world with every world that plays in a wrapper."""
    if not isinstance(world, JointWorld):
        return wrap(world)
    parts = {name: wrap_leaves(part, wrap) for name, part in world.parts.items()}
    return dataclasses.replace(world, parts=parts)


def labels_of(world: World, task_id: str) -> dict[str, str]:
    """What an attempt at a task is labelled with: the member of a mix, the level of a curriculum."""
    if not isinstance(world, JointWorld):
        return {}
    name, own = world.own_task(Task(id=task_id))
    label = {WORLD_LABEL: name} if world.kind == "world" else {LEVEL_LABEL: name.removeprefix(LEVEL_PREFIX)}
    return label | labels_of(world.parts[name], own.id)
