"""Sell things, one after the other, to a buyer whose mood decides what they will pay.

    system     Sell each thing. Say one price from 1 to 9.
    user       The hat is worth 3.
    assistant  5
    user       I am glad. I take it. The key is worth 4.                the buyer is glad: pays up to twice the worth
    assistant  8
    user       I am glad. I take it. The box is worth 2.
    assistant  6
    user       I am glad. No deal. The book is worth 4.
    assistant  8                                                        payoff (5 + 8 + 8) / 26 = 0.81, terminated

The mood, glad or sad, is drawn with the env's seed. The buyer tells it with the answer to the first price, and the
policy cannot change it. A glad buyer pays up to twice the worth, a sad one up to one less than the worth, so the mood
changes the payoff more than any price does. The only reward comes at the end: what was earned, divided by what a glad
buyer would have paid for everything. `is_success` means 75 % of what could be earned once the mood was known; for a
buyer who is trained, that the seller got less than that. A reply without exactly one price from 1 to 9 sells nothing
and is flagged as unparsable. One list of things in five is held out. The env can be forked at any turn.

With `mood_from="price"` the mood is a hash of the seed and the first price. So attempts that share a seed but ask for
different first prices meet different moods: the luck then varies inside a group.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from turnwise.envs.base import Split, Task, system, user
from turnwise.envs.difficulty import Levels
from turnwise.envs.game import SeatOutcome
from turnwise.envs.schema import check_fractions
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.seats import SeatedEnv, scripted_env, with_script
from turnwise.envs.splits import draw_tasks, random_for
from turnwise.errors import ConfigError
from turnwise.trajectory import Message

Mood = Literal["glad", "sad"]

GOODS = ("hat", "key", "box", "book", "door", "apple")
WORTHS = (2, 3, 4)
SUCCESS_SHARE = 0.75

_PRICE = re.compile(r"[0-9]+")


def highest_price(worth: int, mood: Mood) -> int:
    """The most that the buyer pays."""
    return 2 * worth if mood == "glad" else worth - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bargain:
    """The world `bargain`."""

    name: ClassVar[str] = "bargain"
    difficulties: ClassVar[Levels] = tuple({"num_goods": count} for count in range(2, 7))
    max_tokens: ClassVar[int] = 4
    scripted_opponents: ClassVar[tuple[str, ...]] = ("limit",)
    scripted_seats: ClassVar[tuple[int, ...]] = (1,)

    opponent: str = "limit"
    """Who buys: a script that pays up to its limit, or a model (docs/opponents.md), which is told the limit."""
    num_goods: int = 4
    """Number of things to sell, one per turn."""
    glad_share: float = 0.5
    """Probability that the buyer is glad."""
    mood_from: Literal["seed", "price"] = "seed"
    """Draw the mood from the attempt's seed, or from the seed and the first price."""
    demonstration_skill: float = 1.0
    """How often a demonstration asks the highest price that will be paid instead of any price."""

    def __post_init__(self) -> None:
        if not 2 <= self.num_goods <= len(GOODS):
            raise ConfigError(f"num_goods={self.num_goods}; expected 2 to {len(GOODS)}: the mood comes with the first")
        check_fractions(self, "glad_share", "demonstration_skill")
        if self.mood_from not in ("seed", "price"):
            raise ConfigError(f"mood_from={self.mood_from!r}; expected seed or price")

    @property
    def max_turns(self) -> int:
        return self.num_goods

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return draw_tasks(self._draw_task, split, count, random_for(self.name, split, seed))

    def make_env(self, task: Task, seed: int) -> SeatedEnv:
        return scripted_env(self, task, seed)

    def policy_seat(self, task: Task) -> int:  # noqa: ARG002 - the policy sells
        return 0

    def scripted_reply(self, opponent: str, task: Task, game: BargainGame, seed: int) -> str:  # noqa: ARG002
        return "I take it." if game.is_good_price else "No deal."

    def make_game(self, task: Task, seed: int) -> BargainGame:
        def mood(price: int | None) -> Mood:
            drawn_with = (seed, task.id) if self.mood_from == "seed" else (seed, task.id, price or 0)
            return "glad" if random_for("mood", *drawn_with).random() < self.glad_share else "sad"

        return BargainGame(task.data["goods"], mood if self.mood_from == "price" else mood(None))

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        return play_demonstrations(
            with_script(self), lambda task: self._player(random_for("demo", seed, task.id)), count, seed
        )

    def _draw_task(self, rng: random.Random) -> Task:
        goods = [{"name": name, "worth": rng.choice(WORTHS)} for name in rng.sample(GOODS, self.num_goods)]
        return Task(id="sell-" + "-".join(f"{good['name']}{good['worth']}" for good in goods), data={"goods": goods})

    def _player(self, rng: random.Random) -> ScriptedPlayer:
        """Ask for the highest price that will be paid. Before the mood is known, assume that the buyer is glad."""

        def reply(dialogue: Sequence[Message]) -> str:
            said = " ".join(message.content for message in dialogue)
            mood: Mood = "sad" if "I am sad" in said else "glad"
            worth = int(re.findall(r"worth ([0-9])", said)[-1])
            is_skilled = rng.random() < self.demonstration_skill
            return str(highest_price(worth, mood) if is_skilled else rng.randint(1, 9))

        return reply


