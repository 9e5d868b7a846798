"""Games that TextWorld makes, compiles and plays."""

from __future__ import annotations

from pathlib import Path

import pytest

textworld = pytest.importorskip("textworld", reason="run by tests/contract/test_world_packages.py")

from attempts import play  # noqa: E402 - after the check that the library is there
from turnwise.envs.base import Task  # noqa: E402
from turnwise.envs.check import check_env  # noqa: E402
from turnwise.envs.registry import get_world  # noqa: E402
from turnwise.errors import ConfigError  # noqa: E402

# jericho says this of every game that it does not ship; TextWorld keeps score itself
pytestmark = pytest.mark.filterwarnings("ignore:Game .* is not fully supported")

PATIENT_S = 120.0
"""For a call that compiles a game on a busy machine."""
SMALL = Task(id="train-2", data={"seed": 2})


def _num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("games")


def test_a_game_keeps_the_rules_and_its_walkthrough_wins(folder: Path) -> None:
    report = check_env(get_world("textworld:custom", folder=folder), num_tasks=1, deadline_s=PATIENT_S)
    assert report.is_ok, report


async def test_the_same_seed_is_the_same_game_and_compiled_once(folder: Path) -> None:
    world = get_world("textworld:custom", folder=folder)
    first, _ = await play(world, ["look"], SMALL)
    files = sorted(folder.iterdir())
    again, steps = await play(world, ["look", "go. go"], SMALL)
    assert first == again
    assert sorted(folder.iterdir()) == files
    assert [step.is_unparsable for step in steps] == [False, True]


async def test_an_observation_has_neither_banner_nor_status_line_and_lists_commands_if_asked(folder: Path) -> None:
    world = get_world("textworld:custom", folder=folder, admissible=True)
    start, steps = await play(world, ["look"], SMALL)
    for message in (start[1], steps[0].messages[0]):
        assert "$$" not in message.content
        assert "0/1" not in message.content
        assert "inventory" in message.content.rpartition("Commands: ")[2].split("; ")


async def test_games_leave_no_file_behind_when_they_are_closed(folder: Path) -> None:
    world = get_world("textworld:custom", folder=folder)
    await play(world, ["look"], SMALL)
    before = _num_open_files()
    for _ in range(5):
        await play(world, ["look"], SMALL)
    assert _num_open_files() <= before


def test_a_setting_that_the_game_refuses_is_named(folder: Path) -> None:
    world = get_world("textworld:coin_collector", folder=folder, settings={"level": 999})
    with pytest.raises(ConfigError, match=r"coin_collector refuses settings=.*999"):
        world.demonstrations(1, 0)
    assert not [path for path in folder.iterdir() if path.name.startswith(".part-")]


def test_an_unknown_game_level_or_setting_says_what_is_there() -> None:
    with pytest.raises(ConfigError, match="coin_collector"):
        get_world("textworld:coin_colector")
    with pytest.raises(ConfigError, match="expected 0 to 3"):
        get_world("textworld:custom", level=4)
    with pytest.raises(ConfigError, match="expected rooms, objects, quest_length"):
        get_world("textworld:custom", settings={"romms": 3})
