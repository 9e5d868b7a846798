"""Games for several seats, in messages; one seat moves at a time.

    game = world.make_game(task, seed)
    while (seat := game.to_move) is not None:
        game.move(reply_of(seat))                # reads game.view(seat)
    rewards = [game.outcome(seat).reward for seat in range(game.num_seats)]

A game is a small state machine: its methods are plain, answer at once and wait for nobody. Who plays the seats is not
its business: a scripted opponent makes it an `Env` (`library/tic_tac_toe.py`), several copies of a policy make it
self-play (`turnwise.rollout.self_play`).
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

    def to_env_step(self, *, is_unparsable: bool) -> EnvStep:
        """The answer to the seat's last move."""
        return EnvStep(
            reward=self.reward,
            terminated=True,
            is_success=self.is_success,
            is_unparsable=is_unparsable,
            info=self.info,
        )


class Game(Protocol):
    """One game; used once."""

    @property
    def num_seats(self) -> int: ...

    @property
    def to_move(self) -> int | None:
        """The seat whose move it is, from 0; None when the game is over."""
        ...

    def rules(self, seat: int) -> Sequence[Message]:
        """What a seat is told before its first move, ahead of the view."""
        ...

    def view(self, seat: int) -> Sequence[Message]:
        """What a seat sees when its move comes: at least one message."""
        ...

    def move(self, reply: Message) -> bool:
        """The move of the seat whose turn it is; False when the reply could not be read as one.

        A reply that is no move is the game's to deal with: the same seat again, or the end.
        """
        ...

    def outcome(self, seat: int) -> SeatOutcome:
        """Of a game that is over."""
        ...

    def key(self) -> str:
        """Names the state of the game; equal keys, equal states."""
        ...


class GameWorld(Protocol):
    """Where games come from; a `World` may be one too."""

    def make_game(self, task: Task, seed: int) -> Game:
        """A fresh game; `seed` drives all of its randomness."""
        ...
