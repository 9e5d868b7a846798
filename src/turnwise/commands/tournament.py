"""`turnwise tournament`: everybody plays everybody, in both seats, on held-out tasks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from turnwise.commands.train import say
from turnwise.config.files import config_from_yaml
from turnwise.envs.base import World
from turnwise.envs.seats import Opponent, TwoSidedWorld, scripted_seats
from turnwise.errors import ConfigError
from turnwise.opponents.matrix_figure import matrix_svg, short_labels
from turnwise.opponents.seating import two_sided
from turnwise.opponents.tournament import (
    Estimate,
    Standings,
    TournamentGame,
    TournamentLimits,
    check_seats,
    play_tournament,
    standings,
)
from turnwise.rollout.seeds import derive_seed
from turnwise.runlog.reader import RunReader, is_run
from turnwise.runtime.exit_codes import ExitCode
from turnwise.training.assemble import distinct_tasks, make_eval_rollout
from turnwise.training.opponent_words import POOL, SELF
from turnwise.training.opponents import Opponents
from turnwise.training.policy import PolicySampler, WorldChoice, find_policy
from turnwise.training.setup import find_facts, read_config

SECONDS_PER_LINE = 10.0
MAX_LABEL = 40
"""Characters of a player's name in the printed table; `--json` has the whole names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TournamentOptions:
    """The options of the command line."""

    env: str | None = None
    num_tasks: int = 32
    out: str | None = None
    """The file for the picture."""
    as_json: bool = False


def run_tournament(players: Sequence[str], overrides: Sequence[str], options: TournamentOptions) -> ExitCode:
    """Play the tournament, print the standings and write the picture."""
    _check_names(players)
    if options.out is not None and (Path(options.out).is_dir() or not Path(options.out).absolute().parent.is_dir()):
        raise ConfigError(f"--out {options.out}: expected the name of a file, in a folder that is there")
    with _open(players, overrides, options.env) as policy:
        config = policy.config
        policy.check_world()
        world = policy.objects.make_world(config.env, max_turns=config.rollout.max_turns, memory=config.memory)
        sided = two_sided(world)
        if sided is None:
            raise ConfigError(f"{config.env.name} has one side only; expected a world with two, such as negotiate")
        check_seats(sided, players)
        tasks = distinct_tasks(world, "test", options.num_tasks, derive_seed(config.train.seed, "tasks"))
        with _seat(players, policy, world, sided) as seated:
            progress = _GamesDone(len(players) * (len(players) - 1) * len(tasks))
            say(f"{len(tasks)} held-out tasks, {progress.num_games} games ...")
            limits = TournamentLimits(deadline_s=config.opponent.deadline_s)
            work = play_tournament(sided, seated, tasks, seed=config.train.seed, limits=limits, on_game=progress.add)
            games = asyncio.run(work)
    table = standings(games)
    print(_to_json(table, games) if options.as_json else "\n".join(_lines(table, sided, games)))
    if options.out is not None:
        title = f"{config.env.name}: mean reward of the row against the column"
        Path(options.out).write_text(matrix_svg(table, title), encoding="utf-8")
        say(f"matrix  {options.out}")
    return ExitCode.OK


class _GamesDone:
    """Says now and then how many games were played."""

    def __init__(self, num_games: int) -> None:
        self.num_games = num_games
        self._num_done = 0
        self._told_s = time.monotonic()

    def add(self) -> None:
        self._num_done += 1
        if time.monotonic() - self._told_s >= SECONDS_PER_LINE:
            self._told_s = time.monotonic()
            say(f"{self._num_done} of {self.num_games} games")


@contextlib.contextmanager
def _seat(
    players: Sequence[str], policy: PolicySampler, world: World, sided: TwoSidedWorld
) -> Generator[dict[str, Opponent | None]]:
    """The players, with their models loaded. Scripts alone need no model."""
    config = policy.config
    if all(name in sided.scripted_opponents for name in players):
        yield dict.fromkeys(players)
        return
    rollout = make_eval_rollout(config, config.rollout.for_world(world, find_facts(config).context_length))
    with Opponents(config, world, policy.service, rollout) as opponents:
        yield {name: opponents.player(name) for name in players}


