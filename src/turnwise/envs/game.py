"""Games for several seats, in messages; one seat moves at a time.

    game = world.make_game(task, seed)
    while (seat := game.to_move) is not None:
        game.move(reply_of(seat))                # reads game.view(seat)
    rewards = [game.outcome(seat).reward for seat in range(game.num_seats)]

A game is a small state machine. Its methods are plain functions that return at once. It does not know who plays the
seats: with a scripted opponent it becomes an `Env` (`library/tic_tac_toe.py`); with several copies of a policy it
becomes self-play (`turnwise.rollout.self_play`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from turnwise.envs.base import EnvStep, Task
from turnwise.trajectory import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatOutcome:
    """How a game ended for one seat."""

    reward: float
    is_success: bool
    info: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers to log."""
    messages: Sequence[Message] = ()
    """What the seat still hears when the game is over, such as the other seat's last words."""

    def to_env_step(self, *, is_unparsable: bool) -> EnvStep:
        """The answer to the seat's last move."""
        return EnvStep(
            messages=self.messages,
            reward=self.reward,
            terminated=True,
            is_success=self.is_success,
            is_unparsable=is_unparsable,
            info=self.info,
        )


class Game(Protocol):
    """One game. A game object is used once.

    Optional attribute: `was_action` says whether the last move was a command or a call, and not words or a move of a
    game (`EnvStep.is_action`).
    """

    @property
    def num_seats(self) -> int: ...

    @property
    def to_move(self) -> int | None:
        """The number of the seat that moves next, counted from 0. None when the game is over."""
        ...

    def rules(self, seat: int) -> Sequence[Message]:
        """The messages that a seat gets before its first move, in front of the view."""
        ...

    def view(self, seat: int) -> Sequence[Message]:
        """The messages that a seat sees when it has to move: at least one."""
        ...

    def move(self, reply: Message) -> bool:
        """Make the move of the seat `to_move`. Return False if the reply could not be read as a move.

        The game decides what happens after such a reply: the same seat tries again, or the game ends.
        """
        ...

    def outcome(self, seat: int) -> SeatOutcome:
        """How the game ended for a seat. Call it when the game is over."""
        ...

    def key(self) -> str:
        """A name of the game's state. Equal keys mean equal states."""
        ...


class GameWorld(Protocol):
    """Makes games. A `World` may be a `GameWorld` too."""

    def make_game(self, task: Task, seed: int) -> Game:
        """Make a new game. All of its randomness comes from `seed`."""
        ...
