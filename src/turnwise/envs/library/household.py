"""A house with chores, one after the other: bring things from room to room. 3 to over 200 actions.

    system     Do the chores. Say go and a room, take and a thing, or put and a thing.
    user       Chore 1 of 2: bring the cup from the kitchen to the attic. You are in the hall: nothing. Doors: ...
    assistant  go kitchen
    user       kitchen: cup, book. Doors: hall, attic.
    assistant  take cup
    user       You have the cup.
    assistant  go attic
    user       attic: nothing. Doors: hall, kitchen.
    assistant  put cup
    user       Done. Chore 2 of 2: bring the book from the kitchen to the hall.

A chore is told once, when it begins. Each one pays 1 / num_chores when its thing lies in its room (`pays="end"`: 1 for
the last one, and nothing before). The policy carries one thing. An attempt has `patience` times the actions that
somebody needs who knows the house; then it ends without success. `level` from 0 to 10 sets the house: from 4 on an
attempt has 60 actions or more, from 6 on doors make a tree, and from 7 on a chore does not say where its thing lies.
Everything follows from the task. One house in five is held out.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from turnwise.envs.base import EnvStep, Split, Task, as_action, env_answer, system, user
from turnwise.envs.difficulty import Levels
from turnwise.envs.library.household_house import LEVELS, ROOMS, THINGS, Size, draw_house, shortest_play, way
from turnwise.envs.schema import check_fractions
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.splits import content_id, draw_tasks, random_for
from turnwise.errors import ConfigError
from turnwise.trajectory import Message

_ACTION = re.compile(
    rf"\b(go) (?:to )?(?:the )?({'|'.join(ROOMS)})\b|\b(take|put) (?:the )?({'|'.join(THINGS)})\b", re.IGNORECASE
)
_UNCLEAR = "Say go and a room, take and a thing, or put and a thing."
_CHORE = re.compile(r"bring the (\w+)(?: from the (\w+))? to the (\w+)\.")
_ROOM = re.compile(r"(?:^|in the )(\w+): ([\w, ]+)\. Doors: ([\w, ]+)\.")
_DEMO_SLACK = 8
"""A script that looks for things needs more actions than somebody who knows the house."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Household:
    """The world `household`."""

    name: ClassVar[str] = "household"
    max_tokens: ClassVar[int] = 12
    difficulties: ClassVar[Levels] = tuple({"level": level} for level in range(len(LEVELS)))

    level: int = 3
    """Size of the house and of the chores, 0 to 10."""
    rooms: int = 0
    """Rooms, 2 to 12; 0: as the level says."""
    chores: int = 0
    """Chores; 0: as the level says."""
    patience: float = 1.5
    """Actions of an attempt, as a multiple of those that the shortest play needs."""
    pays: Literal["chore", "end"] = "chore"
    """`chore` pays for every chore, `end` for the last one only."""
    demonstration_skill: float = 1.0
    """How often a demonstration does the right thing instead of going through any door."""

    def __post_init__(self) -> None:
        if not 0 <= self.level < len(LEVELS):
            raise ConfigError(f"level={self.level}; expected 0 to {len(LEVELS) - 1}")
        if self.rooms and not 2 <= self.rooms <= len(ROOMS):
            raise ConfigError(f"rooms={self.rooms}; expected 2 to {len(ROOMS)}, or 0 for the level's own number")
        if self.chores < 0:
            raise ConfigError(f"chores={self.chores}; expected 1 or more, or 0 for the level's own number")
        if self.patience < 1:
            raise ConfigError(f"patience={self.patience}; expected at least 1: nobody is faster than the shortest play")
        check_fractions(self, "demonstration_skill")

    @property
    def size(self) -> Size:
        size = LEVELS[self.level]
        return replace(size, rooms=self.rooms or size.rooms, chores=self.chores or size.chores)

    @property
    def max_turns(self) -> int:
        """Enough for any house of this size: the way through a tree may touch every room."""
        longest = 4 if self.size.is_open else 2 * self.size.rooms
        return round(self.patience * longest * self.size.chores)

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return draw_tasks(self._draw_task, split, count, random_for(self.name, split, seed))

    def make_env(self, task: Task, seed: int) -> HouseholdEnv:  # noqa: ARG002 - the house is drawn with the task
        return HouseholdEnv(task.data, self)

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        return play_demonstrations(self, lambda task: self._player(random_for("demo", seed, task.id)), count, seed)

    def summary(self, dialogue: Sequence[Message], max_tokens: int) -> str:
        """What a script writes when its memory is full: the chore, what it carries, and where things lie."""
        seen = SeenHouse(dialogue)
        thing, source, target = seen.chore
        text = f"{thing}{f' from {source}' if source else ''} to {target}. {'Have it.' if seen.carried else ''}".strip()
        known = [f"{one} {place}" for one, place in seen.places.items() if place and one != thing]
        words = max(0, max_tokens // 3 - len(text.split()))
        return f"{text} {', '.join(known[: words // 2])}".strip()

    def _draw_task(self, rng: random.Random) -> Task:
        house = draw_house(self.size, rng)
        return Task(id=f"house-{self.level}-{content_id(house)}", data=house)

    def _player(self, rng: random.Random) -> ScriptedPlayer:
        """Do the chore that is due; look for what was not seen yet."""

        def reply(dialogue: Sequence[Message]) -> str:
            seen = SeenHouse(dialogue)
            if rng.random() >= self.demonstration_skill:
                return f"go {rng.choice(seen.doors[seen.here])}"
            return seen.next_action()

        return reply


class SeenHouse:
    """What a dialogue says about a house, for a script."""

    def __init__(self, dialogue: Sequence[Message]) -> None:
        self.chore: tuple[str, str, str] = ("", "", "")
        self.here = ""
        self.carried = ""
        self.doors: dict[str, list[str]] = {}
        self.places: dict[str, str] = {}
        action = ""
        for message in dialogue:
            if message.role == "assistant":
                action = message.content
            elif message.role == "user":
                self._read(message.content, action)

    def next_action(self) -> str:
        thing, source, target = self.chore
        if self.carried:
            return f"put {self.carried}" if self.here == target else self._towards(target)
        place = self.places.get(thing) or source
        if place == self.here:
            return f"take {thing}"
        return self._towards(place) if place else self._explore()

    def _read(self, text: str, action: str) -> None:
        for match in _ROOM.finditer(text):
            name, things, doors = (str(part) for part in match.groups())
            self.here, self.doors[name] = name, doors.split(", ")
            lying = list[str]() if things == "nothing" else things.split(", ")
            self.places = {one: room for one, room in self.places.items() if room != name}
            self.places |= dict.fromkeys(lying, name)
        if text.startswith("You have"):
            self.carried = action.rpartition(" ")[2]
            self.places.pop(self.carried, None)
        if text.startswith(("Done.", "You put")):
            self.places[self.carried], self.carried = self.here, ""
        if found := _CHORE.findall(text):
            self.chore = found[-1]

    def _towards(self, room: str) -> str:
        known = dict(self.doors)
        for doors in list(known.values()):
            for door in doors:
                known.setdefault(door, [])
        return f"go {way(known, self.here, room)[0]}" if room in known else self._explore()

    def _explore(self) -> str:
        """Go to the nearest room that was not entered yet."""
        unseen = {door for doors in self.doors.values() for door in doors if door not in self.doors}
        known = {**self.doors, **{door: [] for door in unseen}}
        return f"go {min((way(known, self.here, door) for door in sorted(unseen)), key=len)[0]}"


class HouseholdEnv:
    """One attempt at the chores of a house."""

    def __init__(self, house: Mapping[str, Any], world: Household) -> None:
        self._doors: Mapping[str, Sequence[str]] = house["doors"]
        self._chores: Sequence[Sequence[str]] = house["chores"]
        self._places: dict[str, str] = dict(house["places"])
        self._tells_place = world.size.tells_place
        self._pays_chores = world.pays == "chore"
        slack = 0 if self._tells_place else _DEMO_SLACK * len(self._doors)
        self._max_turns = min(world.max_turns, round(world.patience * shortest_play(house)) + slack)
        self._here = ROOMS[0]
        self._carried = ""
        self._chore = 0
        self._turn = 0
        self._num_refused = 0

    async def start(self) -> list[Message]:
        intro = system("Do the chores. Say go and a room, take and a thing, or put and a thing.")
        return [intro, user(f"{self._tell_chore()} You are in the {self._look()}")]

    async def step(self, reply: Message) -> EnvStep:
        self._turn += 1
        actions = _ACTION.findall(reply.content)
        if len(actions) != 1:
            return self._answer(_UNCLEAR, is_unparsable=True)
        go, room, hand, thing = (word.lower() for word in actions[0])
        if go:
            return as_action(self._go(room))
        return as_action(self._take(thing) if hand == "take" else self._put(thing))

    async def close(self) -> None:
        pass

    def state_key(self) -> str:
        lying = " ".join(f"{thing}:{room}" for thing, room in sorted(self._places.items()))
        return f"chore {self._chore} in {self._here} with {self._carried or 'nothing'} {lying} turn {self._turn}"

    def potential(self) -> float:
        """The share of the chores that are done; carrying the right thing counts as half a chore."""
        is_due = self._chore < len(self._chores) and self._carried == self._chores[self._chore][0]
        return (self._chore + 0.5 * is_due) / len(self._chores)

    def fork(self) -> HouseholdEnv:
        twin = copy.copy(self)
        twin._places = dict(self._places)
        return twin

    def _go(self, room: str) -> EnvStep:
        if room not in self._doors[self._here]:
            return self._refuse(f"There is no door to the {room}.")
        self._here = room
        return self._answer(self._look())

    def _take(self, thing: str) -> EnvStep:
        if self._carried:
            return self._refuse(f"You carry the {self._carried}.")
        if self._places.get(thing) != self._here:
            return self._refuse(f"There is no {thing} here.")
        self._carried, self._places[thing] = thing, ""
        return self._answer(f"You have the {thing}.")

    def _put(self, thing: str) -> EnvStep:
        if self._carried != thing:
            return self._refuse(f"You do not carry the {thing}.")
        self._places[thing], self._carried = self._here, ""
        if [thing, self._here] != list(self._chores[self._chore]):
            return self._answer(f"You put the {thing} down.")
        self._chore += 1
        is_last = self._chore == len(self._chores)
        paid = 1.0 / len(self._chores) if self._pays_chores else float(is_last)
        if is_last:
            return EnvStep(reward=paid, terminated=True, is_success=True, info=self._info())
        return self._answer(f"Done. {self._tell_chore()}", outcome=paid)

    def _refuse(self, text: str) -> EnvStep:
        self._num_refused += 1
        return self._answer(text)

    def _answer(self, text: str, *, outcome: float = 0.0, is_unparsable: bool = False) -> EnvStep:
        is_last = self._turn >= self._max_turns
        return env_answer(text, self._info(), is_last=is_last, reward=outcome, is_unparsable=is_unparsable)

    def _info(self) -> dict[str, float]:
        return {"chores": float(self._chore), "refused": float(self._num_refused)}

    def _tell_chore(self) -> str:
        thing, room = self._chores[self._chore]
        place = f" from the {self._places[thing]}" if self._tells_place else ""
        return f"Chore {self._chore + 1} of {len(self._chores)}: bring the {thing}{place} to the {room}."

    def _look(self) -> str:
        lying = [thing for thing, room in self._places.items() if room == self._here]
        return f"{self._here}: {', '.join(lying) or 'nothing'}. Doors: {', '.join(self._doors[self._here])}."
