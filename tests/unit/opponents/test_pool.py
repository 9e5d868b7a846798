"""The pool draws by weights, the same opponent for a whole group, and keeps the snapshot that is hardest to beat."""

from __future__ import annotations

import itertools
import math
import sys
import threading
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


def draw(pool: OpponentPool, count: int = 1500) -> Counter[str]:
    return Counter(pool.draw(Task(id="game"), seed).name for seed in range(count))


def test_weights_of_members_that_are_not_there_go_to_the_others() -> None:
    pool = make_pool()
    assert pool.shares() == pytest.approx({"base": 1 / 2, "fair": 1 / 4, "tough": 1 / 4})
    add(pool, 10, 20)
    pool.record({"snapshot_10": ["lost"], "base": ["won"]})
    expected = {"base": 1 / 5, "snapshot_10": 2 / 5, "snapshot_20": 1 / 5, "fair": 1 / 10, "tough": 1 / 10}
    assert pool.shares() == pytest.approx(expected)
    found = draw(pool)
    assert {name: found[name] / 1500 for name in expected} == pytest.approx(expected, abs=0.03)


def test_a_group_keeps_its_opponent_whatever_joins_meanwhile() -> None:
    pool = make_pool(base_weight=0, scripted_weight=1, last_weight=10**6)
    first = pool.draw(Task(id="game"), 7)
    add(pool, 10)
    assert pool.draw(Task(id="game"), 7) is first
    assert pool.draw(Task(id="game"), 8).name == "snapshot_10"


def test_the_last_snapshots_and_the_best_one_stay_and_the_files_of_the_others_go() -> None:
    pool = make_pool()
    add(pool, 10)
    pool.record({"base": ["won"] * 8})
    add(pool, 20)
    pool.record({"base": ["lost"] * 8, "snapshot_10": ["lost"] * 8})
    add(pool, 30)
    early = pool.to_state()
    add(pool, 40, 50)
    assert pool.best == "snapshot_10"
    assert list(pool.snapshots) == ["snapshot_10", "snapshot_40", "snapshot_50"]
    assert pool.let_go([early]) == [], "a checkpoint may go on with 20 and 30"
    assert pool.let_go([pool.to_state()]) == ["path 20", "path 30"]
    assert pool.let_go([]) == []
    assert pool.to_state()["snapshots"] == {f"snapshot_{step}": f"path {step}" for step in (10, 40, 50)}


def test_ratings_are_elo_from_the_results_of_all_policies_that_were() -> None:
    pool = make_pool()
    pool.record({"fair": ["won", "lost", "drawn"] * 100})
    add(pool, 10)
    pool.record({"fair": ["won"] * 300 + ["lost"] * 100, "snapshot_10": ["lost"] * 50})
    add(pool, 20)
    pool.record({"fair": ["lost"] * 300 + ["won"] * 100})
    ratings = pool.ratings()
    assert ratings["start"] == pytest.approx(ratings["fair"], abs=2)
    gap = 400 * math.log10(3)  # three games of four
    assert ratings["snapshot_10"] - ratings["fair"] == pytest.approx(gap, abs=3), "games against itself say nothing"
    assert ratings["fair"] - ratings["snapshot_20"] == pytest.approx(gap, abs=3)
    assert pool.best == "snapshot_10"
    assert make_pool().best is None


def test_a_snapshot_without_a_game_is_not_the_best_even_if_all_ratings_are_below_0() -> None:
    pool = make_pool(keep_last=1)
    add(pool, 10)
    pool.record({"fair": ["lost"] * 5 + ["won"]})
    add(pool, 20)
    pool.record({"fair": ["lost"] * 5 + ["won"], "snapshot_10": ["lost", "lost", "won"]})
    add(pool, 30)
    ratings = pool.ratings()
    assert max(ratings["snapshot_10"], ratings["snapshot_20"]) < 0
    assert pool.best == "snapshot_10"
    assert list(pool.snapshots) == ["snapshot_10", "snapshot_30"], "the best one stayed"


def test_of_snapshots_without_a_game_the_newest_is_the_best() -> None:
    pool = make_pool()
    add(pool, 10, 20)
    assert pool.best == "snapshot_20"


def test_envs_draw_in_their_threads_while_snapshots_join_and_games_are_recorded() -> None:
    pool, failures = make_pool(keep_last=3), list[BaseException]()
    done = threading.Event()

    def draw_on(first: int) -> None:
        try:
            for seed in itertools.count(first, 4):
                if done.is_set():
                    return
                pool.draw(Task(id="game"), seed)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test shows it
            failures.append(error)

    threads = [threading.Thread(target=draw_on, args=(index,)) for index in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for step in range(120):
            add(pool, step)
            pool.record({f"snapshot_{step - index}": ["won", "lost"] for index in range(3)})
    finally:
        done.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
    assert not failures
