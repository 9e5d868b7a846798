"""The pool draws by weights, the same opponent for a whole group, and keeps the snapshot that is hardest to beat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from turnwise.envs.base import Task
from turnwise.envs.game import Game
from turnwise.envs.seats import Opponent
from turnwise.opponents.config import OpponentConfig
from turnwise.opponents.pool import OpponentPool
from turnwise.trajectory import Message


@dataclass(frozen=True)
class Named:
    name: str
    is_scripted: bool = False

    async def reply(self, game: Game, dialogue: Sequence[Message], seed: int) -> str:  # noqa: ARG002 - it never plays
        return ""


def make_script(name: str, task: Task) -> Opponent:  # noqa: ARG001
    return Named(name, is_scripted=True)


def make_pool(**options: float) -> OpponentPool:
    config = OpponentConfig.model_validate({"keep_last": 2, **options})
    return OpponentPool(config=config, base=Named("base"), scripts=("fair", "tough"), make_script=make_script)


def add(pool: OpponentPool, *steps: int) -> None:
    for step in steps:
        pool.add_snapshot(f"snapshot_{step}", Named(f"snapshot_{step}"), f"path {step}")


def draw(pool: OpponentPool, count: int = 4000) -> Counter[str]:
    return Counter(pool.draw(Task(id="game"), seed).name for seed in range(count))


def test_weights_of_members_that_are_not_there_go_to_the_others() -> None:
    pool = make_pool()
    assert pool.shares() == pytest.approx({"base": 1 / 2, "fair": 1 / 4, "tough": 1 / 4})
    add(pool, 10, 20)
    pool.record({"snapshot_10": [0.1], "snapshot_20": [0.9]})
    expected = {"base": 1 / 5, "snapshot_10": 2 / 5, "snapshot_20": 1 / 5, "fair": 1 / 10, "tough": 1 / 10}
    assert pool.shares() == pytest.approx(expected)
    found = draw(pool)
    assert {name: found[name] / 4000 for name in expected} == pytest.approx(expected, abs=0.03)


def test_a_group_keeps_its_opponent_whatever_joins_meanwhile() -> None:
    pool = make_pool(base_weight=0, scripted_weight=1, last_weight=10**6)
    first = pool.draw(Task(id="game"), 7)
    add(pool, 10)
    assert pool.draw(Task(id="game"), 7) is first
    assert pool.draw(Task(id="game"), 8).name == "snapshot_10"


def test_the_last_snapshots_and_the_best_one_stay() -> None:
    pool = make_pool()
    add(pool, 10)
    pool.record({"snapshot_10": [0.0, 0.2], "base": [0.5]})
    add(pool, 20, 30, 40)
    assert list(pool.snapshots) == ["snapshot_10", "snapshot_30", "snapshot_40"]
    assert pool.best == "snapshot_10"
    pool.record({"snapshot_10": [1.0] * 4, "snapshot_40": [0.05]})
    assert pool.ratings["snapshot_10"] == {"num_games": 6, "reward": pytest.approx(0.19)}
    assert pool.best == "snapshot_40"
    state = pool.to_state()
    assert state["snapshots"] == {"snapshot_10": "path 10", "snapshot_30": "path 30", "snapshot_40": "path 40"}
