"""Screens as text, and actions read from replies."""

from __future__ import annotations

import pytest

from cases import for_each
from turnwise.envs.base import assistant
from turnwise.envs.screen import (
    ScreenAction,
    ScreenElement,
    ScreenIds,
    ScreenProtocol,
    read_screen_reply,
    screen_rules,
    screen_to_text,
)
from turnwise.trajectory import Message, ToolCall

ACTIONS = [
    ScreenAction(kind="click", element=4),
    ScreenAction(kind="type", element=7, text='see "you" at six'),
    ScreenAction(kind="type", element=7),
    ScreenAction(kind="select", element=5, text="Chime"),
    ScreenAction(kind="scroll", text="down"),
    ScreenAction(kind="press", text="Enter"),
    ScreenAction(kind="back"),
    ScreenAction(kind="wait"),
    ScreenAction(kind="done"),
    ScreenAction(kind="done", text="42 euros"),
]


@pytest.mark.parametrize("protocol", ["text", "tool_call"])
def test_every_action_is_read_back_as_it_was_written(protocol: ScreenProtocol) -> None:
    for action in ACTIONS:
        assert read_screen_reply(assistant(action.to_reply(protocol)), protocol) == action
        assert action.kind in screen_rules(protocol)


@for_each(
    ("text", "expected"),
    [
        ("I want Wi-Fi off.\nclick 4\nclick 5", ScreenAction(kind="click", element=4)),
        ("Click on the switch.\n  CLICK [4]", ScreenAction(kind="click", element=4)),
        ('type 7 "hello there"', ScreenAction(kind="type", element=7, text="hello there")),
        ("Done: 42", ScreenAction(kind="done", text="42")),
        ("back.", ScreenAction(kind="back")),
    ],
)
def test_the_first_line_that_is_an_action_counts(text: str, expected: ScreenAction) -> None:
    assert read_screen_reply(assistant(text), "text") == expected


@for_each(
    "text", ["", "click", "click the button", "select 5", "scroll left", "press the key", "x" * 20_000, "click -1"]
)
def test_a_reply_without_an_action_is_told_the_grammar(text: str) -> None:
    problem = read_screen_reply(assistant(text), "text")
    assert isinstance(problem, str)
    assert "click ID" in problem


@for_each(
    ("call", "complaint"),
    [
        (ToolCall(name="clik", arguments={"id": 4}), "click"),
        (ToolCall(name="click", arguments={"id": "the button"}), "id"),
        (ToolCall(name="scroll", arguments={"direction": "left"}), "direction"),
    ],
)
def test_a_wrong_call_is_told_what_is_wrong(call: ToolCall, complaint: str) -> None:
    problem = read_screen_reply(Message(role="assistant", content="", tool_calls=(call,)), "tool_call")
    assert isinstance(problem, str)
    assert complaint in problem


def test_a_screen_that_is_too_long_says_how_much_is_left_out() -> None:
    elements = [ScreenElement(id=n, role="button", name=f"Song {n}") for n in range(1, 41)]
    text = screen_to_text("Songs", elements, max_chars=200)
    *shown, last = text.split("\n")[1:]
    assert len(text) <= 200
    assert last == f"... {40 - len(shown)} more elements"
    assert screen_to_text("Songs", elements, max_chars=10_000).count("\n") == 40


def test_a_line_has_id_role_name_value_and_states() -> None:
    element = ScreenElement(
        id=3, role="textbox", name='Say "hi"', value="a\nb", states=("focused", "required"), depth=1
    )
    assert element.to_line() == '  [3] textbox "Say \\"hi\\"" = "a\\nb" (focused, required)'
    assert ScreenElement(role="text", name="").to_line() == 'text ""'


def test_an_element_keeps_its_id_and_a_copy_goes_its_own_way() -> None:
    ids = ScreenIds()
    assert [ids.number(key) for key in ("home", ("contact", 3), "home")] == [1, 2, 1]
    other = ids.copy()
    assert other.number("notes") == 3
    assert ids.number("mail") == 3
