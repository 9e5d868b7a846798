"""A game of two seats as an env: the policy has one seat, and the opponent has the other.

    env = SeatedEnv(game, seat=0, opponent=ScriptedOpponent(world, "tough", ...), seed=7)

The opponent may be a script, another model, a checkpoint or an address (`turnwise.opponents`). It sees the messages of
its own seat only. What it says reaches the policy as an observation, so its tokens are never trained. An opponent that
does not answer, or not in time, fails the attempt with the party `opponent` to blame; the attempt is not scored.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar, cast, runtime_checkable

from turnwise.envs.base import EnvStep, Task, assistant
from turnwise.envs.game import Game
from turnwise.envs.splits import random_for
from turnwise.errors import AttemptFailed, ConfigError, Party
from turnwise.runtime.raised_at import describe_error
from turnwise.trajectory import Message

W = TypeVar("W")

RESULT = "result"
"""The label of a finished attempt: whether the policy's seat got more of the game's reward than the opponent's. Pools
are rated by it."""
WON_SHARES: Mapping[str, float] = {"won": 1.0, "drawn": 0.5, "lost": 0.0}
"""How much of a win a result is."""
OPPONENT_DEADLINE_S = 45.0
"""How long an opponent may take for one reply, if nobody says otherwise."""


class SeatGame(Game, Protocol):
    """A game that can be forked."""

    def copy(self) -> SeatGame:
        """An independent copy in the same state."""
        ...


class Opponent(Protocol):
    """Plays the other seat. One opponent plays many games at the same time."""

    @property
    def name(self) -> str:
        """The name that attempts record (`labels["opponent"]`)."""
        ...

    @property
    def is_scripted(self) -> bool:
        """Whether its moves follow from the game's state alone, and not from the words of the dialogue."""
        ...

    async def reply(self, game: Game, dialogue: Sequence[Message], seed: int) -> str:
        """Answer the last message of its own seat's dialogue. The same arguments give the same reply."""
        ...


@runtime_checkable
class TwoSidedWorld(Protocol):
    """A world whose tasks are games of two seats. Its option `opponent` says who has the other seat.

    Optional attributes: `scripted_seats`, the seats that its scripts know how to play; without it, both.
    `has_two_sides`, which is False where other games of the same class are two-sided, and this one is not.
    """

    scripted_opponents: ClassVar[tuple[str, ...]]
    """The scripts that come with the world, by name."""

    @property
    def opponent(self) -> str: ...

    def policy_seat(self, task: Task) -> int:
        """The seat of the policy, 0 or 1."""
        ...

    def make_game(self, task: Task, seed: int) -> SeatGame: ...

    def scripted_reply(self, opponent: str, task: Task, game: Any, seed: int) -> str:
        """What the scripted opponent says for the seat that is to move."""
        ...


def scripted_seats(world: TwoSidedWorld) -> tuple[int, ...]:
    """The seats that a world's scripts can play."""
    return tuple(getattr(world, "scripted_seats", (0, 1)))


class ScriptedOpponent:
    """An opponent whose replies come from the world's own script, for one task."""

    is_scripted = True

    def __init__(self, world: TwoSidedWorld, name: str, task: Task) -> None:
        self.name = name
        self._world = world
        self._task = task

    async def reply(self, game: Game, dialogue: Sequence[Message], seed: int) -> str:  # noqa: ARG002 - it reads the game
        return self._world.scripted_reply(self.name, self._task, game, seed)


def result_of(own: float, other: float) -> str:
    """The result for the seat with reward `own`: the larger reward wins; equal rewards are a draw."""
    if abs(own - other) < 1e-9:
        return "drawn"
    return "won" if own > other else "lost"


def unloaded_opponent(words: str, scripts: Sequence[str]) -> str:
    """Why a world by itself cannot play against a model."""
    return (
        f"opponent={words} is a model, and nobody has loaded it: train, eval, pairs and tournament do; a world by "
        f"itself has the scripts {', '.join(scripts)}"
    )


