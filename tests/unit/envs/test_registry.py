from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path

import pytest

from turnwise.envs import library
from turnwise.envs.difficulty import levels_of
from turnwise.envs.registry import SHIPPED_WORLDS, get_world, load_target, world_names, world_options
from turnwise.envs.worlds import is_world
from turnwise.errors import ConfigError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "envs.md"

WORLD = """\
from __future__ import annotations
from dataclasses import dataclass
from turnwise.envs.base import EnvStep, Task, user

@dataclass(frozen=True)
class Tiny:
    size: int = 3
    name = "tiny_world"
    max_turns = 1
    max_tokens = 4
    def tasks(self, split, count, seed): return [Task(id=f"{split}-{n}") for n in range(count)]
    def make_env(self, task, seed): return None
    def demonstrations(self, count, seed): return []

@dataclass
class NoWorld:
    x: int = 1

def make(size: int = 1): return Tiny(size)

ready = Tiny(9)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "my_worlds.py"
    file.write_text(WORLD, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    monkeypatch.delitem(sys.modules, "my_worlds", raising=False)
    return file


def test_shipped_worlds_go_by_the_names_they_are_listed_under() -> None:
    assert [get_world(name).name for name in world_names()] == list(world_names())


def test_every_world_in_the_library_is_listed() -> None:
    """A world is a class of a library file that hands out tasks and makes envs, with a name of its own."""
    found = {
        f"{module.name}:{name}"
        for module in pkgutil.iter_modules(library.__path__, f"{library.__name__}.")
        for name, value in vars(importlib.import_module(module.name)).items()
        if inspect.isclass(value) and value.__module__ == module.name and is_world(value) and not name.startswith("_")
    }
    assert found == set(SHIPPED_WORLDS.values())


def test_every_shipped_world_has_a_row_on_the_page_about_worlds() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| .* \| .* \| .* \| .* \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(world_names())


def test_the_page_about_worlds_links_to_every_page_of_a_world_and_to_the_adapters() -> None:
    links = set(re.findall(r"\]\(([\w/.]+)\)", PAGE.read_text(encoding="utf-8")))
    assert links >= {f"worlds/{page.name}" for page in (PAGE.parent / "worlds").glob("*.md")}
    assert "adapters/index.md" in links
    assert [link for link in links if not (PAGE.parent / link).is_file()] == []


def test_every_shipped_world_has_a_page_with_a_transcript_and_its_command() -> None:
    rows = dict(
        re.findall(r"^\| `(\w+)` \|[^|]*\]\(worlds/([\w.]+)[^|]*\|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert sorted(rows) == sorted(world_names())
    for name, page in rows.items():
        text = (PAGE.parent / "worlds" / page).read_text(encoding="utf-8")
        assert re.search(r"^(assistant  |\| assistant \|)", text, re.MULTILINE), f"{page} shows no attempt at {name}"
        assert re.search(rf"turnwise (train|check-env) {name}", text), f"{page} has no command for {name}"


def test_every_shipped_world_has_levels_a_script_repeatable_tasks_and_a_fork() -> None:
    without_fork: list[str] = []
    for name in world_names():
        levels = levels_of(load_target(name))
        assert len(levels) >= 2, f"{name} has no dial"
        for level in levels:
            world = get_world(name, **level)
            first = world.tasks("train", 1, 0)
            assert first == world.tasks("train", 1, 0), f"{name} {level}: the same seed draws other tasks"
            assert not {task.id for task in first} & {task.id for task in world.tasks("test", 4, 0)}
        default = get_world(name)
        assert callable(getattr(default, "demonstrations", None)), f"{name} has no script"
        (task,) = default.tasks("train", 1, 0)
        if not hasattr(default.make_env(task, 0), "fork"):
            without_fork.append(name)
    assert without_fork == ["browser"], "a page's scripts and forms are the browser's, so a page has no fork"


def test_an_adapters_prefix_alone_is_told_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match=r"world 'tau2' is missing the name after the colon; expected tau2:NAME"):
        get_world("tau2")


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no world 'guess_numbers'; did you mean 'guess_number'\? The shipped"):
        get_world("guess_numbers")


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="world guess_number: unknown option 'max_turn'; did you mean 'max_turns'"):
        get_world("guess_number", max_turn=3)


@pytest.mark.parametrize("value", ["8", 8.5, True, None])
def test_an_option_of_the_wrong_type_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"world guess_number: high=.* does not fit; expected a whole number"):
        get_world("guess_number", high=value)


def test_options_can_be_listed() -> None:
    options = {option.name: option.default for option in world_options("calculator")}
    assert options == {
        "max_digits": 3,
        "operators": "+-*",
        "protocol": "line",
        "max_turns": 3,
        "format_reward": 0.1,
        "wrong_penalty": 0.5,
        "demonstration_skill": 1.0,
    }


@pytest.mark.parametrize("how", ["my_worlds:{}", "my_worlds.py:{}", "./my_worlds.py:{}"])
def test_worlds_of_your_own_come_by_module_or_by_file(module: Path, how: str) -> None:
    assert get_world(how.format("Tiny"), size=4).size == 4  # pyright: ignore[reportAttributeAccessIssue]
    assert get_world(how.format("make"), size=5).size == 5  # pyright: ignore[reportAttributeAccessIssue]
    assert get_world(how.format("ready")).size == 9  # pyright: ignore[reportAttributeAccessIssue]
    assert get_world(f"{module}:Tiny").name == "tiny_world"


def test_a_file_may_import_the_file_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_my_world.py").write_text(WORLD, encoding="utf-8")
    file = tmp_path / "importing.py"
    file.write_text("from beside_my_world import Tiny\n\nclass Small(Tiny):\n    pass\n", encoding="utf-8")
    assert get_world(f"{file}:Small").name == "tiny_world"
    monkeypatch.delitem(sys.modules, "beside_my_world")


def test_the_same_file_is_loaded_once(module: Path) -> None:
    assert load_target(f"{module}:Tiny") is load_target("my_worlds.py:Tiny")


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("my_worlds:Tinny", "has no 'Tinny'; did you mean 'Tiny'"),
        ("my_worlds:", "has no ''"),
        ("my_world:Tiny", "no module 'my_world'"),
        ("my_worlds.inner:Tiny", "no module 'my_worlds.inner'"),
        ("my_world.py:Tiny", "no file "),
        ("my_worlds:NoWorld", "gives NoWorld; expected a world with tasks"),
    ],
)
def test_what_cannot_be_found_is_named(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        get_world(name)


def test_an_object_takes_no_options(module: Path) -> None:
    with pytest.raises(ConfigError, match="an object already, so it takes no options; got size"):
        get_world(f"{module}:ready", size=1)


def test_an_error_inside_your_module_stays_what_it_is(module: Path) -> None:
    module.write_text("import no_such_package_at_all\n", encoding="utf-8")
    with pytest.raises(ModuleNotFoundError, match="no_such_package_at_all"):
        get_world("my_worlds:Tiny")
    with pytest.raises(ModuleNotFoundError, match="no_such_package_at_all"):
        get_world("my_worlds.py:Tiny")


def test_a_world_of_another_library_hands_on_its_levels_if_it_has_any() -> None:
    assert levels_of(load_target("textworld:custom"))[1] == {"level": 1}
    assert levels_of(load_target("textarena:Nim-v0")) == ()
