"""Which task each group of a run gets, by the group's number: from one world, from a mix, or by a curriculum.

    WorldTasks       shuffled passes over the tasks of one world
    MixedTasks       the tasks of each member of a mix; the shares say whose turn it is
    CurriculumTasks  the tasks of each level; how often attempts at a level succeeded says how likely it is

The first two follow from the number and the run's seed alone. Of the members of a mix that are behind their share, the
next group goes to the one that would be too far behind first. So after any number of groups each member has its share
of them, up to one group (for k members up to 1 - 1 / (2 k - 2): Tijdeman 1980, the chairman assignment problem).

A curriculum depends on what was played, so it has a state, which every checkpoint holds. The success rate of a level
counts its last `window` groups; a level that nobody played is taken to be at the target. A level at the target is the
likeliest; one that always or never succeeds, which teaches nothing, gets only its part of the `explore` share:

    chance(level) = explore / levels + (1 - explore) * closeness(level) / sum of closeness
    closeness     = 1 - |rate - target| / max(target, 1 - target)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from turnwise.envs.base import Task
from turnwise.envs.config import OneWorld
from turnwise.errors import ConfigError
from turnwise.rollout.seeds import derive_seed

T = TypeVar("T")
TaskOrderState = dict[str, Any]
"""How far an order of tasks has come, ready for JSON."""
ROUNDING = 1e-9
PRIOR_ATTEMPTS = 2.0
"""The weight, in attempts, of the assumption that a level is at the target."""


class ShuffledItems(Generic[T]):
    """An endless sequence of batches of the items, in shuffled passes: each item comes once before any comes again.

    A batch depends on its number and the seed alone, so a resumed run goes on with the very tasks that were next.
    """

    def __init__(self, items: Sequence[T], batch_size: int, seed: int) -> None:
        if not items:
            raise ConfigError("there is nothing to draw from")
        self._items = list(items)
        self._batch_size = batch_size
        self._seed = seed
        self._orders: dict[int, NDArray[np.int64]] = {}
        """The order of the pass that was asked for last, by its number."""

    def __len__(self) -> int:
        return len(self._items)

    def batch(self, index: int) -> list[T]:
        """The batch with that number, from 0. A batch may reach over the end of a pass."""
        first = index * self._batch_size
        return [self.item(position) for position in range(first, first + self._batch_size)]

    def item(self, position: int) -> T:
        """The item at that position, from 0, over all batches."""
        number, offset = divmod(position, len(self._items))
        if number not in self._orders:
            rng = np.random.default_rng(derive_seed(self._seed, "pass", number))
            self._orders = {number: rng.permutation(len(self._items))}
        return self._items[int(self._orders[number][offset])]


class TaskOrder(Protocol):
    """Gives the groups of a run their tasks."""

    def __len__(self) -> int:
        """How many different tasks there are."""
        ...

    def item(self, number: int, /) -> Task:
        """The task of the group with that number. New numbers are asked for one after the other, from 0."""
        ...

    def spread(self, position: int) -> Task:
        """A task for something else than a group of training, such as the critic's pre-training."""
        ...

    def count(self, number: int, outcomes: Sequence[bool]) -> None:
        """Say how the judged attempts of a group ended. Saying it twice counts once."""
        ...

    def chances(self) -> Mapping[str, tuple[float, float]]:
        """The known success rate of each level, and how likely the next group is to get that level.

        It is empty if there are no levels. The name of a member of a mix and its level are joined by `_`.
        """
        ...

    def to_state(self, oldest: int) -> TaskOrderState | None:
        """What cannot be computed again: everything about the groups from number `oldest` on; None: nothing."""
        ...

    def restore(self, state: TaskOrderState) -> None:
        """Go on from a state."""
        ...


class WorldTasks(ShuffledItems[Task]):
    """The tasks of one world."""

    def spread(self, position: int) -> Task:
        return self.item(position)

    def count(self, number: int, outcomes: Sequence[bool]) -> None:
        pass

    def chances(self) -> Mapping[str, tuple[float, float]]:
        return {}

    def to_state(self, oldest: int) -> TaskOrderState | None:  # noqa: ARG002 - everything follows from the number
        return None

    def restore(self, state: TaskOrderState) -> None:
        raise AssertionError(f"the order of one world's tasks has no state, and {state} came")


