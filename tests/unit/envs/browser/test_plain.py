"""Our own sites without a browser: experts reach their goals, forms send what is filled in, notes say what failed."""

from __future__ import annotations

import random
import re

import pytest

from turnwise.envs.base import Task, assistant
from turnwise.envs.browser.names import named_plan_player
from turnwise.envs.browser.plain import PlainPage
from turnwise.envs.browser.sites.office import Office
from turnwise.envs.browser.sites.shop import Shop
from turnwise.envs.check import check_env
from turnwise.envs.library.browser import PLAIN_SITES, BrowserWorld
from turnwise.envs.screen import ScreenAction
from turnwise.envs.scripted import ScriptedPlayer, play_script
from turnwise.errors import ConfigError


async def _is_solved(world: BrowserWorld, task: Task, player: ScriptedPlayer) -> bool:
    env = world.make_env(task, 0)
    dialogue = await play_script(env, player, world.max_turns)
    again = world.make_env(task, 0)
    await again.start()
    steps = [await again.step(message) for message in dialogue if message.role == "assistant"]
    await again.close()
    return bool(steps[-1].is_success)


@pytest.mark.parametrize("site", PLAIN_SITES)
async def test_experts_reach_every_goal_and_a_forgotten_step_is_seen(site: str) -> None:
    world = BrowserWorld(site=site, by_name=True, engine="plain")  # type: ignore[arg-type]
    careless = BrowserWorld(site=site, by_name=True, engine="plain", demonstration_skill=0.0)  # type: ignore[arg-type]
    tasks = world.tasks("test", 6, 0)
    for task in tasks:
        assert await _is_solved(world, task, world.expert(task, random.Random(1))), task.id
    careless_ones = [await _is_solved(world, task, careless.expert(task, random.Random(1))) for task in tasks]
    assert sum(careless_ones) <= 3  # some steps are not needed


@pytest.mark.parametrize(
    ("site", "level", "fewest", "most"),
    [
        ("shop", 4, 19, 22),
        ("shop", 5, 29, 37),
        ("forum", 4, 25, 25),
        ("forum", 5, 36, 36),
        ("mail", 4, 22, 22),
        ("mail", 5, 36, 36),
    ],
)
async def test_the_hardest_levels_take_an_expert_twenty_to_forty_actions(
    site: str, level: int, fewest: int, most: int
) -> None:
    world = BrowserWorld(site=site, level=level, by_name=True, engine="plain")  # type: ignore[arg-type]
    for task in world.tasks("test", 4, 0):
        env, player = world.make_env(task, 0), world.expert(task, random.Random(1))
        dialogue, actions = list(await env.start()), 0
        while True:
            dialogue.append(assistant(player(dialogue)))
            actions += not dialogue[-1].content.startswith("scroll")
            step = await env.step(dialogue[-1])
            dialogue += step.messages
            if step.is_over:
                break
        await env.close()
        assert step.is_success, task.id
        assert fewest <= actions <= most


@pytest.mark.parametrize("level", [4, 5])
async def test_the_hardest_levels_of_the_office_take_an_expert_twenty_six_to_forty_actions(level: int) -> None:
    fewest, most = {4: (26, 30), 5: (34, 39)}[level]
    for seed in range(20):
        task = Office.draw_task(seed, level)
        assert fewest <= len(task.plan) + 1 <= most  # and `done`


async def test_who_sees_elements_only_can_tell_which_product_is_the_cheapest() -> None:
    world = BrowserWorld(level=5, by_name=True, engine="plain")
    asked = 0
    for task in world.tasks("test", 12, 0):
        goal = Shop.draw_task(task.data["seed"], 5).goal
        if not (found := re.search(r"the cheapest product of (\w+) ", goal)):
            continue
        asked += 1
        page = PlainPage.open(Shop(task.data["seed"], 5), 5000, f"/category/{found[1]}")
        prices = {name: int(price) for name, price in re.findall(r"link (.+), \$(\d+)", await page.observe())}
        cheapest = min(prices, key=prices.__getitem__)
        plan = named_plan_player(Shop.draw_task(task.data["seed"], 5).plan)
        env = world.make_env(task, 0)
        dialogue = await play_script(env, plan, world.max_turns)
        assert any(message.content == f"click {cheapest}, ${prices[cheapest]}" for message in dialogue)
    assert asked >= 3


def test_it_keeps_the_rules_of_a_world() -> None:
    report = check_env(BrowserWorld(level=0, by_name=True, engine="plain"), num_tasks=3)
    assert report.is_ok, report


async def test_fields_boxes_lists_and_the_way_back_work_as_in_a_browser() -> None:
    page = PlainPage.open(Shop(1, 3), 2000)
    home = await page.observe()
    number = {element.name: element.id for element in page.elements}
    await page.act(ScreenAction(kind="type", element=number["Find"], text="pan"))
    found = await page.act(ScreenAction(kind="click", element=number["Search"]))
    assert found != home
    assert page.place == "/search?q=pan:0"
    assert await page.act(ScreenAction(kind="back")) == home
    assert "there is no page to go back to" in await page.act(ScreenAction(kind="back"))
    assert "this element takes no text" in await page.act(ScreenAction(kind="type", element=1, text="x"))
    assert "no option 'x'; the options are none" in await page.act(ScreenAction(kind="select", element=1, text="x"))


async def test_a_long_page_is_shown_in_parts() -> None:
    page = PlainPage.open(Shop(1, 3), 100)
    first = await page.observe()
    assert "(more below)" in first
    second = await page.act(ScreenAction(kind="scroll", text="down"))
    assert "(more above)" in second
    assert await page.act(ScreenAction(kind="scroll", text="up")) == first


def test_the_smallest_shop_has_four_products_of_one_word_each() -> None:
    world = BrowserWorld(level=0, by_name=True, engine="plain")
    goals = {Shop.draw_task(task.data["seed"], 0).goal for task in world.tasks("train", 300, 0)}
    assert len(goals) == 24


def test_what_a_plain_reader_cannot_show_is_refused() -> None:
    for options in ({"by_name": False}, {"by_name": True, "site": "office"}, {"by_name": True, "screenshots": "all"}):
        with pytest.raises(ConfigError, match="engine=plain"):
            BrowserWorld(engine="plain", **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="for site=shop 0 too"):
        BrowserWorld(site="forum", level=0)
