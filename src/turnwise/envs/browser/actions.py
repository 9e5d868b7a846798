"""What a policy can do on a page, as a line of text or as a tool call.

click 12                 {"name": "click", "arguments": {"id": 12}}
type 7 red mug           {"name": "type", "arguments": {"id": 7, "text": "red mug"}}
select 9 Blue            {"name": "select", "arguments": {"id": 9, "option": "Blue"}}
press Enter   scroll down   back   wait   done
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from turnwise.envs.tools import CALL_FORMAT, format_tool_call, parse_tool_calls
from turnwise.trajectory import Message

ActionKind = Literal["click", "type", "select", "press", "scroll", "back", "wait", "done"]
ActionForm = Literal["text", "tools"]

MAX_TEXT = 500
"""Most characters of a text that is typed."""
KEYS = ("Enter", "Tab", "Escape", "Backspace", "Delete", "ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight", "Space")

_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "click": ("id",),
    "type": ("id", "text"),
    "select": ("id", "option"),
    "press": ("key",),
    "scroll": ("direction",),
    "back": (),
    "wait": (),
    "done": (),
}

RULES: Mapping[ActionForm, str] = {
    "text": "Use the page. Each turn write one action: click ID, type ID TEXT, select ID OPTION, press KEY, "
    "scroll down, scroll up, back, wait, or done when the task is finished.",
    "tools": "Use the page. Each turn call one tool: click(id), type(id, text), select(id, option), press(key), "
    f"scroll(direction), back(), wait(), or done() when the task is finished. Call it like this:\n{CALL_FORMAT}",
}


class ActionError(Exception):
    """A reply is no action; the message tells the policy why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing to do on a page."""

    kind: ActionKind
    element: int = 0
    """The id of an element in the observation."""
    text: str = ""
    """What is typed, selected or pressed, or the direction to scroll."""

    def to_reply(self, form: ActionForm = "text") -> str:
        """The reply that means this action."""
        values = self._values()
        if form == "tools":
            return format_tool_call(self.kind, **values)
        return " ".join([self.kind, *map(str, values.values())])

    def _values(self) -> dict[str, object]:
        return {name: self.element if name == "id" else self.text for name in _ARGUMENTS[self.kind]}


def parse_action(reply: Message, form: ActionForm = "text") -> Action:
    """The action of a reply. `ActionError` if there is none, or more than one."""
    return _parse_call(reply) if form == "tools" else _parse_line(reply.content)


def _parse_line(text: str) -> Action:
    text = text.strip()
    if "\n" in text:
        raise ActionError("write one action in one line")
    kind, _, rest = text.partition(" ")
    names = _ARGUMENTS.get(kind.lower())
    if names is None:
        raise ActionError(f"no action {kind[:20]!r}; expected {', '.join(_ARGUMENTS)}")
    parts = rest.strip().split(maxsplit=1) if len(names) == 2 else [rest.strip()] if rest.strip() else []
    if len(names) == 2 and len(parts) == 1:
        parts.append("")  # an empty text clears a field
    if len(parts) != len(names):
        raise ActionError(f"expected {' '.join([kind.lower(), *(name.upper() for name in names)])}")
    return _checked(kind.lower(), dict(zip(names, parts, strict=True)))


def _parse_call(reply: Message) -> Action:
    _, calls, problem = parse_tool_calls(reply.content)
    calls = calls or reply.tool_calls
    if problem or len(calls) != 1:
        raise ActionError(problem or f"{len(calls)} tool calls; expected one")
    name, arguments = calls[0].name, calls[0].arguments
    wanted = _ARGUMENTS.get(name)
    if wanted is None:
        raise ActionError(f"no tool {name[:20]!r}; expected {', '.join(_ARGUMENTS)}")
    if set(arguments) != set(wanted):
        raise ActionError(f"{name} takes {', '.join(wanted) or 'no arguments'}")
    return _checked(name, arguments)


def _checked(kind: str, given: Mapping[str, Any]) -> Action:
    values = {name: str(value).strip() for name, value in given.items()}
    number = values.get("id", "0").strip("[]")
    if not re.fullmatch(r"[0-9]{1,6}", number):
        raise ActionError(f"{number[:20]!r} is no element; expected the number in front of one")
    text = next((value for name, value in values.items() if name != "id"), "")
    if len(text) > MAX_TEXT or not text.isprintable():
        raise ActionError(f"the text has more than {MAX_TEXT} characters, or some that cannot be typed")
    if kind == "press" and text not in KEYS:
        raise ActionError(f"no key {text[:20]!r}; expected {', '.join(KEYS)}")
    if kind == "scroll" and text not in ("down", "up"):
        raise ActionError(f"scroll {text[:20]!r}; expected down or up")
    return Action(kind=kind, element=int(number), text=text)  # pyright: ignore[reportArgumentType]