def _check_names(players: Sequence[str]) -> None:
    if len(players) < 2:
        raise ConfigError(f"{len(players)} player; a tournament needs two or more: runs, checkpoints, base, scripts")
    twice = [name for name in players if players.count(name) > 1]
    if twice:
        raise ConfigError(f"{twice[0]} is named twice; each player plays once")
    for name in players:
        if name in (SELF, POOL):
            raise ConfigError(f"{name} does not name one player; name a run, a checkpoint, base, a script or a model")


def _open(players: Sequence[str], overrides: Sequence[str], env: str | None) -> PolicySampler:
    """The first run: its world is played, and its base model is `base`."""
    runs = [name for name in players if is_run(Path(name).expanduser())]
    if not runs:
        if env is None:
            raise ConfigError("no run among the players says which world to play; add --env NAME")
        return PolicySampler(read_config(env, overrides))
    worlds: dict[str, str] = {}
    for name in runs:
        with RunReader(Path(name).expanduser()) as run:
            worlds[name] = config_from_yaml(run.config_yaml, name).env.name
    other = next((name for name in runs if worlds[name] != worlds[runs[0]]), None)
    if other is not None and env is None:
        raise ConfigError(
            f"{runs[0]} plays {worlds[runs[0]]}, and {other} plays {worlds[other]}; name the world: --env NAME"
        )
    return find_policy(runs[0], WorldChoice.of(env), overrides=overrides)


def _lines(table: Standings, sided: TwoSidedWorld, games: Sequence[TournamentGame]) -> list[str]:
    names = sorted(table.names, key=lambda name: -table.ratings[name].value)
    labels = short_labels(names, MAX_LABEL)
    width = max(len(label) for label in labels.values())
    columns = {
        "reward": table.payoffs,
        "agreement": table.agreement,
        "joint": table.joint,
        "efficient": table.efficient,
    }
    heads = "".join(f"  {head:>18}" for head in columns)
    head = f"{'player':<{width}}  {'Elo':>22}  seat 0  seat 1{heads}"
    lines = [head]
    for name in names:
        first, second = (_cell(value) for value in table.by_seat[name])
        cells = "".join(f"  {_number(found[name]):>18}" for found in columns.values())
        lines.append(f"{labels[name]:<{width}}  {table.ratings[name].number(0):>22}  {first:>6}  {second:>6}{cells}")
    lines += [
        "",
        "reward of the row against the column:",
        " " * width + "".join(f"  {label:>18}" for label in short_labels(names, 18).values()),
    ]
    for own in names:
        cells = [_matrix_cell(table, own, other) for other in names]
        lines.append(f"{labels[own]:<{width}}" + "".join(f"  {cell:>18}" for cell in cells))
    if table.num_failed:
        first_failure = next(game.failure for game in games if game.failure)
        lines.append(f"{table.num_failed} games failed and are not scored; the first: {first_failure}")
    if len(scripted_seats(sided)) > 1 and not any(name in sided.scripted_opponents for name in names):
        lines.append(f"scripts may play too: {', '.join(sided.scripted_opponents)}")
    return lines


def _matrix_cell(table: Standings, own: str, other: str) -> str:
    """Empty on the diagonal; a dash where all games of a pair failed."""
    return "" if own == other else _number(table.matrix[own, other])


def _number(found: Estimate) -> str:
    return "-" if math.isnan(found.value) else found.number()


def _cell(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _to_json(table: Standings, games: Sequence[TournamentGame]) -> str:
    def plain(value: float) -> float | None:
        return None if math.isnan(value) else value

    def cell(found: Estimate) -> dict[str, float | None]:
        return {name: plain(value) for name, value in asdict(found).items()}

    players = {
        name: {
            "elo": asdict(table.ratings[name]),
            "reward": asdict(table.payoffs[name]),
            "by_seat": [plain(value) for value in table.by_seat[name]],
            "agreement": cell(table.agreement[name]),
            "joint": cell(table.joint[name]),
            "efficient": cell(table.efficient[name]),
            "against": {other: cell(found) for (own, other), found in table.matrix.items() if own == name},
        }
        for name in table.names
    }
    return json.dumps({"players": players, "num_games": len(games), "num_failed": table.num_failed})
