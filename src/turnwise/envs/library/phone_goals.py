"""Goals on a phone: what they say, what they change, how an expert reaches them, and tasks of a wanted length.

A task is a phone and a list of goals that do not touch the same things, so their order does not matter. Its length is
the number of actions that the expert needs, `done` included; goals are drawn until it is the wanted one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from turnwise.envs.library.phone_device import CHOICES, SWITCHES, PhoneData, PhoneDevice
from turnwise.envs.screen import ScreenAction

# fmt: off
PEOPLE = (
    "Ann", "Ben", "Cora", "Dan", "Eva", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kim", "Leo", "Mia", "Noah", "Olga",
    "Paul", "Quinn", "Rosa", "Sam", "Tara", "Uma", "Vera", "Will", "Xenia", "Yara", "Zoe", "Adam", "Bella", "Carl",
    "Dora", "Emil", "Fay", "Greta", "Hans", "Ida", "Jon", "Kay", "Lena", "Max", "Nora",
)
TITLES = (
    "Shopping", "Travel", "Ideas", "Recipe", "Books", "Films", "Party", "Garden", "Work", "Gifts", "Songs", "Plans",
    "Health", "Bills", "Car", "House",
)
# fmt: on
TEXTS = (
    "see you at six",
    "thank you",
    "call me later",
    "on my way",
    "happy birthday",
    "the train is late",
    "bread and milk",
    "two tickets",
    "meet at the door",
    "all good here",
    "bring the blue book",
    "dinner is ready",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One thing to get done. `kind` says what the others mean; JSON holds it as a dict."""

    kind: str
    name: str = ""
    """The switch, the contact, the note or the app."""
    text: str = ""
    """What it becomes, or what is sent."""
    source: str = ""
    """The contact or note whose number or text has to be found out."""

    def to_json(self) -> dict[str, str]:
        return {"kind": self.kind, "name": self.name, "text": self.text, "source": self.source}

    @property
    def touches(self) -> frozenset[str]:
        """What no other goal of the task may touch."""
        own = {
            "switch": ("setting:",),
            "choose": ("setting:",),
            "number": ("contact:",),
            "add_contact": ("contact:",),
            "remove_contact": ("contact:", "thread:"),
            "write_note": ("note:",),
            "edit_note": ("note:",),
            "remove_note": ("note:",),
            "open": ("end:",),
            "ask": ("contact:",),
        }.get(self.kind, ("thread:",))
        sources = {"tell_number": ("contact:",), "tell_note": ("note:",)}.get(self.kind, ())
        return frozenset([f"{prefix}{self.name}" for prefix in own] + [f"{prefix}{self.source}" for prefix in sources])

    def say(self) -> str:
        """The goal in words."""
        match self.kind:
            case "switch":
                return f"Turn {self.name} {self.text}."
            case "choose":
                return f"Set {self.name} to {self.text}."
            case "number":
                return f"Change the number of {self.name} to {self.text}."
            case "add_contact":
                return f"Add the contact {self.name} with the number {self.text}."
            case "remove_contact":
                return f"Delete the contact {self.name}."
            case "send":
                return f'Send {self.name} "{self.text}".'
            case "tell_number":
                return f"Send {self.name} the number of {self.source}."
            case "tell_note":
                return f"Send {self.name} the text of the note {self.source}."
            case "write_note":
                return f'Add the note {self.name} that says "{self.text}".'
            case "edit_note":
                return f'Change the note {self.name} to "{self.text}".'
            case "remove_note":
                return f"Delete the note {self.name}."
            case "open":
                return f"Open {self.name}."
            case _:
                return f"What is the number of {self.name}? Say it with done."

    def found_text(self, data: PhoneData) -> str:
        """What is sent or answered; found on the phone if the goal does not say it."""
        if self.kind == "tell_note":
            return data.notes.get(self.source, "")
        if self.kind in ("tell_number", "ask"):
            return data.contacts.get(self.source or self.name, "")
        return self.text

    def apply(self, data: PhoneData) -> None:
        """Change the data as the goal asks."""
        match self.kind:
            case "switch":
                data.switches[self.name] = self.text == "on"
            case "choose":
                data.choices[self.name] = self.text
            case "number" | "add_contact":
                data.contacts[self.name] = self.text
            case "remove_contact":
                del data.contacts[self.name]
                data.threads.pop(self.name, None)
            case "send" | "tell_number" | "tell_note":
                data.threads.setdefault(self.name, []).append(f"You: {self.found_text(data)}")
            case "write_note" | "edit_note":
                data.notes[self.name] = self.text
            case "remove_note":
                del data.notes[self.name]
            case _:
                pass


