"""Scripted players that read observations as a policy does: the expert of a plan, and a random one.

A plan is a list of steps such as `click("button", "Place order")`. The expert looks for that element in the last
observation, scrolls if it is not there, and writes the action with the element's id.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.envs.screen import ScreenAction, ScreenActionKind, ScreenProtocol
from turnwise.envs.scripted import ScriptedPlayer
from turnwise.trajectory import Message

MAX_SCROLLS = 12
"""How often the expert scrolls for one element, first down and then up."""

_ELEMENT = re.compile(
    r'\[(?P<id>\d+)\](?: (?P<role>[a-z]+))?(?: (?P<name>"(?:[^"\\]|\\.)*"))?(?: = (?P<value>"(?:[^"\\]|\\.)*"))?'
    r"(?: of (?P<options>[^()]*?))?(?P<states>(?: \(\w+\))*)"
)
FIELDS = ("textbox", "searchbox", "spinbutton")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStep:
    """One step of a plan."""

    kind: ScreenActionKind
    roles: tuple[str, ...] = ()
    name: str = ""
    text: str = ""
    place: int = 0
    """Which one, from 0, if several elements have that role and name."""


def click(role: str, name: str, *, place: int = 0) -> PlanStep:
    return PlanStep(kind="click", roles=(role,), name=name, place=place)


def fill(name: str, text: object, *, place: int = 0) -> PlanStep:
    """Type into the field with this label."""
    return PlanStep(kind="type", roles=FIELDS, name=name, text=str(text), place=place)


def choose(name: str, option: str) -> PlanStep:
    return PlanStep(kind="select", roles=("combobox", "listbox"), name=name, text=option)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenElement:
    """An element that a line of an observation names."""

    id: int
    role: str
    name: str
    value: str
    options: tuple[str, ...]
    states: tuple[str, ...]


def read_elements(observation: str) -> list[SeenElement]:
    """The elements with an id in an observation."""
    found: list[SeenElement] = []
    for line in observation.splitlines():
        match = _ELEMENT.fullmatch(line.strip())
        if match is not None:
            name, value = (json.loads(match[part]) if match[part] else "" for part in ("name", "value"))
            states = tuple(re.findall(r"\((\w+)\)", match["states"]))
            options = tuple(match["options"].split(", ")) if match["options"] else ()
            role = match["role"] or "box"
            found.append(
                SeenElement(id=int(match["id"]), role=role, name=name, value=value, options=options, states=states)
            )
    return found


def plan_player(plan: Sequence[PlanStep], protocol: ScreenProtocol = "text") -> ScriptedPlayer:
    """A player that carries out a plan and then says that it is done."""
    left = list(plan)
    num_scrolls = 0

    def reply(dialogue: Sequence[Message]) -> str:
        nonlocal num_scrolls
        if not left:
            return ScreenAction(kind="done").to_reply(protocol)
        step, observation = left[0], dialogue[-1].content
        if not step.roles:
            left.pop(0)
            return ScreenAction(kind=step.kind, text=step.text).to_reply(protocol)
        fitting = [one for one in read_elements(observation) if _fits(one, step)]
        if len(fitting) > step.place:
            element = fitting[step.place]
            left.pop(0)
            num_scrolls = 0
            return ScreenAction(kind=step.kind, element=element.id, text=step.text).to_reply(protocol)
        if num_scrolls >= MAX_SCROLLS or not any(f"scroll {way})" in observation for way in ("down", "up")):
            return ScreenAction(kind="done").to_reply(
                protocol
            )  # it is not on this page; the check says what that means
        num_scrolls += 1
        return ScreenAction(kind="scroll", text="down" if "scroll down)" in observation else "up").to_reply(protocol)

    return reply


def _fits(element: SeenElement, step: PlanStep) -> bool:
    return element.role in step.roles and element.name == step.name and "disabled" not in element.states


def random_player(rng: random.Random, words: Sequence[str], protocol: ScreenProtocol = "text") -> ScriptedPlayer:
    """A player that does something to some element of the page: the baseline of a table.

    Args:
        words: what it types and selects.
    """

    def reply(dialogue: Sequence[Message]) -> str:
        elements = [one for one in read_elements(dialogue[-1].content) if "disabled" not in one.states]
        if not elements or rng.random() < 0.1:
            other = [ScreenAction(kind="done"), ScreenAction(kind="back"), ScreenAction(kind="scroll", text="down")]
            return rng.choice(other).to_reply(protocol)
        return _some_action(rng.choice(elements), rng, words).to_reply(protocol)

    return reply


def _some_action(element: SeenElement, rng: random.Random, words: Sequence[str]) -> ScreenAction:
    word = rng.choice(list(words) or ["1"])
    if element.role in FIELDS:
        return ScreenAction(kind="type", element=element.id, text=word)
    if element.role == "combobox":
        return ScreenAction(kind="select", element=element.id, text=rng.choice(element.options or (word,)))
    return ScreenAction(kind="click", element=element.id)
