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

from turnwise.envs.browser.actions import Action, ActionForm, ActionKind
from turnwise.envs.scripted import ScriptedPlayer
from turnwise.trajectory import Message

MAX_SCROLLS = 12
"""How often the expert scrolls for one element, first down and then up."""

_ELEMENT = re.compile(
    r'\[(?P<id>\d+)\](?: (?P<role>[a-z]+))?(?: (?P<name>"(?:[^"\\]|\\.)*"))?(?: = (?P<value>"(?:[^"\\]|\\.)*"))?'
    r"(?: of (?P<options>[^()]*?))?(?P<states>(?: \(\w+\))*)"
)
_FIELDS = ("textbox", "searchbox", "spinbutton")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStep:
    """One step of a plan."""

    kind: ActionKind
    roles: tuple[str, ...] = ()
    name: str = ""
    text: str = ""


def click(role: str, name: str) -> PlanStep:
    return PlanStep(kind="click", roles=(role,), name=name)


def fill(name: str, text: object) -> PlanStep:
    """Type into the field with this label."""
    return PlanStep(kind="type", roles=_FIELDS, name=name, text=str(text))


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


def plan_player(plan: Sequence[PlanStep], form: ActionForm = "text") -> ScriptedPlayer:
    """A player that carries out a plan and then says that it is done."""
    left = list(plan)
    num_scrolls = 0

    def reply(dialogue: Sequence[Message]) -> str:
        nonlocal num_scrolls
        if not left:
            return Action(kind="done").to_reply(form)
        step, observation = left[0], dialogue[-1].content
        if not step.roles:
            left.pop(0)
            return Action(kind=step.kind, text=step.text).to_reply(form)
        element = next((one for one in read_elements(observation) if _fits(one, step)), None)
        if element is not None:
            left.pop(0)
            num_scrolls = 0
            return Action(kind=step.kind, element=element.id, text=step.text).to_reply(form)
        if num_scrolls >= MAX_SCROLLS:
            return Action(kind="done").to_reply(form)  # it is not on this page; the check says what that means
        num_scrolls += 1
        return Action(kind="scroll", text="down" if "scroll down)" in observation else "up").to_reply(form)

    return reply


def _fits(element: SeenElement, step: PlanStep) -> bool:
    return element.role in step.roles and element.name == step.name and "disabled" not in element.states


def random_player(rng: random.Random, words: Sequence[str], form: ActionForm = "text") -> ScriptedPlayer:
    """A player that does something to some element of the page: the baseline of a table.

    Args:
        words: what it types and selects.
    """

    def reply(dialogue: Sequence[Message]) -> str:
        elements = [one for one in read_elements(dialogue[-1].content) if "disabled" not in one.states]
        if not elements or rng.random() < 0.1:
            other = [Action(kind="done"), Action(kind="back"), Action(kind="scroll", text="down")]
            return rng.choice(other).to_reply(form)
        return _some_action(rng.choice(elements), rng, words).to_reply(form)

    return reply


def _some_action(element: SeenElement, rng: random.Random, words: Sequence[str]) -> Action:
    word = rng.choice(list(words) or ["1"])
    if element.role in _FIELDS:
        return Action(kind="type", element=element.id, text=word)
    if element.role == "combobox":
        return Action(kind="select", element=element.id, text=rng.choice(element.options or (word,)))
    return Action(kind="click", element=element.id)
