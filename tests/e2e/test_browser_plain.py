"""A site shows the same, reply for reply, in a real Chromium and without a browser."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from turnwise.envs.browser.names import named_random_player
from turnwise.envs.browser.pool import close_pools
from turnwise.envs.library.browser import PLAIN_SITES, BrowserWorld
from turnwise.envs.scripted import ScriptedPlayer, play_script
from turnwise.trajectory import Message

pytest.importorskip("playwright", reason="run by tests/contract/test_browser_packages.py")
pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.fixture(autouse=True, scope="module")
def _browsers_end() -> Iterator[None]:
    yield
    close_pools()


async def _dialogues(world: BrowserWorld, *, is_random: bool) -> list[list[Message]]:
    found: list[list[Message]] = []
    for number, task in enumerate(world.tasks("test", 2 if is_random else 1, 0)):  # an expert sees few of the pages
        rng = random.Random(number)
        player: ScriptedPlayer = named_random_player(rng, task.id.split("-")) if is_random else world.expert(task, rng)
        found.append(await play_script(world.make_env(task, 0), player, world.max_turns))
    return found


@pytest.mark.parametrize("site", PLAIN_SITES)
async def test_experts_and_random_players_see_the_same_with_and_without_a_browser(site: str) -> None:
    for level in (0, 1, 3) if site == "shop" else (1, 3):
        options = {"site": site, "level": level, "by_name": True, "max_chars": 400}
        plain = BrowserWorld(engine="plain", **options)  # type: ignore[arg-type]
        real = BrowserWorld(engine="chromium", **options)  # type: ignore[arg-type]
        for is_random in (False, True):
            assert await _dialogues(plain, is_random=is_random) == await _dialogues(real, is_random=is_random)