class BargainGame:
    """One day at the market: seat 0 sells, seat 1 buys."""

    num_seats = 2

    def __init__(self, goods: Sequence[Mapping[str, Any]], mood: Mood | Callable[[int | None], Mood]) -> None:
        """`mood` is a mood, or a function that gives the mood for the first price."""
        self._goods = goods
        self._mood_of = mood if callable(mood) else None
        self._mood: Mood | None = None if callable(mood) else mood
        self._asked: int | None = None  # the price that waits for an answer
        self._turn = 0
        self._earned = 0
        self._earned_first = 0
        self._answer = ""

    @property
    def to_move(self) -> int | None:
        if self._asked is not None:
            return 1
        return 0 if self._turn < len(self._goods) else None

    @property
    def is_good_price(self) -> bool:
        """Whether the buyer pays the price that is asked."""
        return self._asked is not None and self._asked <= self._limit

    def rules(self, seat: int) -> list[Message]:
        if seat == 0:
            return [system("Sell each thing. Say one price from 1 to 9.")]
        bound = "twice what a thing is worth" if self._mood == "glad" else "one less than a thing is worth"
        return [system(f"You buy things. You are {self._mood}: pay at most {bound}. Say I take it, or No deal.")]

    def view(self, seat: int) -> list[Message]:
        return [user(f"{self._answer}{self._offer()}" if seat == 0 else f"{self._offer()} The price is {self._asked}.")]

    def move(self, reply: Message) -> bool:
        if self._asked is not None:
            return self._decide(reply.content)
        price = _read_price(reply.content)
        if self._mood is None:
            assert self._mood_of is not None, "a mood that is not known follows from the first price"
            self._mood = self._mood_of(price)
        if price is None:
            self._settle_thing(0)
        else:
            self._asked = price
        return price is not None

    def outcome(self, seat: int) -> SeatOutcome:
        assert self._mood is not None, "it is known from the first price on"
        mood: Mood = self._mood
        most = sum(highest_price(good["worth"], "glad") for good in self._goods)
        possible = sum(highest_price(good["worth"], mood) for good in self._goods[1:])
        sold = self._earned / most
        is_sold_well = self._earned - self._earned_first >= SUCCESS_SHARE * possible
        return SeatOutcome(
            reward=sold if seat == 0 else 1.0 - sold,
            is_success=is_sold_well if seat == 0 else not is_sold_well,
            info={"glad": float(mood == "glad")},
        )

    def key(self) -> str:
        """The state includes the mood as soon as it is drawn, even before the buyer tells it."""
        return f"turn {self._turn} {self._mood} earned {self._earned_first}+{self._earned - self._earned_first}"

    def copy(self) -> BargainGame:
        return copy.copy(self)  # the goods are never changed

    @property
    def _limit(self) -> int:
        assert self._mood is not None, "it is known from the first price on"
        return highest_price(self._goods[self._turn]["worth"], self._mood)

    def _decide(self, text: str) -> bool:
        """The buyer's answer. What says neither, or both, is no deal."""
        takes, refuses = "take" in text.lower(), "no deal" in text.lower()
        assert self._asked is not None, "there is a price to answer"
        self._settle_thing(self._asked if takes and not refuses else 0)
        return takes != refuses

    def _settle_thing(self, paid: int) -> None:
        self._earned += paid
        if self._turn == 0:
            self._earned_first = self._earned
        self._asked = None
        self._turn += 1
        self._answer = f"I am {self._mood}. {'I take it.' if paid else 'No deal.'} "

    def _offer(self) -> str:
        good = self._goods[self._turn]
        return f"The {good['name']} is worth {good['worth']}."


def _read_price(text: str) -> int | None:
    """Read the price: the only number in a reply, from 1 to 9. None if there is no such number."""
    numbers = set(_PRICE.findall(text))
    if len(numbers) != 1:
        return None
    (number,) = numbers
    return int(number) if len(number) == 1 and number != "0" else None
