"""A pool of opponents: the base model, snapshots of the policy, and scripts, drawn by weights.

    pool.draw(task, seed) -> Opponent          # the same for all attempts of a group, whatever joins meanwhile

A policy that plays only against itself forgets how to play others. Earlier snapshots in the pool keep them in its
data. A member's rating is what it leaves the policy: the mean reward of the policy against it, with recent games
counted more. `best` is the snapshot that leaves the least.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from turnwise.envs.base import Task
from turnwise.envs.seats import Opponent
from turnwise.envs.splits import random_for
from turnwise.opponents.config import OpponentConfig

RATING_DECAY = 0.9
"""How much of the old rating is left after one more step with games."""
_REMEMBERED = 4096
"""Groups whose opponent is remembered; more are never under way at once."""


class RatingState(TypedDict):
    """How the policy did against one member."""

    num_games: int
    reward: float


class PoolState(TypedDict):
    """A pool without its models, ready for JSON."""

    snapshots: dict[str, str]
    """Name to checkpoint, oldest first."""
    ratings: dict[str, RatingState]


@dataclass(slots=True, kw_only=True)
class OpponentPool:
    """Members and how often each is drawn."""

    config: OpponentConfig
    base: Opponent | None = None
    scripts: Sequence[str] = ()
    make_script: Callable[[str, Task], Opponent]
    snapshots: OrderedDict[str, Opponent] = field(default_factory=OrderedDict[str, Opponent])
    """By name, oldest first."""
    paths: dict[str, str] = field(default_factory=dict[str, str])
    """Of every snapshot that ever joined: where its checkpoint is."""
    ratings: dict[str, RatingState] = field(default_factory=dict[str, RatingState])
    _drawn: OrderedDict[tuple[str, int], Opponent] = field(default_factory=OrderedDict[tuple[str, int], Opponent])

    def add_snapshot(self, name: str, opponent: Opponent, path: str) -> None:
        """Let a snapshot join. Those that are neither among the last ones nor the best leave."""
        self.snapshots[name], self.paths[name] = opponent, path
        best = self.best
        for old in list(self.snapshots)[: -self.config.keep_last]:
            if old != best:
                del self.snapshots[old]

    @property
    def best(self) -> str | None:
        """The snapshot that leaves the policy the least reward; the newest one while nobody has played."""
        rated = {name: self.ratings[name]["reward"] for name in self.snapshots if name in self.ratings}
        return min(rated, key=lambda name: rated[name]) if rated else next(reversed(self.snapshots), None)

    def draw(self, task: Task, seed: int) -> Opponent:
        """The opponent of the attempts at a task that share this seed."""
        key = (task.id, seed)
        if key not in self._drawn:
            self._drawn[key] = self._draw(task, random_for("pool", task.id, seed).random())
            if len(self._drawn) > _REMEMBERED:
                self._drawn.popitem(last=False)
        return self._drawn[key]

    def shares(self) -> dict[str, float]:
        """How often each member is drawn. Weights of what is not there yet go to the others."""
        config, last = self.config, list(self.snapshots)[-self.config.keep_last :]
        weights: dict[str, float] = {}

        def give(names: Sequence[str], weight: float) -> None:
            for name in names:
                weights[name] = weights.get(name, 0.0) + weight / len(names)

        give([] if self.base is None else [self.base.name], config.base_weight)
        give(last, config.last_weight)
        give([self.best] if self.best is not None else [], config.best_weight)
        give(list(self.scripts), config.scripted_weight)
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items() if weight}

    def record(self, rewards: Mapping[str, Sequence[float]]) -> None:
        """Count the policy's rewards of one step, by opponent."""
        for name, own in rewards.items():
            if not own:
                continue
            mean, old = sum(own) / len(own), self.ratings.get(name)
            rating = mean if old is None else RATING_DECAY * old["reward"] + (1 - RATING_DECAY) * mean
            self.ratings[name] = {"num_games": len(own) + (0 if old is None else old["num_games"]), "reward": rating}

    def to_state(self) -> PoolState:
        return PoolState(snapshots={name: self.paths[name] for name in self.snapshots}, ratings=dict(self.ratings))

    def _draw(self, task: Task, point: float) -> Opponent:
        shares = self.shares()
        bounds = dict(zip(shares, itertools.accumulate(shares.values()), strict=True))
        name = next((one for one, bound in bounds.items() if point < bound), next(reversed(shares)))
        if self.base is not None and name == self.base.name:
            return self.base
        return self.snapshots[name] if name in self.snapshots else self.make_script(name, task)
