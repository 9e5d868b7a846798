"""A phone with settings, contacts, messages and notes, seen as text: do what the task says, then say done.

    system     You use a phone. One action in a reply: click ID ...
    user       Turn Wi-Fi on. Send Ben the number of Ann.

               Home
               [1] button "Settings"
               [2] button "Contacts"
               [3] button "Messages"
               [4] button "Notes"
    assistant  click 1
    user       Settings
               [5] switch "Alarm" (on)
               [6] switch "Wi-Fi" (off)
               ...
    assistant  click 6                                                  outcome 0.25: one of two goals
    user       Settings ...
    assistant  press Home
    ...
    assistant  done                                                     outcome 0.5: all goals hold, no other change

The phone is a state machine in Python (`phone_device.py`): no browser, no clock, 10,000 actions a second. Screens and
actions have the form of `turnwise.envs.screen`, which browser pages have too. `actions` says how long a task is: it is
the number of actions that the scripted expert needs. What counts is the state of the phone, not what was said. Half of
the outcome (`partial_credit`) is paid for goals, each when it is reached, and taken back when it is undone; the rest is
paid for `done` when all goals hold and nothing else has changed. One task in five is held out.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from turnwise.envs.base import EnvStep, Split, Task, as_action, env_answer, system, user
from turnwise.envs.difficulty import Levels
from turnwise.envs.library.phone_device import CHOICES, PhoneData, PhoneDevice
from turnwise.envs.library.phone_goals import (
    GOAL_KINDS,
    TEXTS,
    Goal,
    GoalCheck,
    PhoneExpert,
    draw_goals,
    draw_phone,
)
from turnwise.envs.schema import check_fractions
from turnwise.envs.screen import ScreenAction, ScreenProtocol, read_screen_reply, screen_rules, screen_to_text
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.splits import draw_tasks, random_for
from turnwise.errors import ConfigError
from turnwise.trajectory import Message

_MAX_CONTACTS, _MAX_NOTES = 30, 12
_TRIES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Phone:
    """The world `phone`."""

    name: ClassVar[str] = "phone"
    difficulties: ClassVar[Levels] = tuple({"actions": count} for count in (2, 4, 6, 10, 20, 40, 80, 150))

    actions: int = 6
    """How long the tasks are: the number of actions that an expert needs, 2 to 200."""
    goals: list[str] = field(default_factory=lambda: list(GOAL_KINDS))
    """Kinds of goals to draw from."""
    spare_turns: int = 0
    """Turns beyond those of the expert; 0 stands for half as many again, at least 3."""
    partial_credit: float = 0.5
    """Share of the outcome that is paid in proportion to the goals that hold."""
    protocol: ScreenProtocol = "text"
    observation_chars: int = 2000
    """Lines beyond this are left out."""
    demonstration_skill: float = 1.0
    """How often a demonstration does the right thing instead of anything."""

    def __post_init__(self) -> None:
        if not 2 <= self.actions <= 200:
            raise ConfigError(f"actions={self.actions}; expected 2 to 200")
        unknown = [kind for kind in self.goals if kind not in GOAL_KINDS]
        if unknown or not self.goals:
            raise ConfigError(f"goals={self.goals}; expected some of {', '.join(GOAL_KINDS)}")
        if self.protocol not in ("text", "tool_call"):
            raise ConfigError(f"protocol={self.protocol!r}; expected text or tool_call")
        if self.spare_turns < 0 or self.observation_chars < 200:
            raise ConfigError(
                f"spare_turns={self.spare_turns}, observation_chars={self.observation_chars}; "
                "expected at least 0 turns and 200 characters"
            )
        check_fractions(self, "partial_credit", "demonstration_skill")

    @property
    def max_turns(self) -> int:
        return self.actions + (self.spare_turns or max(3, self.actions // 2))

    @property
    def max_tokens(self) -> int:
        return 24 if self.protocol == "text" else 64

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return draw_tasks(self._draw_task, split, count, random_for(self.name, self.actions, split, seed))

    def make_env(self, task: Task, seed: int) -> PhoneEnv:  # noqa: ARG002 - the phone is drawn with the task
        return PhoneEnv(self, task.data)

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        return play_demonstrations(self, lambda task: self.expert(task, seed), count, seed)

    def expert(self, task: Task, seed: int) -> ScriptedPlayer:
        """Plays a task in the fewest actions, with the slips that `demonstration_skill` asks for."""
        goals, rng = _read_goals(task.data), random_for("demo", seed, task.id)
        device = PhoneDevice(PhoneData(**task.data["phone"]).copy())
        expert = PhoneExpert(goals, GoalCheck(device.data.copy(), goals))

        def choose() -> ScreenAction:
            is_skilled = rng.random() < self.demonstration_skill
            return expert.next_action(device) if is_skilled else any_action(device, rng)

        return self._player(device, choose)

    def random_player(self, task: Task, seed: int) -> ScriptedPlayer:
        """Plays anything that is possible on the screen."""
        rng = random_for("random", seed, task.id)
        device = PhoneDevice(PhoneData(**task.data["phone"]).copy())
        return self._player(device, lambda: any_action(device, rng))

    def _player(self, device: PhoneDevice, choose: Any) -> ScriptedPlayer:
        def reply(dialogue: Sequence[Message]) -> str:  # noqa: ARG001 - the phone beside it shows the same
            device.elements()  # elements get their ids when they are seen
            action: ScreenAction = choose()
            device.act(action)
            return action.to_reply(self.protocol)

        return reply

    def _draw_task(self, rng: random.Random) -> Task:
        num_contacts = min(_MAX_CONTACTS, max(4, self.actions // 4))
        num_notes = min(_MAX_NOTES, max(3, self.actions // 8))
        for _ in range(_TRIES):
            data = draw_phone(rng, num_contacts, num_notes)
            goals = draw_goals(rng, data, self.actions, tuple(self.goals))
            if goals is not None:
                drawn = {"phone": data.to_json(), "goals": [goal.to_json() for goal in goals]}
                name = hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()[:12]
                return Task(id=f"phone-{self.actions}-{name}", data=drawn)
        raise ConfigError(
            f"no task of {self.actions} actions with goals={self.goals} in {_TRIES} tries; allow more kinds of goals"
        )


def _read_goals(data: Any) -> tuple[Goal, ...]:
    return tuple(Goal(**goal) for goal in data["goals"])


def any_action(device: PhoneDevice, rng: random.Random) -> ScreenAction:
    """Any action that this screen allows, each with the same chance; `done` is one of them."""
    found = [ScreenAction(kind="back"), ScreenAction(kind="press", text="Home"), ScreenAction(kind="done")]
    if device.num_rows():
        found.append(ScreenAction(kind="scroll", text=rng.choice(("up", "down"))))
    for control in device.controls():
        number = device.id_of(control.key)
        if control.role in ("button", "link", "switch"):
            found.append(ScreenAction(kind="click", element=number))
        elif control.role == "textbox":
            found.append(ScreenAction(kind="type", element=number, text=rng.choice(TEXTS)))
        elif control.role == "combobox":
            found.append(ScreenAction(kind="select", element=number, text=rng.choice(CHOICES[control.name])))
    return rng.choice(found)


class PhoneEnv:
    """One task on one phone."""

    def __init__(self, world: Phone, data: Any) -> None:
        self._world = world
        self._goals = _read_goals(data)
        before = PhoneData(**data["phone"]).copy()
        self._check = GoalCheck(before, self._goals)
        self._device = PhoneDevice(before.copy())
        self._turn = 0

    async def start(self) -> list[Message]:
        wanted = " ".join(goal.say() for goal in self._goals)
        return [
            system(f"You use a phone. {screen_rules(self._world.protocol)}"),
            user(f"{wanted}\n\n{self._screen()}"),
        ]

    async def step(self, reply: Message) -> EnvStep:
        self._turn += 1
        before = self.potential()
        action = read_screen_reply(reply, self._world.protocol)
        if isinstance(action, str):
            return self._answer(action, 0.0, is_unparsable=True)
        problem = self._device.act(action)
        if action.kind == "done":
            return as_action(self._judge(before, action.text))
        earned = self._world.partial_credit * (self.potential() - before)
        return as_action(self._answer(problem, earned, is_unparsable=False))

    async def close(self) -> None:
        pass

    def state_key(self) -> str:
        """The whole state of the phone, the ids that were given, and the number of turns played."""
        device = self._device
        state = json.dumps([device.data.to_json(), device.path, device.drafts, device.offset, repr(device.ids)])
        return f"turn {self._turn} {hashlib.sha256(state.encode()).hexdigest()[:16]}"

    def potential(self) -> float:
        """The share of goals that hold."""
        return self._check.num_held(self._device, "") / len(self._goals)

    def fork(self) -> PhoneEnv:
        other = object.__new__(PhoneEnv)
        other.__dict__.update(self.__dict__)  # forks share the goals, which never change
        other._device = self._device.copy()
        return other

    def _screen(self) -> str:
        return screen_to_text(self._device.title, self._device.elements(), self._world.observation_chars)

    def _answer(self, problem: str, outcome: float, *, is_unparsable: bool) -> EnvStep:
        is_last = self._turn >= self._world.max_turns
        text = f"{problem}\n\n{self._screen()}" if problem else self._screen()
        return env_answer(text, self._numbers(""), is_last=is_last, reward=outcome, is_unparsable=is_unparsable)

    def _judge(self, before: float, answer: str) -> EnvStep:
        is_success = self._check.is_success(self._device, answer)
        share = self._check.num_held(self._device, answer) / len(self._goals)
        part = self._world.partial_credit
        outcome = part * (share - before) + (1 - part) * is_success
        return EnvStep(reward=outcome, terminated=True, is_success=is_success, info=self._numbers(answer))

    def _numbers(self, answer: str) -> dict[str, float]:
        held = self._check.num_held(self._device, answer)
        return {"goals_share": held / len(self._goals), "actions": float(self._turn)}
