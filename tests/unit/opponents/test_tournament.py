"""Everybody plays everybody in both seats, ratings mean what Elo means, and a player that fails scores nothing."""

from __future__ import annotations

import asyncio
import json
import math
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from local_server import serving
from turnwise.cli import main
from turnwise.envs.game import Game
from turnwise.envs.library.negotiate import Negotiate
from turnwise.envs.registry import get_world
from turnwise.envs.seats import TwoSidedWorld
from turnwise.errors import ConfigError, DataError
from turnwise.models.store import fetch_model
from turnwise.opponents.matrix_figure import matrix_svg, short_labels
from turnwise.opponents.tournament import (
    TournamentGame,
    TournamentLimits,
    bradley_terry,
    check_seats,
    play_tournament,
    standings,
)
from turnwise.trajectory import Message


class Silent:
    """A player that never answers."""

    name, is_scripted = "silent", False

    async def reply(self, game: Game, dialogue: Sequence[Message], seed: int) -> str:  # noqa: ARG002 - it fails at once
        raise ConnectionError("gone")


def won(first: str, second: str, share: float, count: int = 400) -> list[TournamentGame]:
    """Games of which the first player wins this share."""
    num_won = round(share * count)
    results = [(1.0, 0.0)] * num_won + [(0.0, 1.0)] * (count - num_won)
    return [TournamentGame(task_id=f"t{i}", names=(first, second), rewards=r) for i, r in enumerate(results)]


def test_ratings_are_the_elo_differences_that_explain_the_wins() -> None:
    for share in (0.5, 0.75, 0.9):
        rated = bradley_terry(won("a", "b", share), ("a", "b"))
        assert rated["a"] - rated["b"] == pytest.approx(400 * math.log10(share / (1 - share)), abs=4)
    strengths = {"a": 200.0, "b": 0.0, "c": -200.0}

    def chance(one: str, other: str) -> float:
        return 1 / (1 + 10 ** ((strengths[other] - strengths[one]) / 400))

    games = [
        game for one, other in (("a", "b"), ("b", "c"), ("c", "a")) for game in won(one, other, chance(one, other))
    ]
    assert bradley_terry(games, tuple(strengths)) == pytest.approx(strengths, abs=5)
    draws = [TournamentGame(task_id="t", names=("a", "b"), rewards=(0.4, 0.4))] * 9
    assert bradley_terry(draws, ("a", "b")) == {"a": 0.0, "b": 0.0}


async def test_every_pair_plays_every_task_in_both_seats_and_a_failed_game_is_not_scored() -> None:
    world = Negotiate()
    tasks = world.tasks("test", 6, 0)
    games = await play_tournament(world, {"tough": None, "conceder": None, "silent": Silent()}, tasks, seed=0)
    assert set(Counter(game.names for game in games).values()) == {6}
    assert len({game.names for game in games}) == 6
    table = standings(games)
    assert table.num_failed == 24
    assert table.names == ("tough", "conceder")
    scored = [game for game in games if game.rewards is not None]
    own = [game.rewards[game.names.index("tough")] for game in scored if game.rewards is not None]
    assert table.matrix["tough", "conceder"].value == pytest.approx(sum(own) / len(own))
    assert table.matrix["tough", "conceder"].low < table.matrix["tough", "conceder"].value
    assert table.ratings["tough"].value > table.ratings["conceder"].value
    for key, found in (("agreement", table.agreement), ("joint", table.joint), ("efficient", table.efficient)):
        assert found["tough"].value == pytest.approx(sum(game.info[key] for game in scored) / len(scored)), key
        assert found["tough"].low < found["tough"].value < found["tough"].high, key
    with pytest.raises(DataError, match="gone"):
        standings([game for game in games if game.failure])
    assert games == await play_tournament(world, {"tough": None, "conceder": None, "silent": Silent()}, tasks, seed=0)
    assert ET.fromstring(matrix_svg(table, "a & b")).tag.endswith("svg")


async def test_a_script_that_knows_one_seat_is_refused_where_every_player_has_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("negotiate", "tic_tac_toe", "customer_service"):
        check_seats(sided(name), sided(name).scripted_opponents)
    for name, script in (("bargain", "limit"), ("twenty_questions", "table")):
        world = sided(name)
        with pytest.raises(ConfigError, match=f"{script} is a script that plays seat 1 only"):
            await play_tournament(world, {script: None, "silent": Silent()}, [], seed=0)
        assert await play_tournament(world, {"other": Silent(), "silent": Silent()}, [], seed=0) == []
    monkeypatch.setenv("TURNWISE_HOME", str(tmp_path))
    assert main(["tournament", "base", "limit", "--env", "bargain", "--tasks", "2", "model=tiny"]) == 2
    assert "limit is a script that plays seat 1 only" in capsys.readouterr().err


