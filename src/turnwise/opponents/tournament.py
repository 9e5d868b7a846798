"""Everybody plays everybody: games between any two players, the cross-play matrix, and ratings with uncertainty.

    games = await play_tournament(world, players, tasks, seed=0)
    standings(games).ratings["runs/a"].number()          # Elo with its 95 % interval

For each pair of players and each task there are two games, so that each has both seats. A rating is Bradley-Terry's
strength on the Elo scale: the larger reward wins a game, and equal rewards are half a win each. Intervals come from
drawing tasks again, because the games at one task are not independent. Own payoff, agreement, joint surplus and the
share of deals that nobody could improve for free stand beside it: a player that wins by being unreasonable has a high
rating and a low joint surplus.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, permutations

import numpy as np

from turnwise.envs.base import Task, assistant
from turnwise.envs.seats import (
    OPPONENT_DEADLINE_S,
    WON_SHARES,
    Opponent,
    ScriptedOpponent,
    TwoSidedWorld,
    result_of,
    scripted_seats,
)
from turnwise.envs.splits import random_for
from turnwise.errors import AttemptFailed, ConfigError, DataError, Party
from turnwise.opponents.elo import elo_ratings
from turnwise.trajectory import Message

NUM_RESAMPLES = 400
_MAX_MOVES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TournamentGame:
    """One game: who sat where, and how it ended for each. A game that a player failed has no rewards."""

    task_id: str
    names: tuple[str, str]
    """The player of seat 0, and of seat 1."""
    rewards: tuple[float, float] | None
    info: Mapping[str, float] = field(default_factory=dict[str, float])
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float

    def number(self, digits: int = 2) -> str:
        value, low, high = (round(one, digits) + 0.0 for one in (self.value, self.low, self.high))  # never -0
        return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standings:
    """What a tournament says about its players."""

    names: tuple[str, ...]
    ratings: Mapping[str, Estimate]
    """Elo; the players' mean is 0."""
    payoffs: Mapping[str, Estimate]
    by_seat: Mapping[str, tuple[float, float]]
    """Mean reward in seat 0 and in seat 1; nan where a player never had the seat."""
    agreement: Mapping[str, Estimate]
    """The share of games with a deal; this and the next two are nan where the world does not say."""
    joint: Mapping[str, Estimate]
    """Both payoffs together, as a share of the most that they could be."""
    efficient: Mapping[str, Estimate]
    """The share of games whose deal is on the Pareto frontier."""
    matrix: Mapping[tuple[str, str], Estimate]
    """(player, opponent) to the player's reward."""
    num_failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TournamentLimits:
    """How the games are played, for all players."""

    deadline_s: float = OPPONENT_DEADLINE_S
    """Seconds for one reply."""
    max_concurrency: int = 64
    """Games at the same time."""


DEFAULT_LIMITS = TournamentLimits()


def check_seats(world: TwoSidedWorld, names: Iterable[str]) -> None:
    """Refuse scripts that know one seat only: in the other one they would say things that mean nothing there."""
    seats = scripted_seats(world)
    script = next((name for name in names if name in world.scripted_opponents), None)
    if script is not None and not {0, 1} <= set(seats):
        raise ConfigError(
            f"{script} is a script that plays seat {seats[0]} only, and in a tournament every player has both seats; "
            "leave it out"
        )


async def play_tournament(
    world: TwoSidedWorld,
    players: Mapping[str, Opponent | None],
    tasks: Sequence[Task],
    *,
    seed: int,
    limits: TournamentLimits = DEFAULT_LIMITS,
    on_game: Callable[[], None] = lambda: None,
) -> list[TournamentGame]:
    """Play every pair at every task, with both seatings. A player that is None is the world's script of that name.

    Args:
        on_game: Called after each game.
    """
    check_seats(world, [name for name, player in players.items() if player is None])
    room = asyncio.Semaphore(limits.max_concurrency)
    pairs = [seating for pair in combinations(players, 2) for seating in (pair, pair[::-1])]

    async def one(names: tuple[str, str], task: Task) -> TournamentGame:
        async with room:
            seated = [players[name] or ScriptedOpponent(world, name, task) for name in names]
            game = await _play(_Seating(world, names, seated, limits.deadline_s), task, seed)
        on_game()
        return game

    games = [one((first, second), task) for first, second in pairs for task in tasks]
    return list(await asyncio.gather(*games))


@dataclass(frozen=True, slots=True)
class _Seating:
    """Who sits where."""

    world: TwoSidedWorld
    names: tuple[str, str]
    players: Sequence[Opponent]
    deadline_s: float


