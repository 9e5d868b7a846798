"""Find the secret thing with questions that are answered yes or no.

    system     Find the thing. Ask about one word, or guess the thing. Words: alive big food hard home red sea wet
    user       It is one of: ant, bee, hat, sun. Ask.
    assistant  alive
    user       yes
    assistant  big
    user       no
    assistant  ant
    user       no, not the ant
    assistant  bee                                                      reward 1.0, terminated, a success

A reply counts if it holds exactly one word of the list or one of the things, with any words around it. A question is
answered from the table below; a wrong guess is answered with no. When the turns are used up, the game is lost. A task
is a choice of things and the secret one; one task in five is held out.
"""

from __future__ import annotations

import copy
import itertools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from turnwise.envs.base import Split, Task, system, user
from turnwise.envs.difficulty import Levels
from turnwise.envs.game import SeatOutcome
from turnwise.envs.schema import check_fractions
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.seats import SeatedEnv, scripted_env, with_script
from turnwise.envs.splits import draw_tasks, random_for
from turnwise.errors import ConfigError
from turnwise.trajectory import Message

THINGS: Mapping[str, str] = {
    "ant": "alive",
    "apple": "food red",
    "bee": "alive home",
    "book": "home",
    "box": "hard home",
    "car": "big hard",
    "cat": "alive food home",
    "crab": "alive hard red sea wet",
    "door": "big hard home",
    "fire": "red",
    "fish": "alive food sea wet",
    "hat": "home red",
    "house": "big home hard red",
    "key": "hard",
    "lake": "big wet",
    "milk": "food home wet",
    "pear": "food",
    "rain": "wet",
    "ship": "big hard sea",
    "sun": "big",
    "table": "big home",
    "tree": "alive big",
    "whale": "alive big sea wet",
    "wine": "food red wet",
}
"""The words that are true of each thing. No two things have the same words."""
WORDS = tuple(sorted({word for words in THINGS.values() for word in words.split()}))

_MAX_DRAWS = 20
_UNCLEAR = "Ask about one word, or guess one thing."


def is_true(word: str, thing: str) -> bool:
    return word in THINGS[thing].split()


@dataclass(frozen=True, slots=True, kw_only=True)
class TwentyQuestions:
    """The world `twenty_questions`."""

    name: ClassVar[str] = "twenty_questions"
    difficulties: ClassVar[Levels] = (
        {"num_things": 3, "max_turns": 3},
        {"num_things": 6, "max_turns": 5},
        {"num_things": 8, "max_turns": 5},
        {"num_things": 12, "max_turns": 6},
        {"num_things": 16, "max_turns": 6},
    )
    max_tokens: ClassVar[int] = 8
    scripted_opponents: ClassVar[tuple[str, ...]] = ("table",)
    scripted_seats: ClassVar[tuple[int, ...]] = (1,)

    opponent: str = "table"
    """Who answers: the table of words, or a model (docs/opponents.md), which may err."""
    num_things: int = 6
    """Number of things to choose from. Halving finds the right one in log2(num_things) questions and a guess."""
    max_turns: int = 6
    """Questions and guesses together. Keep it below `num_things`, or guessing one by one is enough."""
    turn_decay: float = 1.0
    """A win on turn k is worth turn_decay**(k - 1)."""
    demonstration_skill: float = 1.0
    """How often a demonstration asks the best question instead of a random one. 0 shows only the form of a reply."""

    def __post_init__(self) -> None:
        if not 2 <= self.num_things <= len(THINGS):
            raise ConfigError(f"num_things={self.num_things}; expected 2 to {len(THINGS)}")
        if self.max_turns < 1:
            raise ConfigError(f"max_turns={self.max_turns}; expected at least 1")
        check_fractions(self, "turn_decay", "demonstration_skill")

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return draw_tasks(self._draw_task, split, count, random_for(self.name, split, seed))

    def make_env(self, task: Task, seed: int) -> SeatedEnv:
        return scripted_env(self, task, seed)

    def policy_seat(self, task: Task) -> int:  # noqa: ARG002 - the policy asks
        return 0

    def make_game(self, task: Task, seed: int) -> TwentyQuestionsGame:  # noqa: ARG002 - there is no randomness
        return TwentyQuestionsGame(self, task.data["things"], task.data["secret"])

    def scripted_reply(self, opponent: str, task: Task, game: TwentyQuestionsGame, seed: int) -> str:  # noqa: ARG002
        return "yes" if is_true(game.asked or "", game.secret) else "no"

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        def player_of(task: Task) -> ScriptedPlayer:
            return self._player(task.data["things"], random_for("demo", seed, task.id))

        return play_demonstrations(with_script(self), player_of, count, seed)

    def _draw_task(self, rng: random.Random) -> Task:
        things, secret = list[str](), ""
        for _ in range(_MAX_DRAWS):  # draw again if the best questions cannot win the game; give up after a few draws
            things = sorted(rng.sample(sorted(THINGS), self.num_things))
            secret = rng.choice(things)
            if num_turns(things, secret) <= self.max_turns:
                break
        return Task(id=f"things-{secret}-of-{'-'.join(things)}", data={"things": things, "secret": secret})

    def _player(self, things: Sequence[str], rng: random.Random) -> ScriptedPlayer:
        def reply(dialogue: Sequence[Message]) -> str:
            left = things_left(things, dialogue)
            if rng.random() >= self.demonstration_skill:
                return rng.choice((*WORDS, *things))
            is_last = sum(message.role == "assistant" for message in dialogue) == self.max_turns - 1
            return left[0] if len(left) == 1 or is_last else best_question(left)

        return reply


