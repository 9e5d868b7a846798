"""Makes word problems in the style of GSM8K from templates: one to three steps, small numbers, whole answers.

    Tom has 5 pears and buys 3 bags with 4 pears in each. How many pears does Tom have now?
    3 * 4 = 12 pears in the bags.
    5 + 12 = 17 pears in all.
    #### 17

Every template draws its numbers so that no result is below zero and every division has no remainder. The templates
repeat each other's shape: each one is a story with its own sentences, and it is easiest to read as a whole.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

NAMES = ("Anna", "Ben", "Clara", "David", "Ella", "Felix", "Grace", "Hugo", "Ivy", "Jack", "Lena", "Max", "Nora", "Tom")
THINGS = ("apples", "pears", "books", "coins", "stamps", "cards", "marbles", "shells", "pencils", "buttons", "cookies")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, the lines of its solution, and the answer."""

    question: str
    steps: tuple[str, ...]
    answer: int

    @property
    def solution(self) -> str:
        return "\n".join([*self.steps, f"#### {self.answer}"])


def draw_problem(rng: random.Random, max_steps: int) -> Problem:
    """Draw a problem with one to `max_steps` steps. Each number of steps is equally likely."""
    templates = _TEMPLATES[rng.randint(1, max_steps)]
    name, other = rng.sample(NAMES, 2)
    return rng.choice(templates)(_Draw(rng, name, other, rng.choice(THINGS)))


class _Draw:
    """The words and numbers that fill a template."""

    def __init__(self, rng: random.Random, name: str, other: str, thing: str) -> None:
        self._rng = rng
        self.name = name
        self.other = other
        self.thing = thing

    def number(self, low: int, high: int) -> int:
        return self._rng.randint(low, high)


_Template = Callable[[_Draw], Problem]


def _buy_more(d: _Draw) -> Problem:
    a, b = d.number(2, 30), d.number(2, 30)
    question = f"{d.name} has {a} {d.thing} and gets {b} more. How many {d.thing} does {d.name} have now?"
    return Problem(question, (f"{a} + {b} = {a + b} {d.thing}.",), a + b)


def _give_away(d: _Draw) -> Problem:
    b, left = d.number(2, 20), d.number(1, 30)
    a = b + left
    question = f"{d.name} has {a} {d.thing} and gives {b} of them to {d.other}. How many {d.thing} are left?"
    return Problem(question, (f"{a} - {b} = {left} {d.thing}.",), left)


def _boxes(d: _Draw) -> Problem:
    a, b = d.number(2, 9), d.number(2, 12)
    question = f"There are {b} {d.thing} in a box. {d.name} has {a} boxes. How many {d.thing} are there in all?"
    return Problem(question, (f"{a} * {b} = {a * b} {d.thing}.",), a * b)


def _share(d: _Draw) -> Problem:
    friends, each = d.number(2, 9), d.number(2, 12)
    total = friends * each
    question = (
        f"{d.name} shares {total} {d.thing} equally among {friends} friends. How many {d.thing} does each friend get?"
    )
    return Problem(question, (f"{total} / {friends} = {each} {d.thing}.",), each)


def _difference(d: _Draw) -> Problem:
    b, more = d.number(2, 30), d.number(2, 20)
    a = b + more
    question = (
        f"{d.name} has {a} {d.thing} and {d.other} has {b}. How many more {d.thing} does {d.name} have than {d.other}?"
    )
    return Problem(question, (f"{a} - {b} = {more} {d.thing}.",), more)


def _buy_bags(d: _Draw) -> Problem:
    a, bags, each = d.number(1, 20), d.number(2, 6), d.number(2, 9)
    inside = bags * each
    question = (
        f"{d.name} has {a} {d.thing} and buys {bags} bags with {each} {d.thing} in each. "
        f"How many {d.thing} does {d.name} have now?"
    )
    steps = (f"{bags} * {each} = {inside} {d.thing} in the bags.", f"{a} + {inside} = {a + inside} {d.thing} in all.")
    return Problem(question, steps, a + inside)


def _shopping(d: _Draw) -> Problem:
    count, price, change = d.number(2, 8), d.number(2, 9), d.number(1, 20)
    cost = count * price
    money = cost + change
    question = (
        f"{d.name} buys {count} toys for {price} dollars each and pays with {money} dollars. "
        "How many dollars does the shop give back?"
    )
    steps = (f"{count} * {price} = {cost} dollars for the toys.", f"{money} - {cost} = {change} dollars back.")
    return Problem(question, steps, change)


