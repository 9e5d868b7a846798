"""Screens as text, and the actions that a policy takes on them: one grammar for browser pages and for the phone.

    Settings                            the title of the screen
    [1] button "Back"                   an element: its id, role and name
    [4] switch "Wi-Fi" (off)            its states
    [5] combobox "Ringtone" = "Bell"    its value
    text "3 more below"                 without an id: to read only

    click 4        type 7 see you at six        select 5 Chime        scroll down
    press Enter    back                         wait                  done, or done ANSWER

The first line of a reply that is an action counts; lines before it are thoughts. With `protocol="tool_call"` the same
actions are tools of the same names. An element keeps its id for the whole attempt (`ScreenIds`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from turnwise.envs.schema import match_arguments
from turnwise.envs.tools import Toolbox, format_tool_call, tool
from turnwise.errors import DataError
from turnwise.runtime.suggest import did_you_mean
from turnwise.trajectory import Message

ScreenActionKind = Literal["click", "type", "select", "scroll", "press", "back", "wait", "done"]
ScreenProtocol = Literal["text", "tool_call"]

RULES = """\
One action in a reply:
click ID
type ID TEXT
select ID OPTION
scroll up, scroll down
press KEY
back
wait
done, or done ANSWER"""

_KINDS = get_args(ScreenActionKind)
_ON_ELEMENT = ("click", "type", "select")
_LINE = re.compile(rf"[ \t]*({'|'.join(_KINDS)})\b[ \t]*(.*?)[ \t]*", re.IGNORECASE)
_ELEMENT = re.compile(r"\[?([0-9]{1,6})\]?(?:[ \t]+(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenAction:
    """One action of the policy."""

    kind: ScreenActionKind
    element: int | None = None
    """The id of the element, for click, type and select."""
    text: str = ""
    """What to type, the option to select, the key to press, the direction to scroll, or the answer at the end."""

    def to_text(self) -> str:
        """The action as a line that `read_screen_reply` reads back."""
        words = [self.kind, *([str(self.element)] if self.element is not None else []), self.text]
        return " ".join(word for word in words if word)

    def to_reply(self, protocol: ScreenProtocol) -> str:
        """The action as a policy writes it in this protocol, for demonstrations and tests."""
        if protocol == "text":
            return self.to_text()
        names = _ARGUMENTS[self.kind]
        given = {"id": self.element, **{name: self.text for name in names if name != "id"}}
        return format_tool_call(self.kind, **{name: given[name] for name in names if given[name] or name != "answer"})


class _ScreenTools:
    """The actions as tools; only their names and arguments are used."""

    @tool
    def click(self, id: int) -> None:  # noqa: A002 - the name that a policy writes
        """Click an element."""

    @tool
    def type(self, id: int, text: str) -> None:  # noqa: A002 - the name that a policy writes
        """Replace the text of an element."""

    @tool
    def select(self, id: int, option: str) -> None:  # noqa: A002 - the name that a policy writes
        """Choose an option of an element."""

    @tool
    def scroll(self, direction: Literal["up", "down"]) -> None:
        """Show what is above or below."""

    @tool
    def press(self, key: str) -> None:
        """Press a key, such as Enter."""

    @tool
    def back(self) -> None:
        """Go back to the screen before."""

    @tool
    def wait(self) -> None:
        """Do nothing for a moment."""

    @tool
    def done(self, answer: str = "") -> None:
        """Say that the task is done; this is the end."""


_TOOLBOX = Toolbox(_ScreenTools())
_PARAMETERS = {spec.name: spec.signature.parameters for spec in _TOOLBOX.specs}
_ARGUMENTS = {name: [parameter.name for parameter in parameters] for name, parameters in _PARAMETERS.items()}


def screen_rules(protocol: ScreenProtocol) -> str:
    """The actions, as a system message explains them."""
    return RULES if protocol == "text" else _TOOLBOX.describe()


def read_screen_reply(reply: Message, protocol: ScreenProtocol) -> ScreenAction | str:
    """Read the first action of a reply. A text is what was wrong with it, in words for the policy."""
    if protocol == "tool_call" or reply.tool_calls:
        return _read_call(reply)
    for line in reply.content.split("\n"):
        found = _LINE.fullmatch(line)
        if found is None:
            continue
        action = _read_line(found[1].lower(), found[2])
        if action is not None:
            return action
    return f"No action found. {RULES.replace(chr(10), '; ').replace(':;', ':', 1)}"


def _read_line(kind: str, rest: str) -> ScreenAction | None:
    """Return the action, or None if the line only begins like one ("Click on the button ...")."""
    element: int | None = None
    if kind in _ON_ELEMENT:
        found = _ELEMENT.fullmatch(rest)
        if found is None:
            return None
        element, rest = int(found[1]), _unquoted(found[2] or "")
        if (kind == "click" and rest) or (kind == "select" and not rest):
            return None
    elif kind == "scroll":
        rest = rest.lower().rstrip(".")
        if rest not in ("up", "down"):
            return None
    elif (kind == "press" and (not rest or len(rest.split()) > 1)) or (kind in ("back", "wait") and rest.rstrip(".!")):
        return None
    rest = "" if kind in ("back", "wait") else rest
    return ScreenAction(
        kind=_KINDS[_KINDS.index(kind)], element=element, text=rest.lstrip(": ") if kind == "done" else rest
    )


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def _read_call(reply: Message) -> ScreenAction | str:
    parsed = _TOOLBOX.read(reply)
    if not parsed.calls:
        return f"error: {parsed.problem or 'no tool call found; the tools are ' + ', '.join(_KINDS)}"
    call = parsed.calls[0]
    if call.name not in _PARAMETERS:
        near = did_you_mean(call.name, _PARAMETERS)
        return f"error: no tool {call.name[:40]!r}{near}; the tools are {', '.join(_KINDS)}"
    try:
        given: dict[str, Any] = match_arguments(_PARAMETERS[call.name], call.arguments)
    except DataError as error:
        return f"error: {call.name}: {error}"
    texts = [str(value) for name, value in given.items() if name != "id"]
    text = " ".join(texts[0].split("\n")) if texts else ""
    return ScreenAction(kind=_KINDS[_KINDS.index(call.name)], element=given.get("id"), text=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenElement:
    """One line of a screen."""

    role: str
    """What it is, in the words of accessibility trees: button, link, textbox, switch, combobox, heading, text ..."""
    name: str
    id: int | None = None
    """None for what can only be read."""
    value: str | None = None
    states: tuple[str, ...] = ()
    depth: int = 0
    """How far it is indented."""

    def to_line(self) -> str:
        number = f"[{self.id}] " if self.id is not None else ""
        value = f" = {_quoted(self.value)}" if self.value is not None else ""
        states = f" ({', '.join(self.states)})" if self.states else ""
        return f"{'  ' * self.depth}{number}{self.role} {_quoted(self.name)}{value}{states}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def screen_to_text(title: str, elements: Sequence[ScreenElement], max_chars: int) -> str:
    """The screen as text. What does not fit into `max_chars` is left out at the end, and the last line says so."""
    lines = [title, *(element.to_line() for element in elements)]
    total = sum(len(line) + 1 for line in lines) - 1
    if total <= max_chars:
        return "\n".join(lines)
    kept, used = lines[:1], len(lines[0])
    for line in lines[1:]:
        if used + 1 + len(line) > max_chars - len("\n... 9999 more elements"):
            break
        kept.append(line)
        used += 1 + len(line)
    return "\n".join([*kept, f"... {len(lines) - len(kept)} more elements"])


@dataclass
class ScreenIds:
    """Gives every element a number when it is first seen, from 1, and keeps it."""

    _numbers: dict[Hashable, int] = field(default_factory=dict[Hashable, int])

    def number(self, key: Hashable) -> int:
        """The id of the element with this key. A key says which element it is, wherever it stands."""
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    def copy(self) -> ScreenIds:
        return ScreenIds(dict(self._numbers))
