"""What the adapters of text adventures share: the world, the env around a game, reading commands, the players.

A game is an object with `start`, `act`, `walkthrough` and `close`; it belongs to one attempt. Every reply is one
command. The reward of a turn is what it adds to the best share of the game's points so far, so the rewards of a won
game add up to 1. A reply that is not one short line is not passed to the game: it is flagged, and costs a turn.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from turnwise.envs.base import Env, EnvStep, Split, Task, system, user
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.splits import random_for
from turnwise.envs.sync import as_env
from turnwise.errors import ConfigError
from turnwise.runtime.suggest import did_you_mean
from turnwise.trajectory import Message

RULES = "You play a text adventure. Reply with one command, such as `look`, `go east` or `take key`, and nothing else."
LISTED = "Commands: "
_SEPARATOR = "; "
_MAX_CHARS = 100
_COMMAND = re.compile(r"[A-Za-z0-9][A-Za-z0-9 '()-]*")
_SEVERAL = re.compile(r"\bthen\b", re.IGNORECASE)
NOT_A_COMMAND = f"That is not a command. Write one line of letters and digits, at most {_MAX_CHARS} characters."


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a game shows after a command."""

    text: str
    score: float
    """The share of the game's points, 0 to 1."""
    is_over: bool
    is_won: bool
    commands: tuple[str, ...]
    """The commands that the game would take now."""
    state: str
    """All that decides what the game does next."""


class AdventureGame(Protocol):
    """One game of a library. Its methods are plain functions."""

    def start(self) -> Scene: ...

    def act(self, command: str) -> Scene: ...

    def walkthrough(self) -> Sequence[str]:
        """Commands that win the game from its start."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdventureRules:
    """What an attempt is played by."""

    rules: str
    max_turns: int
    admissible: bool
    forbidden: frozenset[str]
    """First words of commands that talk to the interpreter and not to the game."""


def read_command(text: str, rules: AdventureRules) -> str | None:
    """The command of a reply; None if it is not one, or not one for the game."""
    line = " ".join(text.split()) if text.strip() and "\n" not in text.strip() else ""
    if len(line) > _MAX_CHARS or not _COMMAND.fullmatch(line) or _SEVERAL.search(line):
        return None
    return None if re.split("[ -]", line.lower())[0] in rules.forbidden else line


class AdventureEnv:
    """One attempt at a game. Its methods are plain functions; `as_env` runs them in a thread of its own."""

    def __init__(self, open_game: Callable[[], AdventureGame], rules: AdventureRules) -> None:
        self.game: AdventureGame | None = None
        self.rules = rules
        self._open_game = open_game
        self._scene: Scene | None = None
        self.turn = 0
        self.best = 0.0

    @property
    def scene(self) -> Scene:
        assert self._scene is not None, "start comes first"
        return self._scene

    def start(self) -> list[Message]:
        self.game = self._open_game()
        self._scene = self.game.start()
        return [system(self.rules.rules), user(self._show(self.scene))]

    def step(self, reply: Message) -> EnvStep:
        assert self.game is not None, "step comes after start"
        self.turn += 1
        command = read_command(reply.content, self.rules)
        if command is not None:
            self._scene = self.game.act(command)
        scene = self.scene
        gain = max(0.0, scene.score - self.best)
        self.best += gain
        is_cut = not scene.is_over and self.turn >= self.rules.max_turns
        return EnvStep(
            messages=[user(NOT_A_COMMAND if command is None else self._show(scene))],
            reward=gain,
            terminated=scene.is_over,
            truncated=is_cut,
            is_success=scene.is_won if scene.is_over or is_cut else None,
            is_unparsable=command is None,
            is_action=command is not None,
            info={"score": self.best},
        )

    def close(self) -> None:
        game, self.game = self.game, None
        if game is not None:
            game.close()

    def state_key(self) -> str:
        """The state of the game, the best score and the turn. The way there does not matter."""
        parts = [self.scene.state, round(self.best, 9), self.turn]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]

    def move_to(self, game: AdventureGame, other: AdventureEnv) -> None:
        """Become a copy of another attempt, with a copy of its game."""
        self.game, self._scene, self.turn, self.best = game, other.scene, other.turn, other.best

    def _show(self, scene: Scene) -> str:
        if not self.rules.admissible or scene.is_over:
            return scene.text
        return f"{scene.text}\n{LISTED}{_SEPARATOR.join(scene.commands)}"


class AdventureWorld(ABC):
    """One kind of game of a library. A subclass has its options, its tasks, and opens its games."""

    name: str
    max_turns: int
    max_tokens: int

    @property
    @abstractmethod
    def rules(self) -> AdventureRules: ...

    @abstractmethod
    def tasks(self, split: Split, count: int, seed: int) -> list[Task]: ...

    @abstractmethod
    def open_game(self, task: Task, *, has_path: bool = False) -> AdventureGame:
        """The game of a task, which has not started yet.

        Args:
            has_path: `walkthrough` will be asked for; a library may need time to find it.
        """

    def make_env(self, task: Task, seed: int) -> Env:  # noqa: ARG002 - the task decides everything
        return as_env(AdventureEnv(lambda: self.open_game(task), self.rules))

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        """The ways to win that the library knows."""
        return play_demonstrations(self, self.expert, count, seed)

    def expert(self, task: Task) -> ScriptedPlayer:
        game = self.open_game(task, has_path=True)
        try:
            game.start()
            return walk(game.walkthrough())
        finally:
            game.close()

    def random_player(self, task: Task, seed: int) -> ScriptedPlayer:
        """Makes any listed command."""
        return random_command(random_for("random", seed, task.id))


def check_game(library: str, what: str, name: str, known: Collection[str]) -> None:
    """Refuse a game that the library does not have. `what` is the library's word for a game."""
    if name not in known:
        near = did_you_mean(name, known)
        raise ConfigError(f"{library} has no {what} {name!r}{near}; expected {', '.join(known)}")


def turns_of(level: int, turns: Sequence[int], max_turns: int | None) -> int:
    """The turns of an attempt: `max_turns`, or those of the level if it is None."""
    if not 0 <= level < len(turns):
        raise ConfigError(f"level={level}; expected 0 to {len(turns) - 1}")
    return turns[level] if max_turns is None else checked_turns(max_turns)


def checked_turns(max_turns: int) -> int:
    if max_turns < 1:
        raise ConfigError(f"max_turns={max_turns}; expected at least 1")
    return max_turns


def walk(commands: Sequence[str]) -> ScriptedPlayer:
    """A player that makes these commands, one after the other."""
    left = iter(commands)
    return lambda dialogue: next(left, "look")  # noqa: ARG005 - the game answers as is expected


def random_command(rng: random.Random) -> ScriptedPlayer:
    """A player that makes any of the commands that the last message lists."""

    def reply(dialogue: Sequence[Message]) -> str:
        _, found, listed = dialogue[-1].content.rpartition(LISTED)
        if not found:
            raise ConfigError("random play picks one of the listed commands; set admissible=true")
        return rng.choice(listed.split(_SEPARATOR))

    return reply