def _twice_as_many(d: _Draw) -> Problem:
    a, times = d.number(2, 15), d.number(2, 4)
    more = a * times
    question = (
        f"{d.name} has {a} {d.thing}. {d.other} has {times} times as many. How many {d.thing} do they have together?"
    )
    steps = (f"{a} * {times} = {more} {d.thing} for {d.other}.", f"{a} + {more} = {a + more} {d.thing} together.")
    return Problem(question, steps, a + more)


def _eat_then_share(d: _Draw) -> Problem:
    friends, each, eaten = d.number(2, 6), d.number(2, 9), d.number(1, 9)
    rest = friends * each
    question = (
        f"{d.name} bakes {rest + eaten} cookies, eats {eaten} and shares the rest equally among {friends} friends. "
        "How many cookies does each friend get?"
    )
    steps = (f"{rest + eaten} - {eaten} = {rest} cookies are left.", f"{rest} / {friends} = {each} cookies each.")
    return Problem(question, steps, each)


def _reading(d: _Draw) -> Problem:
    days, pages, rest = d.number(2, 7), d.number(3, 12), d.number(2, 30)
    read = days * pages
    question = (
        f"A book has {read + rest} pages. {d.name} reads {pages} pages a day for {days} days. "
        "How many pages are left to read?"
    )
    steps = (f"{days} * {pages} = {read} pages read.", f"{read + rest} - {read} = {rest} pages left.")
    return Problem(question, steps, rest)


def _sell_and_buy(d: _Draw) -> Problem:
    sold, price, toy = d.number(2, 8), d.number(2, 9), d.number(2, 9)
    earned = sold * price
    saved = d.number(toy, toy + 20)
    question = (
        f"{d.name} has {saved} dollars, sells {sold} drawings for {price} dollars each and buys a toy "
        f"for {toy} dollars. How many dollars does {d.name} have then?"
    )
    steps = (
        f"{sold} * {price} = {earned} dollars from the drawings.",
        f"{saved} + {earned} = {saved + earned} dollars.",
        f"{saved + earned} - {toy} = {saved + earned - toy} dollars.",
    )
    return Problem(question, steps, saved + earned - toy)


def _two_kinds(d: _Draw) -> Problem:
    a, price_a, b, price_b = d.number(2, 6), d.number(2, 9), d.number(2, 6), d.number(2, 9)
    question = (
        f"A pen costs {price_a} dollars and a book costs {price_b} dollars. {d.name} buys {a} pens and {b} books. "
        "How many dollars does it cost in all?"
    )
    steps = (
        f"{a} * {price_a} = {a * price_a} dollars for the pens.",
        f"{b} * {price_b} = {b * price_b} dollars for the books.",
        f"{a * price_a} + {b * price_b} = {a * price_a + b * price_b} dollars.",
    )
    return Problem(question, steps, a * price_a + b * price_b)


def _collect_and_share(d: _Draw) -> Problem:
    people, each = d.number(2, 6), d.number(3, 12)
    total = people * each
    lost = d.number(1, 9)
    first = d.number(1, total + lost - 1)
    second = total + lost - first
    question = (
        f"{d.name} finds {first} shells and {d.other} finds {second}. They lose {lost} of them and put the rest "
        f"into {people} equal heaps. How many shells are in a heap?"
    )
    steps = (
        f"{first} + {second} = {total + lost} shells found.",
        f"{total + lost} - {lost} = {total} shells left.",
        f"{total} / {people} = {each} shells in a heap.",
    )
    return Problem(question, steps, each)


def _week_of_work(d: _Draw) -> Problem:
    hours, pay, days, spent = d.number(2, 6), d.number(3, 9), d.number(2, 5), d.number(2, 10)
    day = hours * pay
    question = (
        f"{d.name} works {hours} hours a day for {pay} dollars an hour. After {days} days {d.name} spends {spent} "
        "dollars. How many dollars are left?"
    )
    steps = (
        f"{hours} * {pay} = {day} dollars a day.",
        f"{day} * {days} = {day * days} dollars in {days} days.",
        f"{day * days} - {spent} = {day * days - spent} dollars left.",
    )
    return Problem(question, steps, day * days - spent)


_TEMPLATES: dict[int, tuple[_Template, ...]] = {
    1: (_buy_more, _give_away, _boxes, _share, _difference),
    2: (_buy_bags, _shopping, _twice_as_many, _eat_then_share, _reading),
    3: (_sell_and_buy, _two_kinds, _collect_and_share, _week_of_work),
}
MAX_STEPS = max(_TEMPLATES)