def scripted_env(world: TwoSidedWorld, task: Task, seed: int) -> SeatedEnv:
    """The env of a task against the script that the world's option `opponent` names."""
    if world.opponent not in world.scripted_opponents:
        raise ConfigError(unloaded_opponent(world.opponent, world.scripted_opponents))
    opponent = ScriptedOpponent(world, world.opponent, task)
    return SeatedEnv(world.make_game(task, seed), world.policy_seat(task), opponent, seed)


def with_script(world: W) -> W:
    """The same world against a script: its own, or its first one if its opponent is a model. For demonstrations."""
    sided = cast(TwoSidedWorld, world)
    if sided.opponent in sided.scripted_opponents:
        return world
    return dataclasses.replace(cast(Any, world), opponent=sided.scripted_opponents[0])


class SeatedEnv:
    """One game, from the view of one seat."""

    def __init__(
        self, game: SeatGame, seat: int, opponent: Opponent, seed: int, *, deadline_s: float = OPPONENT_DEADLINE_S
    ) -> None:
        self.game = game
        self._seat = seat
        self._opponent = opponent
        self._seed = seed
        self._deadline_s = deadline_s
        self._heard: list[Message] = []
        """The dialogue of the opponent's seat."""
        self._num_asked = 0
        self.waits_for: Party | None = None

    async def start(self) -> list[Message]:
        await self._let_opponent_move()
        return [*self.game.rules(self._seat), *self.game.view(self._seat)]

    async def step(self, reply: Message) -> EnvStep:
        is_read = self.game.move(reply)
        is_action = bool(getattr(self.game, "was_action", False))
        await self._let_opponent_move()
        labels = self._labels()
        if self.game.to_move is not None:
            return EnvStep(
                messages=self.game.view(self._seat), is_unparsable=not is_read, is_action=is_action, labels=labels
            )
        outcome = self.game.outcome(self._seat)
        labels[RESULT] = result_of(outcome.reward, self.game.outcome(1 - self._seat).reward)
        return EnvStep(
            messages=outcome.messages,
            reward=outcome.reward,
            terminated=True,
            is_success=outcome.is_success,
            is_unparsable=not is_read,
            is_action=is_action,
            info=outcome.info,
            labels=labels,
        )

    async def close(self) -> None:
        pass

    def state_key(self) -> str:
        if self._opponent.is_scripted:
            return self.game.key()
        said = hashlib.sha256(repr([message.content for message in self._heard]).encode()).hexdigest()[:12]
        return f"{self.game.key()} heard {said}"

    def fork(self) -> SeatedEnv:
        twin = copy.copy(self)
        twin.game, twin._heard = self.game.copy(), list(self._heard)
        return twin

    def reseed(self, seed: int) -> None:
        """Change what the opponent draws from here on; who it is stays."""
        self._seed = seed

    def _labels(self) -> dict[str, str]:
        """Who the opponent is; and what it said, if that does not follow from the game."""
        labels = {"opponent": self._opponent.name}
        if not self._opponent.is_scripted:
            said = [message.content for message in self._heard if message.role == "assistant"]
            labels["opponent_said"] = json.dumps(said)
        return labels

    async def _let_opponent_move(self) -> None:
        while self.game.to_move not in (self._seat, None):
            other = 1 - self._seat
            rules = [] if self._heard else list(self.game.rules(other))
            self._heard += [*rules, *self.game.view(other)]
            text = await self._ask()
            self._heard.append(assistant(text))
            self.game.move(self._heard[-1])

    async def _ask(self) -> str:
        name = self._opponent.name
        seed = random_for("opponent", self._seed, self._num_asked).getrandbits(31)
        self._num_asked += 1
        self.waits_for = Party.OPPONENT
        try:
            async with asyncio.timeout(self._deadline_s):
                text: object = await self._opponent.reply(self.game, tuple(self._heard), seed)
        except AttemptFailed:
            raise
        except TimeoutError as cause:
            raise AttemptFailed(Party.OPPONENT, f"{name} gave no answer within {self._deadline_s:g} s") from cause
        except Exception as cause:
            raise AttemptFailed(Party.OPPONENT, f"{name}: {describe_error(cause)}") from cause
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - an opponent of yours may err
            raise AttemptFailed(Party.OPPONENT, f"{name} answered {text!r:.80}; expected text")
        self.waits_for = None
        return text
