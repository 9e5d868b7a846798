"""Experts for some pages of MiniWoB++: they read the goal and the first observation, and make a plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from turnwise.envs.browser.expert import PlanStep, choose, click, fill, plan_player, read_elements
from turnwise.envs.browser.names import as_numbered, named_plan_player
from turnwise.envs.screen import ScreenProtocol
from turnwise.envs.scripted import ScriptedPlayer
from turnwise.trajectory import Message

Plan = list[PlanStep]
Planner = Callable[[str, str], Plan]
"""(goal, first observation) -> plan."""

TEN_PAGES = (
    "choose-list",
    "click-button",
    "click-dialog-2",
    "click-link",
    "click-option",
    "click-tab",
    "click-test-2",
    "click-widget",
    "enter-text",
    "focus-text-2",
)
"""A set to learn: one of each kind of thing that a page can ask for."""

PAGE_LEVELS = (
    (
        *("click-button", "click-dialog", "click-dialog-2", "click-link", "click-tab", "click-test", "click-test-2"),
        *("click-test-transfer", "click-widget", "focus-text", "focus-text-2", "unicode-test"),
    ),
    (
        *("choose-list", "click-button-sequence", "click-option", "enter-date", "enter-text", "enter-text-dynamic"),
        *("enter-time", "read-table", "simple-arithmetic"),
    ),
    (
        *("click-checkboxes", "click-checkboxes-large", "click-checkboxes-transfer", "enter-password", "login-user"),
        "odd-or-even",
    ),
)
"""The pages with an expert, by the number of its actions: one, two, and up to thirteen."""

_SUBMIT = click("button", "Submit")
_WIDGETS = {"text": "textbox", "textarea": "textbox", "button": "button", "radio": "radio", "checkbox": "checkbox"}


def _quoted(goal: str) -> list[str]:
    return re.findall(r'"([^"]*)"', goal)


def _names(goal: str) -> list[str]:
    listed = re.sub(r"^Select | and click Submit\.$", "", goal)
    return [] if listed == "nothing" else listed.split(", ")


def _dialog(goal: str, _: str) -> Plan:
    label = _quoted(goal)[0]
    return [click("button", "Close" if label == "x" else label)]


def _sequence(goal: str, _: str) -> Plan:
    return [click("button", name) for name in re.findall(r"button (\w+)", goal)]


def _password(goal: str, _: str) -> Plan:
    return [fill("", _quoted(goal)[0]), fill("", _quoted(goal)[0], place=1), _SUBMIT]


def _login(goal: str, _: str) -> Plan:
    name, password = _quoted(goal)
    return [fill("", name), fill("", password, place=1), click("button", "Login")]


def _date(goal: str, _: str) -> Plan:
    month, day, year = re.findall(r"\d+", goal)
    return [fill("", f"{year}-{month:0>2}-{day:0>2}"), _SUBMIT]


def _time(goal: str, _: str) -> Plan:
    hour, minute, half = re.findall(r"(\d+):(\d+) (AM|PM)", goal)[0]
    return [fill("", f"{int(hour) % 12 + 12 * (half == 'PM'):02}:{minute}"), _SUBMIT]


def _arithmetic(_: str, seen: str) -> Plan:
    first, sign, second = re.findall(r"(-?\d+) ([-+x*]) (-?\d+) =", seen)[0]
    a, b = int(first), int(second)
    return [fill("", a + b if sign == "+" else a - b if sign == "-" else a * b), _SUBMIT]


def _read_table(goal: str, seen: str) -> Plan:
    wanted = re.findall(r"value of (.+?) into", goal)[0]
    names = [element.name for element in read_elements(seen)]
    return [fill("", names[names.index(wanted) + 1]), _SUBMIT]


def _odd_or_even(_: str, seen: str) -> Plan:
    numbers = [int(one.name) for one in read_elements(seen) if re.fullmatch(r"-?\d+", one.name)]
    marks = [click("button", "Odd" if number % 2 else "Even", place=row) for row, number in enumerate(numbers)]
    return [*marks, _SUBMIT]


def _nth_text(goal: str, _: str) -> Plan:
    return [click("textbox", "", place=int(re.findall(r"\d+", goal)[0]) - 1)]


def _widget(goal: str, seen: str) -> Plan:
    role = _WIDGETS[_quoted(goal)[0]]
    return [click(role, next(one.name for one in read_elements(seen) if one.role == role))]


def _choose_list(goal: str, _: str) -> Plan:
    return [choose("", re.sub(r"^Select | from the list and click Submit\.$", "", goal)), _SUBMIT]


PLANNERS: Mapping[str, Planner] = {
    "choose-list": _choose_list,
    "click-button": lambda goal, _: [click("button", _quoted(goal)[0])],
    "click-button-sequence": _sequence,
    "click-checkboxes": lambda goal, _: [*(click("checkbox", name) for name in _names(goal)), _SUBMIT],
    "click-checkboxes-large": lambda goal, _: [*(click("checkbox", name) for name in _names(goal)), _SUBMIT],
    "click-checkboxes-transfer": lambda goal, _: [*(click("checkbox", name) for name in _names(goal)), _SUBMIT],
    "click-dialog": lambda _, __: [click("button", "Close")],
    "click-dialog-2": _dialog,
    "click-link": lambda goal, _: [click("link", _quoted(goal)[0])],
    "click-option": lambda goal, _: [*(click("radio", name) for name in _names(goal)), _SUBMIT],
    "click-tab": lambda goal, _: [click("tab", re.findall(r"Tab #\d+", goal)[0])],
    "click-test": lambda _, __: [click("button", "Click Me!")],
    "click-test-2": lambda _, __: [click("button", "ONE")],
    "click-test-transfer": lambda _, __: [click("button", "ONE")],
    "click-widget": _widget,
    "enter-date": _date,
    "enter-password": _password,
    "enter-text": lambda goal, _: [fill("", _quoted(goal)[0]), _SUBMIT],
    "enter-text-dynamic": lambda goal, _: [fill("", _quoted(goal)[0]), _SUBMIT],
    "enter-time": _time,
    "focus-text": lambda _, __: [click("textbox", "")],
    "focus-text-2": _nth_text,
    "login-user": _login,
    "odd-or-even": _odd_or_even,
    "read-table": _read_table,
    "simple-arithmetic": _arithmetic,
    "unicode-test": lambda goal, _: [click("button", _quoted(goal)[0])],
}
"""The pages that have an expert."""


def miniwob_player(
    page: str, protocol: ScreenProtocol, forgets: int | None = None, *, by_name: bool = False
) -> ScriptedPlayer:
    """The expert of a page. With `forgets` it leaves out that step, counted around the plan."""
    planned: list[ScriptedPlayer] = []

    def reply(dialogue: Sequence[Message]) -> str:
        if not planned:
            told = dialogue[-1].content.removeprefix("Task: ")
            goal, _, seen = told.partition("\n")
            plan = PLANNERS[page](goal, as_numbered(seen) if by_name else seen)
            if forgets is not None:
                plan.pop(forgets % len(plan))
            planned.append(named_plan_player(plan) if by_name else plan_player(plan, protocol))
        return planned[0](dialogue)

    return reply
