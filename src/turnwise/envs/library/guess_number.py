"""Find a secret number in a few guesses.

    system     Find the number. Say one number and nothing more. You have 5 tries.
    user       I am thinking of a number from 1 to 16. What is it?
    assistant  8
    user       Higher than 8.
    assistant  12
    user       Lower than 12.
    assistant  10                                                       reward 1.0, terminated, a success

A reply counts as a guess if it holds exactly one number of the range, with any words around it. Any other reply is
flagged as unparsable and uses up a try. When all tries are used up, the game is lost: terminated, reward 0.

The held-out tasks are combinations. The prompt does not show the secret, so holding out whole secrets would only teach
a policy never to guess them. A task is a secret together with one of 16 ways of asking. The test split holds out a
quarter of the secrets under each way of asking, and another quarter under the next. Every secret and every way of
asking occurs in training, but no held-out pair does. `holdout="phrasing"` instead holds out four ways of asking with
all of their secrets, so that the first message of every test task is new.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from turnwise.envs.base import EnvStep, Split, Task, system, user
from turnwise.envs.difficulty import Levels
from turnwise.envs.schema import check_fractions
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.splits import draw, random_for
from turnwise.errors import ConfigError
from turnwise.trajectory import Message

OPENINGS = (
    "I am thinking of a number from {low} to {high}.",
    "My number is from {low} to {high}.",
    "The number is between {low} and {high}.",
    "Guess a number from {low} to {high}.",
)
QUESTIONS = ("What is it?", "Your guess?", "Say your guess.", "Which one is it?")
NUM_PHRASINGS = len(OPENINGS) * len(QUESTIONS)

_HELD_OUT_EVERY = 4
_NUMBER = re.compile(r"-?[0-9]+")
_MAX_DIGITS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class GuessNumber:
    """The world `guess_number`."""

    name: ClassVar[str] = "guess_number"
    max_tokens: ClassVar[int] = 8
    difficulties: ClassVar[Levels] = (
        {"high": 4, "max_turns": 3},
        {"high": 8, "max_turns": 4},
        {"high": 16, "max_turns": 5},
        {"high": 32, "max_turns": 6},
        {"high": 100, "max_turns": 7},
    )

    low: int = 1
    high: int = 16
    max_turns: int = 5
    """Number of guesses. Halving always finds a number among at most 2**max_turns - 1 candidates."""
    turn_decay: float = 1.0
    """A win on turn k is worth turn_decay**(k - 1)."""
    holdout: Literal["combination", "phrasing"] = "combination"
    demonstration_skill: float = 1.0
    """How often a demonstration halves the range instead of guessing at random. 0 shows only the form of a reply."""

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ConfigError(f"low={self.low}, high={self.high}; expected low < high")
        if self.max_turns < 1:
            raise ConfigError(f"max_turns={self.max_turns}; expected at least 1")
        check_fractions(self, "turn_decay", "demonstration_skill")

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        pairs = [
            (secret, phrasing)
            for secret in range(self.low, self.high + 1)
            for phrasing in range(NUM_PHRASINGS)
            if self._is_held_out(secret, phrasing) == (split == "test")
        ]
        return [self._task(*pair) for pair in draw(pairs, count, random_for(self.name, split, seed))]

    def make_env(self, task: Task, seed: int) -> GuessNumberEnv:  # noqa: ARG002 - the game has no randomness of its own
        return GuessNumberEnv(self, secret=task.data["secret"], phrasing=task.data["phrasing"])

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        return play_demonstrations(self, lambda task: self._player(random_for("demo", seed, task.id)), count, seed)

    def _is_held_out(self, secret: int, phrasing: int) -> bool:
        if self.holdout == "phrasing":
            opening, question = divmod(phrasing, len(QUESTIONS))
            return opening == question  # every opening and every question occurs in training, but not this pair
        return (secret - self.low + phrasing) % _HELD_OUT_EVERY == 0

    def _task(self, secret: int, phrasing: int) -> Task:
        name = f"guess-{self.low}-{self.high}-s{secret}-p{phrasing}"
        return Task(id=name, data={"secret": secret, "phrasing": phrasing})

    def _player(self, rng: random.Random) -> ScriptedPlayer:
        """Halve what is left with probability `demonstration_skill`, else guess any number of the range."""

        def reply(dialogue: Sequence[Message]) -> str:
            low, high = self.low, self.high
            for message in dialogue:
                hint = re.fullmatch(r"(Higher|Lower) than (-?[0-9]+)\.", message.content)
                if hint:
                    low, high = (
                        (max(low, int(hint[2]) + 1), high)
                        if hint[1] == "Higher"
                        else (low, min(high, int(hint[2]) - 1))
                    )
            is_skilled = rng.random() < self.demonstration_skill
            return str((low + high) // 2 if is_skilled else rng.randint(self.low, self.high))

        return reply


class GuessNumberEnv:
    """One game."""

    def __init__(self, world: GuessNumber, *, secret: int, phrasing: int) -> None:
        self._world = world
        self._secret = secret
        self._phrasing = phrasing
        self._turn = 0
        self._low, self._high = world.low, world.high  # the range that the hints leave

    async def start(self) -> list[Message]:
        opening, question = divmod(self._phrasing, len(QUESTIONS))
        text = OPENINGS[opening].format(low=self._world.low, high=self._world.high)
        rules = f"Find the number. Say one number and nothing more. You have {self._world.max_turns} tries."
        return [system(rules), user(f"{text} {QUESTIONS[question]}")]

    async def step(self, reply: Message) -> EnvStep:
        self._turn += 1
        guess = self._read_guess(reply.content)
        if guess == self._secret:
            reward = self._world.turn_decay ** (self._turn - 1)
            return EnvStep(reward=reward, terminated=True, is_success=True, info={"guesses": self._turn})
        if guess is None:
            hint = f"Say one number from {self._world.low} to {self._world.high}."
        elif guess < self._secret:
            hint = f"Higher than {guess}."
            self._low = max(self._low, guess + 1)
        else:
            hint = f"Lower than {guess}."
            self._high = min(self._high, guess - 1)
        if self._turn >= self._world.max_turns:
            return EnvStep(terminated=True, is_success=False, is_unparsable=guess is None, info={"guesses": self._turn})
        return EnvStep(messages=[user(hint)], is_unparsable=guess is None)

    async def close(self) -> None:
        pass

    def state_key(self) -> str:
        """The range that is left, and the number of tries used. The words of the guesses do not matter."""
        return f"{self._low}..{self._high} turn {self._turn}"

    def fork(self) -> GuessNumberEnv:
        return copy.copy(self)  # only numbers and a frozen world, so the copy shares nothing that can change

    def _read_guess(self, text: str) -> int | None:
        numbers = set(_NUMBER.findall(text))
        if len(numbers) != 1:
            return None  # a list of guesses is not a guess
        (number,) = numbers
        if len(number) > _MAX_DIGITS or not self._world.low <= int(number) <= self._world.high:
            return None
        return int(number)
