"""Houses for `household`: rooms, doors, where things lie, and the chores. Drawn from a random generator, all JSON."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROOMS = ("hall", "kitchen", "bath", "attic", "cellar", "garden", "study", "garage", "porch", "pantry", "shed", "loft")
THINGS = ("cup", "book", "lamp", "key", "coat", "ball", "pan", "map", "rug", "clock", "vase", "broom")


@dataclass(frozen=True, slots=True)
class Size:
    """How big a house is, and what the policy is told."""

    rooms: int
    things: int
    chores: int
    is_open: bool
    """Every room has a door to every other one. Else the doors make a tree, and the way must be found."""
    tells_place: bool
    """A chore says where its thing lies. Else it has to be looked for, or remembered."""


LEVELS: tuple[Size, ...] = (
    Size(2, 1, 1, is_open=True, tells_place=True),
    Size(3, 2, 2, is_open=True, tells_place=True),
    Size(4, 3, 4, is_open=True, tells_place=True),
    Size(5, 4, 8, is_open=True, tells_place=True),
    Size(6, 5, 15, is_open=True, tells_place=True),
    Size(6, 5, 25, is_open=True, tells_place=True),
    Size(6, 5, 12, is_open=False, tells_place=True),
    Size(6, 5, 12, is_open=False, tells_place=False),
    Size(8, 8, 16, is_open=False, tells_place=False),
    Size(10, 10, 20, is_open=False, tells_place=False),
    Size(12, 12, 25, is_open=False, tells_place=False),
)
"""From three actions in two rooms to over 200 in a house of twelve, whose things have to be looked for."""

Doors = Mapping[str, Sequence[str]]


def draw_house(size: Size, rng: random.Random) -> dict[str, Any]:
    """A house and its chores, as JSON values."""
    rooms = list(ROOMS[: size.rooms])
    doors = _open_doors(rooms) if size.is_open else _tree_doors(rooms, rng)
    things = rng.sample(THINGS, size.things)
    places = {thing: rng.choice(rooms) for thing in things}
    now, chores = dict(places), list[list[str]]()
    for _ in range(size.chores):
        thing = rng.choice([one for one in things if not chores or one != chores[-1][0]] or things)
        room = rng.choice([one for one in rooms if one != now[thing]])
        now[thing] = room
        chores.append([thing, room])
    return {"doors": doors, "places": places, "chores": chores}


def way(doors: Doors, start: str, end: str) -> list[str]:
    """The rooms of a shortest way, without the first."""
    before: dict[str, str] = {start: start}
    waiting = deque([start])
    while waiting and end not in before:
        room = waiting.popleft()
        for door in doors[room]:
            if door not in before:
                before[door] = room
                waiting.append(door)
    found = [end]
    while before[found[-1]] != found[-1]:
        found.append(before[found[-1]])
    return found[-2::-1]


def shortest_play(house: Mapping[str, Any]) -> int:
    """Actions that somebody needs who knows where everything is."""
    doors, places = house["doors"], dict(house["places"])
    here, count = ROOMS[0], 0
    for thing, room in house["chores"]:
        count += len(way(doors, here, places[thing])) + len(way(doors, places[thing], room)) + 2
        here = places[thing] = room
    return count


def _open_doors(rooms: Sequence[str]) -> dict[str, list[str]]:
    return {room: [other for other in rooms if other != room] for room in rooms}


def _tree_doors(rooms: Sequence[str], rng: random.Random) -> dict[str, list[str]]:
    doors: dict[str, list[str]] = {room: [] for room in rooms}
    for index, room in enumerate(rooms[1:], start=1):
        other = rooms[rng.randrange(index)]
        doors[room].append(other)
        doors[other].append(room)
    return doors
