"""A chain of rooms: in each one, take the key that fits the door, then open it.

    system     Get out. Each turn say one thing: take and a colour, or open.
    user       Room 1 of 2. Keys: blue, red. The door is red.
    assistant  take red
    user       You hold the red key.                                    shaping 0.25: the right key
    assistant  open
    user       Room 2 of 2. Keys: blue, green. The door is blue.        outcome 0.25: a door
    assistant  open
    user       It is locked.
    assistant  take blue
    user       You hold the blue key.                                   shaping 0.25
    assistant  open                                                     outcome 0.25, terminated, a success

Every room is worth 1 / num_rooms, half for its key and half for its door. Each is paid once, so all rewards add up to
1. A room can only be left through its door, a key fits one door, and taking a key puts the other one back. The turn
that earned a reward gets it, so a method that learns from rewards per turn should beat one that spreads the sum over
the attempt. `pays="exit"` pays nothing on the way and 1 for the last door: one reward, as late as possible. An attempt
has two turns per room and `spare_turns` more; then it ends without success. `second_chances=false` makes the rooms
independent: a door that is tried without its key shuts for good, the policy goes on through a window, and the room's
reward is lost; a success has opened all doors. A reply with no action or with two is flagged as unparsable. One chain
in five is held out.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from turnwise.envs.base import EnvStep, Split, Task, as_action, system, user
from turnwise.envs.difficulty import Levels
from turnwise.envs.schema import check_fractions
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.splits import draw_tasks, random_for
from turnwise.errors import ConfigError
from turnwise.trajectory import Message

COLOURS = ("red", "blue", "green", "black", "white", "yellow")

_ACTION = re.compile(rf"\b(?:take (?:the )?({'|'.join(COLOURS)})|(open))\b", re.IGNORECASE)
_UNCLEAR = "Say take and a colour, or open."


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDoor:
    """The world `key_door`."""

    name: ClassVar[str] = "key_door"
    max_tokens: ClassVar[int] = 12
    difficulties: ClassVar[Levels] = (
        {"num_rooms": 1, "num_keys": 2},
        {"num_rooms": 2, "num_keys": 2},
        {"num_rooms": 3, "num_keys": 3},
        {"num_rooms": 4, "num_keys": 4},
        {"num_rooms": 6, "num_keys": 5},
        {"num_rooms": 10, "num_keys": 6},
    )

    num_rooms: int = 3
    num_keys: int = 3
    """Keys in each room."""
    spare_turns: int = 3
    pays: Literal["room", "exit"] = "room"
    """`room` pays for every key and door, `exit` only for the last door."""
    second_chances: bool = True
    """A door that was tried without its key can be tried again."""
    demonstration_skill: float = 1.0
    """How often a demonstration takes the right key instead of any key of the room."""

    def __post_init__(self) -> None:
        if self.num_rooms < 1:
            raise ConfigError(f"num_rooms={self.num_rooms}; expected at least 1")
        if not 2 <= self.num_keys <= len(COLOURS):
            raise ConfigError(f"num_keys={self.num_keys}; expected 2 to {len(COLOURS)}, one colour each")
        if self.spare_turns < 0:
            raise ConfigError(f"spare_turns={self.spare_turns}; expected 0 or more")
        if self.pays not in ("room", "exit"):
            raise ConfigError(f"pays={self.pays!r}; expected room or exit")
        if self.pays == "exit" and not self.second_chances:
            raise ConfigError("pays=exit is for doors that must be opened, with second_chances; leave one of them out")
        check_fractions(self, "demonstration_skill")

    @property
    def max_turns(self) -> int:
        return 2 * self.num_rooms + self.spare_turns

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return draw_tasks(self._draw_task, split, count, random_for(self.name, split, seed))

    def make_env(self, task: Task, seed: int) -> KeyDoorEnv:  # noqa: ARG002 - the rooms are drawn with the task
        return KeyDoorEnv(task.data["rooms"], self)

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        return play_demonstrations(self, lambda task: self._player(random_for("demo", seed, task.id)), count, seed)

    def _draw_task(self, rng: random.Random) -> Task:
        rooms: list[dict[str, Any]] = []
        for _ in range(self.num_rooms):
            keys = rng.sample(COLOURS, self.num_keys)
            rooms.append({"door": rng.choice(keys), "keys": keys})
        names = ["".join(key[:3] for key in [room["door"], *room["keys"]]) for room in rooms]
        return Task(id="rooms-" + "-".join(names), data={"rooms": rooms})

    def _player(self, rng: random.Random) -> ScriptedPlayer:
        """Take a key, then open the door. After a key that does not fit, take another one."""

        def reply(dialogue: Sequence[Message]) -> str:
            if dialogue[-1].content.startswith("You hold"):
                return "open"
            said = " ".join(message.content for message in dialogue)
            keys, door = re.findall(r"Keys: ([a-z, ]+)\. The door is (\w+)\.", said)[-1]
            is_skilled = rng.random() < self.demonstration_skill
            return f"take {door if is_skilled else rng.choice(keys.split(', '))}"

        return reply


class KeyDoorEnv:
    """One walk through the rooms."""

    def __init__(self, rooms: Sequence[Mapping[str, Any]], world: KeyDoor) -> None:
        self._rooms = rooms
        self._max_turns = world.max_turns
        self._has_second_chances = world.second_chances
        self._half_room = 0.5 / len(rooms) if world.pays == "room" else 0.0
        self._exit = 0.5 / len(rooms) if world.pays == "room" else 1.0
        self._num_missed = 0
        self._turn = 0
        self._room = 0
        self._key: str | None = None
        self._key_was_paid = False  # the state of this room

    async def start(self) -> list[Message]:
        return [system("Get out. Each turn say one thing: take and a colour, or open."), user(self._describe_room())]

    async def step(self, reply: Message) -> EnvStep:
        self._turn += 1
        actions = _ACTION.findall(reply.content)
        if len(actions) != 1:
            return self._answer(_UNCLEAR, is_unparsable=True)
        ((colour, _),) = actions
        return as_action(self._take(colour.lower()) if colour else self._open())

    async def close(self) -> None:
        pass

    def state_key(self) -> str:
        paid = "paid" if self._key_was_paid else "unpaid"
        return f"room {self._room} key {self._key} {paid} turn {self._turn}"

    def potential(self) -> float:
        """The share of the way that is done. Holding the right key counts as half a room."""
        has_key = self._room < len(self._rooms) and self._key == self._rooms[self._room]["door"]
        return (self._room + 0.5 * has_key) / len(self._rooms)

    def fork(self) -> KeyDoorEnv:
        return copy.copy(self)  # the rooms are never changed

    def _take(self, colour: str) -> EnvStep:
        room = self._rooms[self._room]
        if colour not in room["keys"]:
            return self._answer(f"There is no {colour} key.")
        self._key = colour
        pays = colour == room["door"] and not self._key_was_paid
        self._key_was_paid = self._key_was_paid or pays
        return self._answer(f"You hold the {colour} key.", shaping=self._half_room if pays else 0.0)

    def _open(self) -> EnvStep:
        if self._key == self._rooms[self._room]["door"]:
            return self._enter_next("", self._exit if self._room + 1 == len(self._rooms) else self._half_room)
        text = "It is locked." if self._key is None else f"The {self._key} key does not fit."
        if self._has_second_chances:
            return self._answer(text)
        self._num_missed += 1
        return self._enter_next(f"{text} You take the window. ", 0.0)

    def _enter_next(self, text: str, outcome: float) -> EnvStep:
        self._room, self._key, self._key_was_paid = self._room + 1, None, False
        if self._room < len(self._rooms):
            return self._answer(f"{text}{self._describe_room()}", outcome=outcome)
        is_success = not self._num_missed
        rooms = float(self._room - self._num_missed)
        return EnvStep(reward={"outcome": outcome}, terminated=True, is_success=is_success, info={"rooms": rooms})

    def _answer(self, text: str, *, outcome: float = 0.0, shaping: float = 0.0, is_unparsable: bool = False) -> EnvStep:
        is_last = self._turn >= self._max_turns
        return EnvStep(
            messages=[user(text)],
            reward={"outcome": outcome, "shaping": shaping},
            terminated=is_last,
            is_success=False if is_last else None,
            is_unparsable=is_unparsable,
            info={"rooms": self._room - self._num_missed} if is_last else {},
        )

    def _describe_room(self) -> str:
        room = self._rooms[self._room]
        number = f"Room {self._room + 1} of {len(self._rooms)}."
        return f"{number} Keys: {', '.join(room['keys'])}. The door is {room['door']}."
