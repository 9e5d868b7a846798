"""What shows that play between two models collapses, from the games of a step to the alarm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from cases import for_each
from turnwise.config.config import Config
from turnwise.envs.base import assistant
from turnwise.envs.registry import get_world
from turnwise.opponents.pool import MIN_GAMES
from turnwise.rollout.config import RolloutConfig
from turnwise.training.opponents import Opponents
from turnwise.trajectory import EndReason, Trajectory, TrajectoryGroup, Turn
from turnwise.watch.alarms import AlarmConfig, Alarms


def attempt(index: int, said: str = "Hi", **labels: str) -> Trajectory:
    turn = Turn(prompt_ids=(1,), sampled_ids=(2,), sampler_logprobs=(-1.0,), policy_version=0, reply=assistant(said))
    end = EndReason.TERMINATED
    return Trajectory(task_id="t", attempt=index, seed=0, turns=(turn,), end_reason=end, labels=labels)


def group(attempts: Sequence[Trajectory], branch_turn: int | None = None) -> TrajectoryGroup:
    return TrajectoryGroup(task_id="t", trajectories=tuple(attempts), branch_turn=branch_turn)


def opening(*said: str) -> TrajectoryGroup:
    return group([attempt(index, text, opponent="self") for index, text in enumerate(said)])


def against(results: Mapping[str, Sequence[str]]) -> list[TrajectoryGroup]:
    return [
        group([attempt(index, str(index), opponent=name, result=one) for index, one in enumerate(own)])
        for name, own in results.items()
    ]


class Named:
    is_scripted = False

    def __init__(self, name: str) -> None:
        self.name = name


def opponents_of(words: str, **section: Any) -> Opponents:
    env = {"name": "negotiate", "options": {"opponent": words}}
    config = Config.model_validate({"env": env, "opponent": {"panel": ["tough"], **section}})
    no_service = cast(Any, None)  # nothing is loaded
    return Opponents(config, get_world("negotiate", opponent=words), no_service, RolloutConfig())


def pool_after(results: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """The metrics of a step, in a pool of the base model, a first snapshot and the newest one."""
    opponents = opponents_of("pool", base_weight=0)
    opponents.open()
    assert opponents.pool is not None
    opponents.pool.base = cast(Any, Named("base"))
    for step in (0, 10):
        opponents.pool.add_snapshot(f"snapshot_{step}", cast(Any, Named(f"snapshot_{step}")), "path")
    return opponents.count(against(results))


def told(metrics: Mapping[str, float]) -> set[str]:
    return {alarm.name for alarm in Alarms(AlarmConfig()).check(metrics)}


@for_each("size", [2, 4, 8])
def test_attempts_that_all_begin_alike_are_told_whatever_the_size_of_a_group(size: int) -> None:
    metrics = opponents_of("self").count([opening(*["Offer: rent=900"] * size), opening(*["Hello"] * size)])
    assert metrics["opponent/opening_diversity"] == 0
    assert "openings" in told(metrics)


def test_openings_are_compared_within_a_group_and_not_across_tasks() -> None:
    metrics = opponents_of("self").count([opening("a", "a", "b"), opening("c", "d", "e")])
    assert metrics["opponent/opening_diversity"] == pytest.approx((1 / 2 + 1) / 2)
    assert "openings" not in told(metrics)


def test_a_group_that_branches_later_says_nothing_about_openings() -> None:
    later = group([attempt(index, "a", opponent="self") for index in range(4)], branch_turn=1)
    assert "opponent/opening_diversity" not in opponents_of("self").count([later])


def test_a_policy_that_beats_its_newest_snapshot_and_not_older_ones_is_told() -> None:
    many = MIN_GAMES
    metrics = pool_after({"snapshot_10": ["won"] * many, "snapshot_0": ["won", "lost"] * (many // 2)})
    assert metrics["opponent/exploitation"] == pytest.approx(0.5)
    assert "exploitation" in told(metrics)


@for_each(
    "results",
    [
        {"snapshot_10": ["won", "lost"], "snapshot_0": ["won", "won"]},  # it learns: older ones are easier
        {"snapshot_10": ["won", "lost", "won"], "base": ["drawn"] * 3},  # the base never agrees
        {"snapshot_10": ["won"], "snapshot_0": ["won"], "tough": ["lost"] * 3},  # a script is hard to beat
    ],
)
def test_a_policy_that_gets_better_is_not_told_whoever_is_in_the_pool(results: Mapping[str, list[str]]) -> None:
    metrics = pool_after({name: own * MIN_GAMES for name, own in results.items()})
    assert metrics["opponent/exploitation"] <= 0.2
    assert "exploitation" not in told(metrics)


def test_a_few_games_say_nothing_about_exploitation() -> None:
    few = pool_after({"snapshot_10": ["won"] * (MIN_GAMES - 1), "snapshot_0": ["lost"] * MIN_GAMES})
    assert "opponent/exploitation" not in few


@for_each(("first_seat", "gap"), [(("won", "won"), 1.0), (("won", "lost"), 0.0)])
def test_a_seat_that_wins_all_games_of_trained_self_play_is_told(first_seat: tuple[str, str], gap: float) -> None:
    other = {"won": "lost", "lost": "won"}
    by_seat = {"0": first_seat, "1": tuple(other[result] for result in first_seat)}
    games = [
        attempt(index, str(index), opponent="self", seat=seat, result=result)
        for seat, results in by_seat.items()
        for index, result in enumerate(results)
    ]
    metrics = opponents_of("self", train="both").count([group(games)])
    assert metrics["opponent/seat_gap"] == gap
    assert ("seat_gap" in told(metrics)) == bool(gap)