class GoalCheck:
    """Says which goals of a task hold, and whether nothing else has changed."""

    def __init__(self, before: PhoneData, goals: tuple[Goal, ...]) -> None:
        self._goals = goals
        self._before = before
        self._wanted = before.copy()
        for goal in goals:
            goal.apply(self._wanted)

    def holds(self, goal: Goal, device: PhoneDevice, answer: str) -> bool:
        """Whether a goal is reached. `answer` is what `done` said."""
        data, wanted = device.data, self._wanted
        match goal.kind:
            case "switch":
                return data.switches[goal.name] == wanted.switches[goal.name]
            case "choose":
                return data.choices[goal.name] == wanted.choices[goal.name]
            case "number" | "add_contact" | "remove_contact":
                return data.contacts.get(goal.name) == wanted.contacts.get(goal.name)
            case "write_note" | "edit_note" | "remove_note":
                return data.notes.get(goal.name) == wanted.notes.get(goal.name)
            case "open":
                return device.path == (goal.name.lower(),)
            case "ask":
                return answer == goal.found_text(self._before)
            case _:
                return data.threads.get(goal.name, []) == wanted.threads.get(goal.name, [])

    def num_held(self, device: PhoneDevice, answer: str) -> int:
        return sum(self.holds(goal, device, answer) for goal in self._goals)

    def is_success(self, device: PhoneDevice, answer: str) -> bool:
        """All goals hold, and everything else is as it was."""
        return device.data == self._wanted and self.num_held(device, answer) == len(self._goals)


class PhoneExpert:
    """Reaches goals one after the other in the fewest actions. It looks at the phone before every action."""

    def __init__(self, goals: tuple[Goal, ...], check: GoalCheck) -> None:
        self._goals = goals
        self._check = check
        self._known: dict[Goal, str] = {}
        """What was read on the phone for a goal."""

    def next_action(self, device: PhoneDevice) -> ScreenAction:
        """The next action, from whatever state the phone is in; `done` if nothing is left to do."""
        for goal in self._goals:
            if goal.kind == "ask":
                continue
            if not self._check.holds(goal, device, ""):
                return self._towards(goal, device)
        for goal in self._goals:
            if goal.kind == "ask":
                seen = self._look_up(goal, f"contact:{goal.name}", device)
                return seen if isinstance(seen, ScreenAction) else ScreenAction(kind="done", text=seen)
        return ScreenAction(kind="done")

    def _towards(self, goal: Goal, device: PhoneDevice) -> ScreenAction:
        name = goal.name
        match goal.kind:
            case "open":
                return _reach(device, (name.lower(),)) or ScreenAction(kind="wait")
            case "switch":
                return _use(device, ("settings",), "click", f"switch:{name}")
            case "choose":
                return _use(device, ("settings",), "select", f"choice:{name}", goal.text)
            case "number":
                return _use(device, ("contacts", f"contact:{name}"), "type", f"number:{name}", goal.text)
            case "remove_contact":
                return _use(device, ("contacts", f"contact:{name}"), "click", f"delete_contact:{name}")
            case "edit_note":
                return _use(device, ("notes", f"note:{name}"), "type", f"text:{name}", goal.text)
            case "remove_note":
                return _use(device, ("notes", f"note:{name}"), "click", f"delete_note:{name}")
            case "add_contact":
                return _fill(device, ("contacts", "new_contact"), {"Name": name, "Number": goal.text})
            case "write_note":
                return _fill(device, ("notes", "new_note"), {"Title": name, "Text": goal.text})
            case _:
                return self._send(goal, device)

    def _send(self, goal: Goal, device: PhoneDevice) -> ScreenAction:
        text: ScreenAction | str = goal.text
        if goal.source:
            prefix = "note" if goal.kind == "tell_note" else "contact"
            text = self._look_up(goal, f"{prefix}:{goal.source}", device)
            if isinstance(text, ScreenAction):
                return text
        place = ("messages", f"thread:{goal.name}")
        box = f"message:{goal.name}"
        if device.path == place and device.drafts.get(box) == text:
            return _use(device, place, "click", f"send:{goal.name}")
        return _use(device, place, "type", box, text)

    def _look_up(self, goal: Goal, where: str, device: PhoneDevice) -> ScreenAction | str:
        """Return what was read for a goal, or the action that leads to where it stands."""
        if goal not in self._known:
            place = ("notes" if where.startswith("note:") else "contacts", where)
            action = _reach(device, place)
            if action is not None:
                return action
            self._known[goal] = goal.found_text(device.data)
        return self._known[goal]


