"""Elements by name: short observations and actions for small models, which copy words more easily than they count.

link Home                           role and name; texts that can only be read are left out
textbox Quantity = 1                its value
textbox 2                           without a name, the role is the name; the second of one name has a number
combobox Stars = 1 of 1, 2, 3       its options

click Add to cart        type Quantity = 2        select Stars = 3        scroll down        back        done
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.envs.browser.expert import FIELDS, PlanStep
from turnwise.envs.browser.snapshot import Element
from turnwise.envs.screen import ScreenAction, ScreenActionKind
from turnwise.envs.scripted import ScriptedPlayer
from turnwise.trajectory import Message

NAME_RULES = "click NAME, type NAME = TEXT, select NAME = OPTION, scroll up, scroll down, back, done"
NOTE = "note: "
"""Begins what is said about an action that cannot be done."""
MAX_SCROLLS = 12

_ACTION = re.compile(r"[ \t]*(click|type|select)[ \t]+(.+?)[ \t]*", re.IGNORECASE)
_PLAIN = re.compile(r"[ \t]*(?:(scroll) (up|down)|(back|done))[ \t.!]*", re.IGNORECASE)
_LINE = re.compile(r"([a-z]+)(?: (.+))?")
_ABOVE, _BELOW = "(more above)", "(more below)"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedElement:
    """An element with the name that actions take."""

    label: str
    element: Element

    def __str__(self) -> str:
        one = self.element
        words = [self.label] if not one.name else [one.role, self.label]
        words += [f"= {one.value or '-'}"] if one.value or one.options else []
        words += [f"of {', '.join(one.options)}"] if one.options else []
        return " ".join([*words, *(f"({state})" for state in one.states)])


def named_elements(elements: Sequence[Element]) -> list[NamedElement]:
    """The elements of a page that can be used. Each has a name of its own."""
    seen: Counter[str] = Counter()
    named: list[NamedElement] = []
    for element in elements:
        if element.id is not None:
            base = " ".join((element.name or element.role).replace("=", " ").split())
            seen[base] += 1
            named.append(NamedElement(label=base if seen[base] == 1 else f"{base} {seen[base]}", element=element))
    return named


def named_observation(elements: Sequence[Element], first: int, end: int) -> str:
    """Lines `first` to `end` of what can be used on a page."""
    lines = [str(one) for one in named_elements(elements)[first:end]]
    above, below = [_ABOVE] if first else [], [_BELOW] if end < len(elements) else []
    return "\n".join([*above, *lines, *below]) or "(nothing can be used here)"


def read_named_reply(text: str, elements: Sequence[Element]) -> ScreenAction | str:
    """Read the first action of a reply. A text is what was wrong with it, in words for the policy."""
    for line in text.split("\n"):
        if plain := _PLAIN.fullmatch(line):
            kind: ScreenActionKind = "scroll" if plain[1] else "back" if plain[3].lower() == "back" else "done"
            return ScreenAction(kind=kind, text=(plain[2] or "").lower())
        if found := _ACTION.fullmatch(line):
            return _read_action(found[1].lower(), found[2], elements)
    return f"No action found. Write one of: {NAME_RULES}"


def _read_action(kind: str, rest: str, elements: Sequence[Element]) -> ScreenAction | str:
    name, text = rest, ""
    if kind != "click":
        name, _, text = (part.strip() for part in rest.partition("="))
    named = named_elements(elements)
    whole = {f"{one.element.role} {one.label}".lower(): one.element.id for one in named}
    number = {**whole, **{one.label.lower(): one.element.id for one in named}}.get(name.lower())
    if number is None:
        return f"{NOTE}there is no {name[:60]} on the page"
    return ScreenAction(
        kind="click" if kind == "click" else "type" if kind == "type" else "select", element=number, text=text
    )


def read_names(observation: str) -> list[tuple[str, str, str]]:
    """Role, name and label of each element that an observation shows."""
    found: list[tuple[str, str, str]] = []
    for line in observation.splitlines():
        bare = re.sub(r"(?: \(\w+\))+$", "", line.partition(" = ")[0])
        if match := _LINE.fullmatch(bare):
            is_nameless = match[2] is None or match[2].isdigit()
            found.append((match[1], "" if is_nameless else match[2], bare if is_nameless else match[2]))
    return found


def as_numbered(observation: str) -> str:
    """The same elements as numbered lines, for players that read numbers."""
    names = enumerate(read_names(observation), start=1)
    return "\n".join(f"[{number}] {role} {json.dumps(name)}" for number, (role, name, _) in names)


def named_plan_player(plan: Sequence[PlanStep]) -> ScriptedPlayer:
    """A player that carries out a plan by names, and then says that it is done."""
    left = list(plan)
    num_scrolls = 0

    def reply(dialogue: Sequence[Message]) -> str:
        nonlocal num_scrolls
        if not left:
            return "done"
        step, observation = left[0], dialogue[-1].content
        if not step.roles:
            left.pop(0)
            return f"{step.kind} {step.text}".strip()
        label = _label(step, observation)
        if label is not None:
            left.pop(0)
            num_scrolls = 0
            return f"{step.kind} {label}" + (f" = {step.text}" if step.kind != "click" else "")
        if num_scrolls >= MAX_SCROLLS or not (_BELOW in observation or _ABOVE in observation):
            return "done"  # it is not on this page; the check says what that means
        num_scrolls += 1
        return "scroll down" if _BELOW in observation else "scroll up"

    return reply


def _label(step: PlanStep, observation: str) -> str | None:
    names = read_names(observation)
    fitting = [label for role, _, label in names if role in step.roles and _is_called(label, step.name or role)]
    return fitting[step.place] if len(fitting) > step.place else None


def _is_called(label: str, name: str) -> bool:
    base = " ".join(name.replace("=", " ").split())
    return label == base or (label.startswith(f"{base} ") and label[len(base) + 1 :].isdigit())


def named_random_player(rng: random.Random, words: Sequence[str]) -> ScriptedPlayer:
    """A player that does something to some element of the page."""

    def reply(dialogue: Sequence[Message]) -> str:
        names = read_names(dialogue[-1].content)
        if not names or rng.random() < 0.1:
            return rng.choice(("done", "back", "scroll down"))
        role, _, label = rng.choice(names)
        kind = "type" if role in FIELDS else "select" if role == "combobox" else "click"
        return f"{kind} {label}" + ("" if kind == "click" else f" = {rng.choice(list(words) or ['1'])}")

    return reply
