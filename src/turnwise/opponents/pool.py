"""A pool of opponents: the base model, snapshots of the policy, and scripts, drawn by weights.

    pool.draw(task, seed) -> Opponent          # the same for all attempts of a group, whatever joins meanwhile

A policy that plays only against itself forgets how to play others. Earlier snapshots in the pool keep them in its
data. Members are rated on the Elo scale (`turnwise.opponents.elo`) by the attempts that they were recorded in: the side
with the larger reward won. The policy itself changes, so its games count as those of the snapshot that it was last. The
policy that training begins with is the first snapshot; if that is the base model, which is a member anyway, the games
before the first snapshot count as those of `start`. `best` is the snapshot with the highest rating.
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np

from turnwise.envs.base import Task
from turnwise.envs.seats import WON_SHARES, Opponent
from turnwise.envs.splits import random_for
from turnwise.opponents.config import OpponentConfig
from turnwise.opponents.elo import elo_ratings

START = "start"
"""The policy's name in the ratings until its first snapshot, while it is the base model."""
SNAPSHOT_FILES = "opponent-"
"""How the names of the snapshots' checkpoints begin."""
_REMEMBERED = 4096
"""Groups whose opponent is remembered; more are never under way at once."""
MIN_GAMES = 16
"""Games on each side from which shares of wins are compared."""


class PoolState(TypedDict):
    """A pool without its models, ready for JSON."""

    snapshots: dict[str, str]
    """Name to checkpoint, oldest first."""
    newest: str
    """The snapshot that the policy was last, or `start`."""
    results: dict[str, dict[str, list[float]]]
    """By snapshot that the policy was, then by opponent: the games that it won, and all games."""


@dataclass(slots=True, kw_only=True)
class OpponentPool:
    """Members and how often each is drawn. Envs are made in threads of their own while the loop's thread records games
    and lets snapshots join, so every method holds the lock."""

    config: OpponentConfig
    base: Opponent | None = None
    scripts: Sequence[str] = ()
    make_script: Callable[[str, Task], Opponent]
    snapshots: OrderedDict[str, Opponent] = field(default_factory=OrderedDict[str, Opponent])
    """The snapshots by name, oldest first."""
    paths: dict[str, str] = field(default_factory=dict[str, str])
    """The checkpoint of each snapshot, while its files are kept."""
    newest: str = START
    results: dict[str, dict[str, list[float]]] = field(default_factory=dict[str, dict[str, list[float]]])
    _drawn: OrderedDict[tuple[str, int], Opponent] = field(default_factory=OrderedDict[tuple[str, int], Opponent])
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def add_snapshot(self, name: str, opponent: Opponent, path: str) -> None:
        """Let a snapshot join. Those that are neither among the last ones nor the best leave; where the best has no
        weight, it leaves, too."""
        with self._lock:
            self.snapshots[name], self.paths[name], self.newest = opponent, path, name
            best = self.best if self.config.best_weight else None
            for old in list(self.snapshots)[: -self.config.keep_last]:
                if old != best:
                    del self.snapshots[old]

    @property
    def best(self) -> str | None:
        """The snapshot with the highest rating, of equals the newest. One without a game is behind all others. None if
        there is none yet."""
        with self._lock:
            ratings = self.ratings()
            return max(reversed(self.snapshots), key=lambda name: ratings.get(name, -math.inf), default=None)

    def ratings(self) -> dict[str, float]:
        """The Elo of every player that has a game, with mean 0. Games of the policy against itself are left out."""
        with self._lock:
            games = [
                (own, other, *counts)
                for own, against in self.results.items()
                for other, counts in against.items()
                if own != other
            ]
        names = list(dict.fromkeys(name for own, other, *_ in games for name in (own, other)))
        index, wins = {name: number for number, name in enumerate(names)}, np.zeros((len(names), len(names)))
        for own, other, won, played in games:
            wins[index[own], index[other]] += won
            wins[index[other], index[own]] += played - won
        return dict(zip(names, elo_ratings(wins).tolist(), strict=True)) if names else {}

    def draw(self, task: Task, seed: int) -> Opponent:
        """The opponent of the attempts at a task that share this seed."""
        key = (task.id, seed)
        with self._lock:
            if key not in self._drawn:
                self._drawn[key] = self._draw(task, random_for("pool", task.id, seed).random())
                if len(self._drawn) > _REMEMBERED:
                    self._drawn.popitem(last=False)
            return self._drawn[key]

    def shares(self) -> dict[str, float]:
        """How often each member is drawn. Weights of what is not there yet go to the others."""
        config, weights = self.config, dict[str, float]()
        with self._lock:
            last = list(self.snapshots)[-config.keep_last :]
            best = self.best if config.best_weight else None

        def give(names: Sequence[str], weight: float) -> None:
            for name in names:
                weights[name] = weights.get(name, 0.0) + weight / len(names)

        give([] if self.base is None else [self.base.name], config.base_weight)
        give(last, config.last_weight)
        give([] if best is None else [best], config.best_weight)
        give(list(self.scripts), config.scripted_weight)
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items() if weight}

    def record(self, results: Mapping[str, Sequence[str]]) -> None:
        """Count the games of one step: the policy's results against each opponent (`envs.seats.RESULT`)."""
        with self._lock:
            for name, own in results.items():
                counts = self.results.setdefault(self.newest, {}).setdefault(name, [0.0, 0.0])
                counts[0] += sum(WON_SHARES[result] for result in own)
                counts[1] += len(own)

    def exploitation(self) -> float | None:
        """How much larger a share of its games the policy has won against its newest snapshot than against older ones
        and the base model, since that snapshot joined. None while either side has too few games.

        Who gets better beats older ones at least as often as the newest one. Games without a deal are draws, so a base
        model that never agrees is neither beaten nor lost to.
        """
        with self._lock:
            played = self.results.get(self.newest, {})
            older = set(self.snapshots) | ({self.base.name} if self.base is not None else set[str]())
            won_new, num_new = played.get(self.newest, [0.0, 0.0])
            counts = [played[name] for name in older - {self.newest} if name in played]
        won_old, num_old = (sum(one[index] for one in counts) for index in (0, 1))
        return won_new / num_new - won_old / num_old if min(num_new, num_old) >= MIN_GAMES else None

    def to_state(self) -> PoolState:
        with self._lock:
            return PoolState(
                snapshots={name: self.paths[name] for name in self.snapshots},
                newest=self.newest,
                results=copy.deepcopy(self.results),
            )

    def let_go(self, kept: Iterable[PoolState]) -> list[str]:
        """The paths of snapshots that neither the pool nor one of these states has; the pool forgets them."""
        with self._lock:
            needed = set(self.snapshots).union(*(state["snapshots"] for state in kept))
            return [self.paths.pop(name) for name in list(self.paths) if name not in needed]

    def _draw(self, task: Task, point: float) -> Opponent:
        shares = self.shares()
        assert shares, "a pool without a member was refused before anybody played"
        bounds = dict(zip(shares, itertools.accumulate(shares.values()), strict=True))
        name = next((one for one, bound in bounds.items() if point < bound), next(reversed(shares)))
        if self.base is not None and name == self.base.name:
            return self.base
        return self.snapshots[name] if name in self.snapshots else self.make_script(name, task)