def _use(device: PhoneDevice, place: tuple[str, ...], kind: Any, key: str, text: str = "") -> ScreenAction:
    """Go to a screen, scroll until a control is visible, and use it."""
    action = _reach(device, place)
    if action is not None:
        return action
    number = device.id_of(key)
    return ScreenAction(kind=kind, element=number, text=text) if number is not None else _scroll(device, key)


def _reach(device: PhoneDevice, place: tuple[str, ...]) -> ScreenAction | None:
    """The next action on the way to a screen; None when it is there."""
    path = device.path
    if path == place:
        return None
    common = next(n for n in range(len(path), -1, -1) if path[:n] == place[:n])
    if common < len(path):
        return ScreenAction(kind="back") if common else ScreenAction(kind="press", text="Home")
    key = place[common] if common else f"app:{place[0]}"
    number = device.id_of(key)
    return ScreenAction(kind="click", element=number) if number is not None else _scroll(device, key)


def _scroll(device: PhoneDevice, key: str) -> ScreenAction:
    """Scroll towards a row that is not on the screen."""
    look = device.copy()
    look.offset = 0
    rows = [control.key for control in look.controls()]
    is_above = device.offset > 0 and key in rows
    return ScreenAction(kind="scroll", text="up" if is_above else "down")


def _fill(device: PhoneDevice, place: tuple[str, ...], values: Mapping[str, str]) -> ScreenAction:
    kind = place[-1]
    for box, value in values.items():
        if device.path != place or device.drafts.get(f"{kind}:{box}") != value:
            return _use(device, place, "type", f"{kind}:{box}", value)
    return _use(device, place, "click", f"save:{kind}")


def draw_phone(rng: random.Random, num_contacts: int, num_notes: int) -> PhoneData:
    """Draw the phone of one task. Settings stand where they always stand; contacts and notes are others every time."""
    people = rng.sample(PEOPLE, num_contacts)
    return PhoneData(
        switches={name: rng.random() < 0.5 for name in SWITCHES},
        choices={name: rng.choice(options) for name, options in CHOICES.items()},
        contacts={name: _draw_number(rng) for name in people},
        threads={name: [f"{name}: {rng.choice(TEXTS)}"] for name in people if rng.random() < 0.5},
        notes={title: rng.choice(TEXTS) for title in rng.sample(TITLES, num_notes)},
    )


def _draw_number(rng: random.Random) -> str:
    return str(rng.randrange(1000, 10_000))


