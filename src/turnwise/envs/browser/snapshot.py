"""An accessibility snapshot as short lines of text, cut to a budget.

Playwright gives every element of a page a reference that stays with the element. This module turns its snapshot into
lines such as `[12] button "Add to cart"`, and shows as many of them as the budget allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

USABLE_ROLES = frozenset(
    (
        *("button", "checkbox", "combobox", "link", "listbox", "menuitem", "option", "radio", "searchbox"),
        *("slider", "spinbutton", "switch", "tab", "textbox", "treeitem"),
    )
)
_SILENT_ROLES = frozenset(("generic", "img", "listitem", "paragraph", "cell", "row", "gridcell"))
_VALUE_ROLES = frozenset(("textbox", "searchbox", "spinbutton", "slider", "combobox"))
_TEXT_ROLES = frozenset(("text", "heading", "columnheader", "rowheader"))
_CONTAINERS = frozenset(
    ("row", "rowgroup", "table", "list", "main", "banner", "navigation", "group", "tablist", "tabpanel", "dialog")
)
_STATES = ("checked", "disabled", "expanded", "pressed", "selected")
_REF = re.compile(r"\[ref=([a-z0-9]+)\]")
_LINE = re.compile(
    r'(?P<indent> *)- (?P<role>[a-z/]+)(?: (?P<name>"(?:[^"\\]|\\.)*"))?'
    r"(?P<marks>(?: \[[^\]]*\])*)(?P<colon>:?)(?: (?P<text>.*))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """One line of an observation."""

    id: int | None
    """None for something that can only be read."""
    role: str
    name: str
    value: str = ""
    options: tuple[str, ...] = ()
    """What can be chosen."""
    states: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = [f"[{self.id}]"] if self.id is not None else []
        if self.role != "text":
            words.append(self.role)
        if self.name:
            words.append(json.dumps(self.name, ensure_ascii=False) if self.role != "text" else self.name)
        if self.value:
            words.append(f"= {json.dumps(self.value, ensure_ascii=False)}")
        if self.options:
            words.append(f"of {', '.join(self.options)}")
        return " ".join([*words, *(f"({state})" for state in self.states)])


class PageElementIds:
    """Short numbers for the elements of a page. An element keeps its number as long as the page is there."""

    def __init__(self) -> None:
        self._document = ""
        self._numbers: dict[str, int] = {}

    def begin(self, first_ref: str) -> None:
        """Start again at 1 if this is another page than before."""
        document = first_ref.partition("e")[0]
        if document != self._document:
            self._document = document
            self._numbers.clear()

    def number(self, ref: str) -> int:
        return self._numbers.setdefault(ref, len(self._numbers) + 1)

    def ref(self, number: int) -> str | None:
        return next((ref for ref, known in self._numbers.items() if known == number), None)


def read_snapshot(text: str, ids: PageElementIds, *, every_id: bool = False) -> list[Element]:
    """The elements of Playwright's snapshot (`mode="ai"`) that are worth a line.

    Args:
        every_id: Give each shown element its id, not only those whose role says that they can be used. Pages that
            listen to clicks on plain boxes need it.
    """
    found: list[Element] = []
    if (first := _REF.search(text)) is not None:
        ids.begin(first[1])
    lines = [line for line in map(_read_line, text.splitlines()) if line is not None]
    named = 0  # lines before this index gave their name to an element above them
    for index, line in enumerate(lines):
        if index < named:
            continue
        if line.role == "option" and found and found[-1].role == "combobox":
            found[-1] = _with_option(found[-1], line.name, is_chosen="[selected]" in line.marks)
        elif line.ref and (line.is_usable or (every_id and line.is_leaf and line.role not in _TEXT_ROLES)):
            if not line.name and not line.text and line.role not in _VALUE_ROLES:
                line, named = _named_from_below(lines, index)
            found.append(_usable(line, ids.number(line.ref)))
        elif line.role == "heading":
            found.append(Element(id=None, role=line.role, name=line.name or line.text))
        elif (line.is_leaf and (line.name or line.text)) or (line.name and line.role not in _CONTAINERS):
            found.append(Element(id=None, role="text", name=" ".join(filter(None, (line.name, line.text)))))
    return _without_echoes(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SnapshotLine:
    """A line of Playwright's snapshot."""

    indent: int
    role: str
    name: str
    marks: str
    text: str
    is_leaf: bool

    @property
    def ref(self) -> str:
        found = _REF.search(self.marks)
        return found[1] if found else ""

    @property
    def is_usable(self) -> bool:
        return self.role in USABLE_ROLES or ("[cursor=pointer]" in self.marks and self.role not in _CONTAINERS)


