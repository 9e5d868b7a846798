"""Scripted players of the world `negotiate`. Each knows its own points and what was offered, and nothing else.

A player starts with what is best for it and asks for less with every turn, down to its floor. Among the deals that are
good enough it offers the one that is nearest to the other side's last offer. It accepts an offer that is as good as
what it would ask for itself, and in its last turn anything that is not under its floor.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from turnwise.envs.library.negotiate_games import Deal, PayoffTable
from turnwise.envs.library.negotiate_text import write_offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Character:
    """How far, and how fast, a player gives way."""

    floor: float
    """The share of its best payoff that it asks for in its last turn."""
    curve: float
    """1 gives way evenly; above 1 late; below 1 early."""
    talk: tuple[str, ...]

    def aspiration(self, progress: float) -> float:
        """The share of its best payoff that it asks for; `progress` runs from 0 to 1."""
        return 1.0 - (1.0 - self.floor) * progress**self.curve


CHARACTERS: Mapping[str, Character] = {
    "fair": Character(floor=0.5, curve=1.0, talk=("Let us share.", "This is fair.", "I can move a little.")),
    "conceder": Character(floor=0.25, curve=0.5, talk=("I want a deal.", "I can give way.", "Is this better?")),
    "tough": Character(floor=0.6, curve=3.0, talk=("I need more.", "That is too little.", "I will not go lower.")),
}
RANDOM_PLAYER, MIXED = "random", "mixed"
SCRIPTED_PLAYERS = (MIXED, *CHARACTERS, RANDOM_PLAYER)
_RANDOM_TALK = ("Well.", "How about this?", "Hm.")


class Seat(Protocol):
    """What a player sees of the game."""

    @property
    def table(self) -> PayoffTable: ...

    @property
    def offers(self) -> tuple[Deal | None, Deal | None]:
        """The last offer of each seat."""
        ...

    def progress(self, seat: int) -> float:
        """0 in the seat's first turn, 1 in its last."""
        ...


def scripted_text(player: str, game: Seat, seat: int, rng: random.Random) -> str:
    """The reply of a scripted player."""
    theirs = game.offers[1 - seat]
    if player == RANDOM_PLAYER:
        if theirs is not None and rng.random() < 0.3:
            return "Accept"
        return f"{rng.choice(_RANDOM_TALK)}\n{write_offer(rng.choice(game.table.deals), game.table.issues)}"
    character = CHARACTERS[player]
    progress = game.progress(seat)
    wanted = character.aspiration(progress)
    offer = _choose(game, seat, wanted, rng)
    if theirs is not None and _is_good_enough(game.table, theirs, seat, min(wanted, game.table.share(offer, seat))):
        return "Accept"
    return f"{rng.choice(character.talk)}\n{write_offer(offer, game.table.issues)}"


def _is_good_enough(table: PayoffTable, deal: Deal, seat: int, wanted: float) -> bool:
    return table.share(deal, seat) >= wanted - 1e-9


def _choose(game: Seat, seat: int, wanted: float, rng: random.Random) -> Deal:
    """Choose a deal that is good enough and as near as possible to the other side's last offer."""
    table, theirs = game.table, game.offers[1 - seat] or {}
    good = [deal for deal in table.deals if _is_good_enough(table, deal, seat, wanted)]

    def distance(deal: Deal) -> tuple[int, float]:
        steps = sum(abs(deal[name] - option) for name, option in theirs.items())
        return steps, table.share(deal, seat)

    least = min(distance(deal) for deal in good)
    return rng.choice([deal for deal in good if distance(deal) == least])
