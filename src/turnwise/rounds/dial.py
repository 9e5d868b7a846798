"""Which tasks a round plays: solved ones are retired, and new ones come from the level that the dial shows.

The dial rises by one level when the policy's attempts at the present level are good often enough. Without a verdict
nobody knows what is solved: the level stays, and no task is retired. Tasks are drawn from the train split of the world
at that level. A task is proposed once at a level; a held-out task is never proposed, by id or by content.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.config.config import Config
from turnwise.envs.base import Split
from turnwise.envs.difficulty import levels_of
from turnwise.envs.listed import NO_LEVEL, ListedTask, level_id
from turnwise.envs.registry import load_target
from turnwise.errors import ConfigError
from turnwise.rollout.seeds import derive_seed
from turnwise.rounds.config import FlywheelConfig
from turnwise.rounds.store import PlayedAttempt, PoolStore, content_of
from turnwise.training.objects import PythonObjects

DRAWS_PER_TASK = 4
"""Tasks to draw for each that is needed: some were played before, or are held out."""
LEVEL = "level"
"""The key of the dial in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelTasks:
    """Draws the tasks of a world, level by level."""

    config: Config
    objects: PythonObjects

    @property
    def levels(self) -> list[int]:
        """The world's levels, from the easiest; one without a dial has a single level."""
        target = self.objects.env if self.objects.env is not None else load_target(self.config.env.name)
        return list(range(len(levels_of(target, self.config.env.options)))) or [NO_LEVEL]

    def draw(self, level: int, split: Split, count: int, seed: int) -> list[ListedTask]:
        env = self.config.env.model_copy(update={"difficulty": level, "tasks": ""})
        world = self.objects.make_world(env, max_turns=self.config.rollout.max_turns)
        found = {task.id: task for task in world.tasks(split, count, seed)}
        return [ListedTask(task=task, split=split, difficulty=level) for task in found.values()]


class TaskDial:
    """Proposes and retires the tasks of a flywheel."""

    def __init__(self, store: PoolStore, source: LevelTasks, options: FlywheelConfig) -> None:
        self._store = store
        self._source = source
        self._options = options
        self._seed = source.config.train.seed

    @property
    def level(self) -> int:
        """The level that new tasks come from."""
        return int(self._store.meta(LEVEL) or 0)

    def hold_out(self) -> None:
        """Draw the held-out tasks of every level that is evaluated."""
        levels = self._source.levels
        wanted = list(self._options.eval_levels) or levels
        unknown = [level for level in wanted if level not in levels]
        if unknown:
            raise ConfigError(f"flywheel.eval_levels has {unknown[0]}; this world has {levels[0]} to {levels[-1]}")
        seed = derive_seed(self._seed, "held out")
        for level in wanted:
            found = self._source.draw(level, "test", self._options.eval_tasks, seed)
            if not found:
                raise ConfigError(f"level {level} has no held-out task; leave it out of flywheel.eval_levels")
            self._store.add_held_out(found)

    def begin(self) -> int:
        """Propose the tasks of the first round. Returns how many there are."""
        levels = self._source.levels
        if self._options.start_level not in (*levels, 0):
            raise ConfigError(
                f"flywheel.start_level={self._options.start_level}; this world has the levels 0 to {levels[-1]}"
            )
        self._store.set_meta(LEVEL, str(levels[0] if levels == [NO_LEVEL] else self._options.start_level))
        num_proposed = self._fill(1)
        if not num_proposed:
            raise ConfigError("the world has no task to train on that is not held out; lower flywheel.eval_tasks")
        return num_proposed

    def turn(self, number: int, attempts: Sequence[PlayedAttempt]) -> dict[str, object]:
        """After a round: retire what is solved, raise the level if it is, and propose tasks for the next round."""
        shares: dict[str, list[bool]] = defaultdict(list)
        for one in attempts:
            shares[one.task_id].append(bool(one.is_good))
        is_judged = self._options.verdict != "none"  # without a verdict every attempt is good, and nothing is solved
        solved = [task for task, good in shares.items() if sum(good) / len(good) >= self._options.retire_at]
        solved = solved if is_judged else []
        level, share = self.level, self._share_of_level(shares)
        self._store.retire(solved, number)
        levels = self._source.levels
        if is_judged and self._options.dial == "rising" and share is not None and share >= self._options.raise_at:
            self._store.set_meta(LEVEL, str(min(level + 1, levels[-1])))
        proposed = self._fill(number + 1)
        return {"retired": len(solved), "proposed": proposed, "level": self.level, "share_at_level": share}

    def _share_of_level(self, shares: dict[str, list[bool]]) -> float | None:
        """Share of good attempts at tasks of the present level; None if none was played."""
        level = {one.task.id for one in self._store.active_tasks() if one.difficulty == self.level}
        good = [is_good for task, own in shares.items() if task in level for is_good in own]
        return sum(good) / len(good) if good else None

    def _fill(self, number: int) -> int:
        """Propose as many tasks as are missing; a level without new tasks hands on to the next."""
        missing = self._options.tasks - len(self._store.active_tasks())
        found: list[ListedTask] = []
        for level, up_to in self._plan(missing):
            found += self._draw_new(level, up_to - len(found), number, found)
        self._store.add_tasks(found, number)
        return len(found)

    def _plan(self, missing: int) -> list[tuple[int, int]]:
        """(level, how many tasks there should be with those of that level), in the order of drawing."""
        levels = self._source.levels
        if self._options.dial == "uniform":
            return [(level, missing * index // len(levels)) for index, level in enumerate(levels, start=1)]
        if self._options.dial == "fixed":
            return [(self.level, missing)]
        return [(level, missing) for level in levels if level >= self.level]

    def _draw_new(self, level: int, count: int, number: int, chosen: Sequence[ListedTask]) -> list[ListedTask]:
        """Up to `count` tasks that were never proposed at this level and are held out at none."""
        ids, contents = self._store.known(level)
        ids |= {one.task.id for one in chosen if one.difficulty == level}
        contents |= {content_of(one.task) for one in chosen if one.difficulty == level}
        seed = derive_seed(self._seed, "propose", number, level)
        num_draws = DRAWS_PER_TASK * (count + len(self._store.active_tasks()))
        found: list[ListedTask] = []
        for one in self._source.draw(level, "train", num_draws, seed) if count > 0 else []:
            content, names = content_of(one.task), {one.task.id, level_id(one.task.id, level)}
            if ids.isdisjoint(names) and content not in contents and len(found) < count:
                found.append(one)
                contents.add(content)
        return found