def sided(name: str) -> TwoSidedWorld:
    world = get_world(name)
    assert isinstance(world, TwoSidedWorld)
    return world


class Slow(Silent):
    """A player that answers after everybody has stopped waiting."""

    name = "slow"

    async def reply(self, game: Game, dialogue: Sequence[Message], seed: int) -> str:  # noqa: ARG002
        await asyncio.sleep(30)
        return "Accept"


async def test_a_player_that_is_late_fails_its_games() -> None:
    world, limits = Negotiate(), TournamentLimits(deadline_s=0.05)
    games = await play_tournament(
        world, {"tough": None, "slow": Slow()}, world.tasks("test", 2, 0), seed=0, limits=limits
    )
    assert {game.failure for game in games} == {"slow: no answer within 0.05 s"}


async def drip(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001 - the ASGI signature
    """A server that sends a byte now and then, so that no single wait is long."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(100):
            await send({"type": "http.response.body", "body": b" ", "more_body": True})
            await asyncio.sleep(0.05)


def test_the_command_waits_for_a_reply_as_long_as_the_option_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNWISE_HOME", str(tmp_path))
    fetch_model("tiny")
    with serving(drip) as address:
        command = ["tournament", "tough", "fair", address, "--env", "negotiate", "--tasks", "2", "model=tiny"]
        assert main([*command, "opponent.model=m", "opponent.deadline_s=0.3"]) == 0
    assert "no answer within 0.3 s" in capsys.readouterr().out


def test_the_picture_tells_players_apart_and_shows_who_is_unreasonable() -> None:
    first, second, third = "runs/a/best", "runs/b/best", "tough"
    info = {"agreement": 0.5, "joint": 0.25, "efficient": 0.125}
    games = [
        TournamentGame(task_id=f"t{task}", names=names, rewards=(0.75, 0.5), info=info)
        for task in range(3)
        for names in ((first, second), (first, third))
    ]
    failed = [TournamentGame(task_id="t0", names=(second, third), rewards=None, failure="gone")]
    table = standings([*games, *failed])
    assert math.isnan(table.matrix[second, third].value)
    texts = [element.text or "" for element in ET.fromstring(matrix_svg(table, "the title")).iter() if element.text]
    assert "a/best" in texts
    assert "b/best" in texts
    assert any(text.startswith("tough (") for text in texts)
    assert texts.count("no game") == 2, "a pair whose games all failed has no number"
    assert "nan" not in "".join(texts)
    assert "0.25 to 0.25" in texts, "below the number, its interval"
    for head, value in (("agreement", "0.50"), ("joint surplus", "0.25"), ("all games", "0.75"), ("efficient", "0.12")):
        assert head in texts
        assert value in texts


def test_labels_tell_players_apart_by_as_little_as_that_takes() -> None:
    names = [
        *(f"/data/{run}/checkpoints/id-{run}/weights/step-{n}" for run in ("pool", "self") for n in (5, 9)),
        "tough",
    ]
    names += ["runs/a/best/", "runs/b/best", "one/runs/c", "two/runs/c"]
    expected = ["pool/step-5", "pool/step-9", "self/step-5", "self/step-9", "tough"]
    assert list(short_labels(names).values()) == [*expected, "a/best", "b/best", "one/runs/c", "two/runs/c"]
    assert short_labels(["a" * 30], 10) == {"a" * 30: "…aaaaaaaaa"}


def test_the_command_rates_scripts_and_refuses_what_is_no_player(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TURNWISE_HOME", str(tmp_path))
    assert main(["tournament", "tough", "fair", "--env", "negotiate", "--tasks", "2"]) == 0
    assert "tough" in capsys.readouterr().out, "scripts need no model"
    picture = tmp_path / "matrix.svg"
    command = ["tournament", "--env", "negotiate", "--tasks", "12", "model=tiny"]
    assert main([*command, "tough", "random", "--json", "--out", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_games"] == 24
    assert found["players"]["tough"]["elo"]["value"] > found["players"]["random"]["elo"]["value"]
    for key in ("agreement", "joint", "efficient"):
        told = found["players"]["tough"][key]
        assert told["low"] <= told["value"] <= told["high"]
    assert picture.read_text(encoding="utf-8").count("<rect") == 5
    for players, words in (
        (["tough"], "needs two"),
        (["tough", "tough"], "named twice"),
        (["tough", "pool"], "does not name one player"),
        (["tough", "no-such-player"], "expected a script"),
    ):
        assert main([*command, *players]) == 2
        assert words in capsys.readouterr().err
    assert main([*command, "tough", "fair", "--out", str(tmp_path)]) == 2
    assert "expected the name of a file" in capsys.readouterr().err
    assert main(["tournament", "tough", "fair"]) == 2
    assert "--env" in capsys.readouterr().err