def draw_goals(rng: random.Random, data: PhoneData, length: int, kinds: tuple[str, ...]) -> tuple[Goal, ...] | None:
    """Draw goals that take the expert exactly `length` actions. None if this did not work out."""
    device, used = PhoneDevice(data.copy()), 1
    goals, touched = list[Goal](), set[str]()
    for _ in range(40 + 4 * length):
        if used == length:
            return tuple(goals)
        goal = _DRAWERS[rng.choice(kinds)](rng, data)
        if goal is None or goal.touches & touched:
            continue
        after = device.copy()
        cost = sum(1 for _ in expert_actions(after, (goal,))) - 1
        is_end = goal.kind in ("ask", "open")  # where the phone is at the end decides, so nothing may follow
        if not 0 < cost <= length - used or (is_end and cost != length - used):
            continue
        device, used = after, used + cost
        goals.append(goal)
        touched |= goal.touches
    return None


def expert_actions(device: PhoneDevice, goals: tuple[Goal, ...]) -> Iterator[ScreenAction]:
    """What the expert does, up to `done`. The device changes with it."""
    expert = PhoneExpert(goals, GoalCheck(device.data.copy(), goals))
    while True:
        action = expert.next_action(device)
        problem = device.act(action)
        assert not problem, f"{action} on {device.path}: {problem}"
        yield action
        if action.kind == "done":
            return


def _other_text(rng: random.Random, old: str) -> str:
    return rng.choice([text for text in TEXTS if text != old])


def _draw_switch(rng: random.Random, data: PhoneData) -> Goal:
    name = rng.choice(list(data.switches))
    return Goal(kind="switch", name=name, text="off" if data.switches[name] else "on")


def _draw_choose(rng: random.Random, data: PhoneData) -> Goal:
    name = rng.choice(list(data.choices))
    return Goal(kind="choose", name=name, text=rng.choice([o for o in CHOICES[name] if o != data.choices[name]]))


def _draw_number_goal(rng: random.Random, data: PhoneData) -> Goal:
    name = rng.choice(list(data.contacts))
    return Goal(kind="number", name=name, text=_draw_number(rng))


def _draw_add_contact(rng: random.Random, data: PhoneData) -> Goal | None:
    free = [name for name in PEOPLE if name not in data.contacts]
    return Goal(kind="add_contact", name=rng.choice(free), text=_draw_number(rng)) if free else None


def _draw_send(rng: random.Random, data: PhoneData) -> Goal:
    return Goal(kind="send", name=rng.choice(list(data.contacts)), text=rng.choice(TEXTS))


def _draw_tell_number(rng: random.Random, data: PhoneData) -> Goal:
    name, source = rng.sample(list(data.contacts), 2)
    return Goal(kind="tell_number", name=name, source=source)


def _draw_tell_note(rng: random.Random, data: PhoneData) -> Goal | None:
    return Goal(kind="tell_note", name=rng.choice(list(data.contacts)), source=rng.choice(list(data.notes)))


def _draw_write_note(rng: random.Random, data: PhoneData) -> Goal | None:
    free = [title for title in TITLES if title not in data.notes]
    return Goal(kind="write_note", name=rng.choice(free), text=rng.choice(TEXTS)) if free else None


def _draw_edit_note(rng: random.Random, data: PhoneData) -> Goal:
    title = rng.choice(list(data.notes))
    return Goal(kind="edit_note", name=title, text=_other_text(rng, data.notes[title]))


_DRAWERS: Mapping[str, Callable[[random.Random, PhoneData], Goal | None]] = {
    "switch": _draw_switch,
    "choose": _draw_choose,
    "number": _draw_number_goal,
    "add_contact": _draw_add_contact,
    "remove_contact": lambda rng, data: Goal(kind="remove_contact", name=rng.choice(list(data.contacts))),
    "send": _draw_send,
    "tell_number": _draw_tell_number,
    "tell_note": _draw_tell_note,
    "write_note": _draw_write_note,
    "edit_note": _draw_edit_note,
    "remove_note": lambda rng, data: Goal(kind="remove_note", name=rng.choice(list(data.notes))),
    "open": lambda rng, data: Goal(kind="open", name=rng.choice(("Settings", "Contacts", "Messages", "Notes"))),  # noqa: ARG005
    "ask": lambda rng, data: Goal(kind="ask", name=rng.choice(list(data.contacts))),
}
GOAL_KINDS = tuple(_DRAWERS)
