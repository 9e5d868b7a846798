"""Pages by name: every element has a name of its own, actions find it, and players read what is shown."""

from __future__ import annotations

import random

import pytest

from cases import for_each
from turnwise.envs.base import user
from turnwise.envs.browser.expert import choose, click, fill
from turnwise.envs.browser.names import (
    as_numbered,
    named_observation,
    named_plan_player,
    named_random_player,
    read_named_reply,
)
from turnwise.envs.browser.snapshot import Element
from turnwise.envs.library.browser import BrowserWorld
from turnwise.envs.screen import ScreenAction
from turnwise.errors import ConfigError

ELEMENTS = [
    Element(id=1, role="link", name="Home"),
    Element(id=2, role="textbox", name=""),
    Element(id=3, role="textbox", name="", value="x"),
    Element(id=4, role="radio", name="72"),
    Element(id=5, role="combobox", name="Stars = all", value="1", options=("1", "2")),
    Element(id=6, role="button", name="Home", states=("disabled",)),
]
SHOWN = """\
link Home
textbox
textbox 2 = x
radio 72
combobox Stars all = 1 of 1, 2
button Home 2 (disabled)"""


def test_every_element_has_a_name_of_its_own_and_hidden_lines_are_told() -> None:
    assert named_observation(ELEMENTS, 0, 6) == SHOWN
    assert named_observation(ELEMENTS, 1, 2) == "(more above)\ntextbox\n(more below)"


@for_each(
    ("reply", "action"),
    [
        ("click Home", ScreenAction(kind="click", element=1)),
        ("thinking\nClick home 2", ScreenAction(kind="click", element=6)),
        ("click radio 72", ScreenAction(kind="click", element=4)),
        ("type textbox 2 = a = b", ScreenAction(kind="type", element=3, text="a = b")),
        ("select Stars all = 2", ScreenAction(kind="select", element=5, text="2")),
        ("scroll down", ScreenAction(kind="scroll", text="down")),
        ("Done.", ScreenAction(kind="done")),
        ("click Nowhere", "note: there is no Nowhere on the page"),
    ],
)
def test_actions_find_elements_by_name(reply: str, action: ScreenAction | str) -> None:
    assert read_named_reply(reply, ELEMENTS) == action


def test_players_read_what_is_shown() -> None:
    plan = [click("link", "Home"), fill("", "x", place=1), click("radio", ""), choose("Stars = all", "2")]
    expert = named_plan_player(plan)
    said = [expert([user(SHOWN)]) for _ in range(3)]
    assert said == ["click Home", "type textbox 2 = x", "click radio 72"]
    assert expert([user("link Home\n(more below)")]) == "scroll down"
    assert [expert([user(SHOWN)]) for _ in range(2)] == ["select Stars all = 2", "done"]
    assert as_numbered("button Home 2 (disabled)\ntextbox 2 = x") == '[1] button "Home 2"\n[2] textbox ""'
    anyone = named_random_player(random.Random(0), ["word"])
    replies = {anyone([user(SHOWN)]) for _ in range(50)}
    assert not any(isinstance(read_named_reply(reply, ELEMENTS), str) for reply in replies)


def test_names_and_tool_calls_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="protocol=text only"):
        BrowserWorld(by_name=True, protocol="tool_call")
