"""Any two-sided world, with an opponent of our choice in place of its script."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, cast

from turnwise.envs.base import Task, World
from turnwise.envs.seats import OPPONENT_DEADLINE_S, Opponent, ScriptedOpponent, SeatedEnv, TwoSidedWorld
from turnwise.envs.wrapped import WorldWrapper
from turnwise.opponents.players import RecordedOpponent
from turnwise.trajectory import Trajectory

SAID = "opponent_said"
"""The label of an attempt that holds the opponent's replies, as a JSON list."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpposedWorld(WorldWrapper):
    """A two-sided world whose other seat is played by the opponent that `choose` names for a task and a seed."""

    inner: World
    choose: Callable[[Task, int], Opponent]
    deadline_s: float = OPPONENT_DEADLINE_S
    seat: int | None = None
    """The policy's seat, if it is not the one that the world gives it."""

    def make_env(self, task: Task, seed: int) -> SeatedEnv:
        world = cast(TwoSidedWorld, self.inner)
        return SeatedEnv(
            world.make_game(task, seed),
            world.policy_seat(task) if self.seat is None else self.seat,
            self.choose(task, seed),
            seed,
            deadline_s=self.deadline_s,
        )

    def make_game(self, task: Task, seed: int) -> Any:
        return cast(TwoSidedWorld, self.inner).make_game(task, seed)


def two_sided(world: World) -> TwoSidedWorld | None:
    """The two-sided world inside a world and its wrappers (a reward, a judge); None if there is none."""
    while isinstance(world, WorldWrapper):
        world = world.inner
    return world if isinstance(world, TwoSidedWorld) and getattr(world, "has_two_sides", True) else None


def seat(world: World, choose: Callable[[Task, int], Opponent], deadline_s: float = OPPONENT_DEADLINE_S) -> World:
    """The same world, wrappers included, with other opponents."""
    if isinstance(world, OpposedWorld):
        world = world.inner
    if isinstance(world, WorldWrapper):
        return dataclasses.replace(cast(Any, world), inner=seat(world.inner, choose, deadline_s))
    return OpposedWorld(inner=world, choose=choose, deadline_s=deadline_s)


def seat_script(world: World, name: str) -> World:
    """The same world against one of its scripts."""
    sided = two_sided(world)
    assert sided is not None, "a script is for a world with two sides"
    return seat(world, lambda task, _: ScriptedOpponent(sided, name, task))


def scripted_twin(world: World) -> World:
    """The same world against a script, if its opponent is a model: what the env itself does is then repeatable."""
    sided = two_sided(world)
    if sided is None or sided.opponent in sided.scripted_opponents:
        return world
    return seat_script(world, sided.scripted_opponents[0])


def seat_record(world: World, recorded: Trajectory) -> World:
    """The same world, in which the opponent says what it said in a stored attempt. Scripts play again themselves."""
    said = recorded.labels.get(SAID)
    name = recorded.labels.get("opponent", "")
    sided = two_sided(world)
    if sided is None or not name:
        return world
    if said is None:
        return seat_script(world, name)
    own_seat = recorded.labels.get("seat")
    if own_seat is None:
        return seat(world, lambda _task, _seed: RecordedOpponent(name, json.loads(said)))
    return OpposedWorld(  # both seats were trained: no wrapper scores them, and their states are the game's
        inner=cast(World, sided),
        choose=lambda _task, _seed: RecordedOpponent(name, json.loads(said), is_scripted=True),
        seat=int(own_seat),
    )
