"""The dial fits the options that are given: every level of every way to play a world makes tasks."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from cases import for_each
from turnwise.config.files import load_config
from turnwise.envs.browser.miniwob_experts import PAGE_LEVELS, PLANNERS
from turnwise.envs.difficulty import levels_of
from turnwise.envs.registry import load_target
from turnwise.errors import ConfigError
from turnwise.training.objects import NO_OBJECTS

MINIWOB = [{"site": "miniwob"}] if find_spec("miniwob") is not None else []
WAYS = {
    "browser": [*({"site": site} for site in ("shop", "forum", "mail", "office")), *MINIWOB],
    "workspace": [
        *({"interface": one} for one in ("shell", "screen", "both")),
        {"interface": "shell", "reports_only": True},
    ],
}


def _settings(options: dict[str, object]) -> list[str]:
    return [f"env.options.{name}={str(value).lower()}" for name, value in options.items()]


@for_each(("name", "options"), [(name, options) for name, ways in WAYS.items() for options in ways])
def test_every_level_of_every_way_to_play_makes_tasks_of_its_own(name: str, options: dict[str, object]) -> None:
    levels = levels_of(load_target(name), options)
    assert len(levels) >= 3
    seen: list[object] = []
    for level in range(len(levels)):
        config = load_config(name, [*_settings(options), f"env.difficulty={level}"])
        world = NO_OBJECTS.make_world(config.env)
        seen.append(world.tasks("train", 2, 0))
        assert len(world.tasks("train", 2, 0)) == 2
    assert all(seen.count(one) == 1 for one in seen)


@for_each(("name", "options"), [(name, options) for name, ways in WAYS.items() for options in ways])
def test_a_curriculum_goes_through_all_levels_of_every_way_to_play(name: str, options: dict[str, object]) -> None:
    config = load_config(name, [*_settings(options), "env.curriculum=true"])
    world = NO_OBJECTS.make_world(config.env)
    assert len(world.parts) == len(levels_of(load_target(name), options))  # type: ignore[attr-defined]


def test_a_level_that_a_site_does_not_have_is_refused_with_those_that_it_has() -> None:
    config = load_config("browser", ["env.options.site=mail", "env.difficulty=5"])
    with pytest.raises(ConfigError, match="the levels 0 to 4"):
        NO_OBJECTS.make_world(config.env)


def test_each_page_with_an_expert_is_in_one_level_of_miniwob() -> None:
    assert sorted(page for pages in PAGE_LEVELS for page in pages) == sorted(PLANNERS)