async def _play(seating: _Seating, task: Task, seed: int) -> TournamentGame:
    names = seating.names
    game = seating.world.make_game(task, random_for("game", seed, task.id).getrandbits(31))
    heard: tuple[list[Message], list[Message]] = ([], [])
    for number in range(_MAX_MOVES):
        seat = game.to_move
        if seat is None:
            first, second = game.outcome(0), game.outcome(1)
            rewards = (first.reward, second.reward)
            return TournamentGame(task_id=task.id, names=names, rewards=rewards, info=dict(first.info))
        own = heard[seat]
        own += [*(game.rules(seat) if not own else []), *game.view(seat)]
        draw = random_for("move", seed, task.id, names[seat], number).getrandbits(31)
        try:
            async with asyncio.timeout(seating.deadline_s):
                text = await seating.players[seat].reply(game, tuple(own), draw)
        except TimeoutError:
            failure = f"{names[seat]}: no answer within {seating.deadline_s:g} s"
            return TournamentGame(task_id=task.id, names=names, rewards=None, failure=failure)
        except Exception as cause:  # noqa: BLE001 - whatever it raises, this player failed
            error = cause if isinstance(cause, AttemptFailed) else AttemptFailed(Party.OPPONENT, repr(cause))
            return TournamentGame(task_id=task.id, names=names, rewards=None, failure=f"{names[seat]}: {error.detail}")
        own.append(assistant(text))
        game.move(own[-1])
    return TournamentGame(task_id=task.id, names=names, rewards=None, failure=f"not over after {_MAX_MOVES} moves")


def standings(games: Sequence[TournamentGame], *, seed: int = 0) -> Standings:
    """Ratings, payoffs and the matrix, with intervals over tasks. Games that failed are counted and not scored."""
    scored = [game for game in games if game.rewards is not None]
    if not scored:
        why = next((game.failure for game in games), "no game was played")
        raise DataError(f"no game of the tournament was scored; the first failure: {why}")
    names = tuple(dict.fromkeys(name for game in scored for name in game.names))
    by_task: dict[str, list[TournamentGame]] = {}
    for game in scored:
        by_task.setdefault(game.task_id, []).append(game)
    tasks, rng = list(by_task.values()), np.random.default_rng(seed)
    draws: list[list[int]] = [rng.integers(len(tasks), size=len(tasks)).tolist() for _ in range(NUM_RESAMPLES)]
    samples = [[game for index in draw for game in tasks[index]] for draw in draws]
    ratings = bradley_terry(scored, names)
    drawn = [bradley_terry(sample, names) for sample in samples]
    return Standings(
        names=names,
        ratings={name: _estimate(ratings[name], [one[name] for one in drawn]) for name in names},
        payoffs={name: _mean_over_tasks(by_task, partial(_rewards, name=name), rng) for name in names},
        by_seat={name: (_seat_mean(scored, name, 0), _seat_mean(scored, name, 1)) for name in names},
        matrix={
            (own, other): _mean_over_tasks(by_task, partial(_rewards, name=own, other=other), rng)
            for own, other in permutations(names, 2)
        },
        agreement=_info(by_task, names, "agreement", rng),
        joint=_info(by_task, names, "joint", rng),
        efficient=_info(by_task, names, "efficient", rng),
        num_failed=len(games) - len(scored),
    )


def bradley_terry(games: Sequence[TournamentGame], names: Sequence[str]) -> dict[str, float]:
    """Elo ratings with mean 0."""
    index = {name: number for number, name in enumerate(names)}
    wins = np.zeros((len(names), len(names)))
    for game in games:
        assert game.rewards is not None, "only scored games are rated"
        first, second = (index[name] for name in game.names)
        share = WON_SHARES[result_of(*game.rewards)]
        wins[first, second] += share
        wins[second, first] += 1 - share
    return dict(zip(names, elo_ratings(wins).tolist(), strict=True))


def _rewards(game: TournamentGame, *, name: str, other: str | None = None) -> list[float]:
    assert game.rewards is not None, "only scored games count"
    pairs = zip(game.names, game.rewards, game.names[::-1], strict=True)
    return [reward for own, reward, against in pairs if own == name and other in (None, against)]


def _mean_over_tasks(
    by_task: Mapping[str, Sequence[TournamentGame]],
    values_of: Callable[[TournamentGame], Sequence[float]],
    rng: np.random.Generator,
) -> Estimate:
    found = [[value for game in games for value in values_of(game)] for games in by_task.values()]
    means = np.array([np.mean(own) for own in found if own])
    if not len(means):
        return Estimate(value=math.nan, low=math.nan, high=math.nan)
    drawn = rng.choice(means, size=(NUM_RESAMPLES, len(means))).mean(axis=1)
    return _estimate(float(means.mean()), drawn.tolist())


def _estimate(value: float, drawn: Sequence[float]) -> Estimate:
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(value=value, low=float(low), high=float(high))


def _seat_mean(games: Sequence[TournamentGame], name: str, seat: int) -> float:
    own = [game.rewards[seat] for game in games if game.rewards is not None and game.names[seat] == name]
    return float(np.mean(own)) if own else math.nan


def _info(
    by_task: Mapping[str, Sequence[TournamentGame]], names: Sequence[str], key: str, rng: np.random.Generator
) -> dict[str, Estimate]:
    """What the world says of a player's games."""

    def said(game: TournamentGame, *, name: str) -> list[float]:
        return [game.info[key]] if name in game.names and key in game.info else []

    return {name: _mean_over_tasks(by_task, partial(said, name=name), rng) for name in names}