def things_left(things: Sequence[str], dialogue: Sequence[Message]) -> list[str]:
    """The things that agree with all answers so far."""
    left = list(things)
    for asked, answer in itertools.pairwise(dialogue):
        if asked.role != "assistant":
            continue
        if asked.content in WORDS:
            left = [thing for thing in left if is_true(asked.content, thing) == (answer.content == "yes")]
        else:
            left = [thing for thing in left if thing != asked.content]
    return left


def best_question(left: Sequence[str]) -> str:
    """The word that divides the remaining things most evenly."""
    return min(WORDS, key=lambda word: abs(2 * sum(is_true(word, thing) for thing in left) - len(left)))


def num_turns(things: Sequence[str], secret: str) -> int:
    """Number of turns that the best questions need, with the guess."""
    left, turns = list(things), 1
    while len(left) > 1:
        word = best_question(left)
        left = [thing for thing in left if is_true(word, thing) == is_true(word, secret)]
        turns += 1
    return turns


class TwentyQuestionsGame:
    """One game: seat 0 asks and guesses, seat 1 answers the questions. Guesses are judged by the game itself."""

    num_seats = 2

    def __init__(self, world: TwentyQuestions, things: Sequence[str], secret: str) -> None:
        self._world = world
        self._things = tuple(things)
        self.secret = secret
        self.asked: str | None = None
        """The word that waits for an answer."""
        self._left = tuple(things)
        self._turn = 0
        self._answer = f"It is one of: {', '.join(things)}. Ask."
        self._is_found = False

    @property
    def to_move(self) -> int | None:
        if self.asked is not None:
            return 1
        return None if self._is_found or self._turn >= self._world.max_turns else 0

    def rules(self, seat: int) -> list[Message]:
        if seat == 0:
            return [
                system(f"Find the thing. Ask about one word, or guess the thing. Words: {' '.join(WORDS)}"),
            ]
        words = THINGS[self.secret]
        return [system(f"The secret thing is the {self.secret}. It is: {words}. Answer each question with yes or no.")]

    def view(self, seat: int) -> list[Message]:
        return [user(self._answer if seat == 0 else f"Is it {self.asked}?")]

    def move(self, reply: Message) -> bool:
        if self.asked is not None:
            return self._answered(reply.content)
        self._turn += 1
        said = self._read(reply.content)
        if said is None:
            self._answer = _UNCLEAR
        elif said in WORDS:
            self.asked = said
        elif said == self.secret:
            self._is_found = True
        else:
            self._left = tuple(thing for thing in self._left if thing != said)
            self._answer = f"no, not the {said}"
        return said is not None

    def outcome(self, seat: int) -> SeatOutcome:  # noqa: ARG002 - both want the thing to be found
        return SeatOutcome(
            reward=self._world.turn_decay ** (self._turn - 1) if self._is_found else 0.0,
            is_success=self._is_found,
            info={"turns": self._turn},
            messages=() if self._is_found else [user(self._answer)],
        )

    def key(self) -> str:
        """The remaining things and the number of turns played. The words of the questions do not matter."""
        return f"left {' '.join(self._left)} turn {self._turn}"

    def copy(self) -> TwentyQuestionsGame:
        return copy.copy(self)  # the copy shares nothing that can change

    def _answered(self, text: str) -> bool:
        """An answer with exactly one of yes and no counts; the other side hears that word, or that it was unclear."""
        said = {word for word in re.findall(r"[a-z]+", text.lower()) if word in ("yes", "no")}
        if len(said) == 1:
            (self._answer,) = said
            is_yes = self._answer == "yes"
            self._left = tuple(thing for thing in self._left if is_true(self.asked or "", thing) == is_yes)
        else:
            self._answer = "unclear"
        self.asked = None
        return len(said) == 1

    def _read(self, text: str) -> str | None:
        """Read the only word or thing that a reply names. None if there is no single one."""
        found = {word for word in re.findall(r"[a-z]+", text.lower()) if word in WORDS or word in self._things}
        return found.pop() if len(found) == 1 else None
