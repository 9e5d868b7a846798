"""Games of TextWorld-Express, in its own Java process."""

from __future__ import annotations

import pytest

textworld_express = pytest.importorskip("textworld_express", reason="run by tests/contract/test_java_packages.py")

from attempts import play  # noqa: E402 - after the check that the library is there
from turnwise.envs.adapters.textworld_express import GAMES, TextWorldExpressWorld  # noqa: E402
from turnwise.envs.check import check_env  # noqa: E402
from turnwise.envs.registry import get_world  # noqa: E402
from turnwise.errors import ConfigError  # noqa: E402

PATIENT_S = 120.0


def test_a_game_keeps_the_rules_and_its_gold_path_wins() -> None:
    report = check_env(get_world("textworld_express:coin"), num_tasks=2, deadline_s=PATIENT_S)
    assert report.is_ok, report


@pytest.mark.parametrize("game", GAMES)
async def test_the_gold_path_wins_every_game_at_the_first_levels(game: str) -> None:
    for level in (0, 1):
        world = TextWorldExpressWorld(game, level=level)
        for task in world.tasks("test", 3, 0):
            player = world.expert(task)
            _, steps = await play(world, [player(()) for _ in range(world.max_turns)], task)
            assert steps[-1].is_success, (game, level, task.id)
            assert sum(step.reward_parts["outcome"] for step in steps) == pytest.approx(1.0)


async def test_listed_commands_are_those_that_the_game_takes() -> None:
    world = TextWorldExpressWorld("coin", admissible=True)
    start, steps = await play(world, ["look around", "help", "look. look"])
    assert "look around" in start[1].content.rpartition("Commands: ")[2].split("; ")
    assert [step.is_unparsable for step in steps] == [False, True, True]


def test_the_splits_are_the_packages_and_share_no_seed() -> None:
    world = TextWorldExpressWorld("twc")
    train, held_out = ({task.data["seed"] for task in world.tasks(split, 200, 0)} for split in ("train", "test"))
    assert train
    assert held_out
    assert not train & held_out


def test_an_unknown_game_level_or_setting_says_what_is_there() -> None:
    with pytest.raises(ConfigError, match="mapreader"):
        get_world("textworld_express:mapreadr")
    with pytest.raises(ConfigError, match="expected 0 to 3"):
        get_world("textworld_express:coin", level=4)
    with pytest.raises(ConfigError, match="coin refuses settings="):
        get_world("textworld_express:coin", settings={"numRooms": 3}).tasks("train", 1, 0)