def _read_line(line: str) -> _SnapshotLine | None:
    quoted = re.fullmatch(r"( *- )'((?:[^']|'')*)'(:?.*)", line)  # YAML quotes what has a colon or a hash in it
    if quoted is not None:
        line = quoted[1] + quoted[2].replace("''", "'") + quoted[3]
    match = _LINE.fullmatch(line)
    if match is None or match["role"].startswith("/"):
        return None
    text = _unquote(match["text"] or "")
    return _SnapshotLine(
        indent=len(match["indent"]),
        role=match["role"],
        name=_unquote(match["name"] or ""),
        marks=match["marks"],
        text=text,
        is_leaf=not match["colon"] or bool(text),
    )


def _named_from_below(lines: Sequence[_SnapshotLine], index: int) -> tuple[_SnapshotLine, int]:
    """An element without a name has that of the first line inside it, which is then not shown again."""
    line = lines[index]
    for place, below in enumerate(lines[index + 1 :], index + 1):
        if below.indent <= line.indent or below.role in _VALUE_ROLES:
            break
        if below.name or below.text:
            return replace(line, name=below.name or below.text), place + 1
    return line, index + 1


def _usable(line: _SnapshotLine, number: int) -> Element:
    role, name, value, states = line.role, line.name, line.text, _states(line.marks)
    if role in _SILENT_ROLES:
        return Element(id=number, role="box", name=name or value, states=states)
    if value and not name and role not in _VALUE_ROLES:
        name, value = value, ""
    return Element(id=number, role=role, name=name, value=value, states=states)


def _with_option(field: Element, name: str, *, is_chosen: bool) -> Element:
    return replace(field, options=(*field.options, name), value=name if is_chosen else field.value)


def _states(marks: str) -> tuple[str, ...]:
    return tuple(state for state in _STATES if re.search(rf"\[{state}(?:=(?!false)[^\]]*)?\]", marks))


def _without_echoes(elements: Sequence[Element]) -> list[Element]:
    """Leave out a text that only repeats the name of the line before or after it."""
    names = [element.name for element in elements]
    kept: list[Element] = []
    for index, element in enumerate(elements):
        near = [*names[max(0, index - 1) : index], *names[index + 1 : index + 2]]
        if element.role == "text" and (element.name in near or not element.name):
            continue
        kept.append(element)
    return kept


def _unquote(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] == '"':
        try:
            return str(json.loads(text))
        except ValueError:
            return text[1:-1]
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The part of a page that fits into an observation."""

    lines: tuple[str, ...]
    first: int
    """Index of its first line on the page."""
    total: int

    @property
    def end(self) -> int:
        return self.first + len(self.lines)

    def __str__(self) -> str:
        above = [f"({self.first} more above: scroll up)"] if self.first else []
        below = [f"({self.total - self.end} more below: scroll down)"] if self.end < self.total else []
        return "\n".join([*above, *self.lines, *below])


def cut_window(elements: Sequence[Element], first: int, max_chars: int, max_name: int = 120) -> Window:
    """The lines from `first` on that fit into `max_chars`: at least one, which is cut if it is longer."""
    lines: list[str] = []
    used = 0
    for element in elements[first:]:
        line = str(element)
        line = line if len(line) <= max_name + 40 else f"{line[: max_name + 40]}..."
        if lines and used + len(line) + 1 > max_chars:
            break
        lines.append(line[:max_chars])
        used += len(line) + 1
    return Window(lines=tuple(lines), first=first, total=len(elements))


def start_before(elements: Sequence[Element], first: int, max_chars: int) -> int:
    """The first line of the window that ends right before line `first`."""
    start = first
    used = 0
    while start > 0 and used + len(str(elements[start - 1])) + 1 <= max_chars:
        start -= 1
        used += len(str(elements[start])) + 1
    return start if start < first else max(0, first - 1)