class MixedTasks:
    """The tasks of a mix's members, which take turns by their shares."""

    def __init__(self, members: Mapping[str, TaskOrder], shares: Mapping[str, float]) -> None:
        total = sum(shares.values())
        self._members = dict(members)
        self._shares = {name: shares[name] / total for name in members}
        self._turns: list[tuple[str, int]] = []
        """The member whose turn each number is, and which of its own tasks that is."""
        self._counts = dict.fromkeys(self._members, 0)
        self._least = 1 / (2 * len(members) - 2)
        """How far a member must be behind its share, in groups, to be next."""

    def __len__(self) -> int:
        return sum(len(member) for member in self._members.values())

    def item(self, number: int) -> Task:
        name, position = self._turn(number)
        return self._members[name].item(position)

    def spread(self, position: int) -> Task:
        name, own = self._turn(position)
        return self._members[name].spread(own)

    def count(self, number: int, outcomes: Sequence[bool]) -> None:
        name, position = self._turn(number)
        self._members[name].count(position, outcomes)

    def chances(self) -> Mapping[str, tuple[float, float]]:
        return {
            f"{name}_{level}": chance
            for name, member in self._members.items()
            for level, chance in member.chances().items()
        }

    def to_state(self, oldest: int) -> TaskOrderState | None:
        self._turn(oldest)
        counts = {name: sum(turn[0] == name for turn in self._turns[:oldest]) for name in self._members}
        states = {name: member.to_state(counts[name]) for name, member in self._members.items()}
        found = {name: state for name, state in states.items() if state is not None}
        return found or None

    def restore(self, state: TaskOrderState) -> None:
        for name, own in state.items():
            self._members[name].restore(own)

    def _turn(self, number: int) -> tuple[str, int]:
        while len(self._turns) <= number:
            dealt = len(self._turns) + 1
            behind = {name: share * dealt - self._counts[name] for name, share in self._shares.items()}
            may = [name for name in behind if behind[name] >= self._least - ROUNDING]
            name = min(may, key=lambda one: (1 - self._least - behind[one]) / self._shares[one])
            self._turns.append((name, self._counts[name]))
            self._counts[name] += 1
        return self._turns[number]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumRules:
    """How a curriculum chooses."""

    target: float = 0.5
    window: int = 8
    explore: float = 0.2

    @classmethod
    def of(cls, env: OneWorld) -> CurriculumRules:
        return cls(target=env.curriculum_target, window=env.curriculum_window, explore=env.curriculum_explore)


@dataclass(slots=True)
class _Level:
    tasks: WorldTasks
    num_dealt: int = 0
    results: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    """By the number of a group: how many of its attempts succeeded, of how many."""


class CurriculumTasks:
    """The tasks of a world's levels; levels are chosen by how often attempts at each succeed."""

    def __init__(self, levels: Mapping[str, WorldTasks], rules: CurriculumRules, seed: int) -> None:
        self._levels = {name: _Level(tasks) for name, tasks in levels.items()}
        self._rules = rules
        self._seed = seed
        self._num_dealt = 0
        self._dealt: dict[int, tuple[str, int]] = {}
        """Which level each number got, and which of its tasks that is."""

    def __len__(self) -> int:
        return sum(len(level.tasks) for level in self._levels.values())

    def item(self, number: int) -> Task:
        if number not in self._dealt:
            assert number == self._num_dealt, f"group {number} was asked for, and {self._num_dealt} is next"
            name = self._choose(number)
            self._dealt[number] = name, self._levels[name].num_dealt
            self._levels[name].num_dealt += 1
            self._num_dealt += 1
        name, position = self._dealt[number]
        return self._levels[name].tasks.item(position)

    def spread(self, position: int) -> Task:
        """The levels take turns: nothing is known of them yet."""
        own, index = divmod(position, len(self._levels))
        return list(self._levels.values())[index].tasks.item(own)

    def count(self, number: int, outcomes: Sequence[bool]) -> None:
        if not outcomes:
            return
        results = self._levels[self._dealt[number][0]].results
        results[number] = sum(outcomes), len(outcomes)
        for old in sorted(results)[: -self._rules.window]:
            del results[old]

    def rates(self) -> dict[str, float]:
        """The success rate of each level, over its last groups."""
        found: dict[str, float] = {}
        for name, level in self._levels.items():
            good, total = (
                (sum(counts) for counts in zip(*level.results.values(), strict=True)) if level.results else (0, 0)
            )
            found[name] = (good + PRIOR_ATTEMPTS * self._rules.target) / (total + PRIOR_ATTEMPTS)
        return found

    def chances(self) -> Mapping[str, tuple[float, float]]:
        rates, target, explore = self.rates(), self._rules.target, self._rules.explore
        close = {name: 1 - abs(rate - target) / max(target, 1 - target) for name, rate in rates.items()}
        total, each = sum(close.values()), 1 / len(rates)
        return {
            name: (rate, explore * each + (1 - explore) * (close[name] / total if total > 0 else each))
            for name, rate in rates.items()
        }

    def to_state(self, oldest: int) -> TaskOrderState | None:
        return {
            "num_dealt": self._num_dealt,
            "dealt": [[number, *turn] for number, turn in self._dealt.items() if number >= oldest],
            "levels": {
                name: {"num_dealt": level.num_dealt, "results": [[key, *value] for key, value in level.results.items()]}
                for name, level in self._levels.items()
            },
        }

    def restore(self, state: TaskOrderState) -> None:
        self._num_dealt = state["num_dealt"]
        self._dealt = {number: (name, position) for number, name, position in state["dealt"]}
        for name, held in state["levels"].items():
            level = self._levels[name]
            level.num_dealt = held["num_dealt"]
            level.results = {number: (good, total) for number, good, total in held["results"]}

    def _choose(self, number: int) -> str:
        chances = self.chances()
        weights = np.array([chance for _, chance in chances.values()])
        rng = np.random.default_rng(derive_seed(self._seed, "level", number))
        return list(chances)[int(rng.choice(len(weights), p=weights / weights.sum()))]
