"""The games of the world `negotiate`: issues with labelled options, and what each option is worth to each side.

Three kinds of issues, told by their points (side 0 in the first row, side 1 in the second):

    distributive   900: 0   1,000: 2   1,100: 4       what one side wins, the other loses
                        4          2          0
    integrative    the same shape, but one side cares more: give way here and win on another issue
    compatible     both sides want the same option, and neither knows that of the other

Scenarios are split: those in `OUT_OF_DOMAIN` are never trained on, and neither are the words in the second half of the
random generator's list.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

Kind = Literal["distributive", "integrative", "compatible"]
KINDS: tuple[Kind, ...] = ("distributive", "integrative", "compatible")
Deal = Mapping[str, int]
"""Issue to the index of the option that was agreed on. Issues that are not settled are left out."""

NUM_WEIGHTS = 5
"""Weights of an issue are 1 to this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """One thing to agree on."""

    name: str
    options: tuple[str, ...]
    kind: Kind
    points: tuple[tuple[int, ...], tuple[int, ...]]
    """[side][option]: the side's weight times how good the option is for it."""


@dataclass(frozen=True, kw_only=True)
class PayoffTable:
    """The issues of one game, and the payoffs of every deal."""

    issues: tuple[Issue, ...]

    def payoff(self, deal: Deal, seat: int) -> int:
        """The points of a side. An issue that is not settled pays nothing."""
        return sum(issue.points[seat][deal[issue.name]] for issue in self.issues if issue.name in deal)

    def share(self, deal: Deal, seat: int) -> float:
        """The payoff as a share of the most that the side could get."""
        return self.payoff(deal, seat) / self.best[seat]

    def joint(self, deal: Deal) -> float:
        """The shares of both sides together, as a share of the largest sum that any deal has."""
        return (self.share(deal, 0) + self.share(deal, 1)) / self.best_joint

    @cached_property
    def best(self) -> tuple[int, int]:
        """The most points of each side."""
        first, second = (sum(max(issue.points[seat]) for issue in self.issues) for seat in (0, 1))
        return first, second

    @cached_property
    def deals(self) -> list[dict[str, int]]:
        """All deals that settle every issue."""
        ranges = [range(len(issue.options)) for issue in self.issues]
        names = [issue.name for issue in self.issues]
        return [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*ranges)]

    @cached_property
    def best_joint(self) -> float:
        return max(self.share(deal, 0) + self.share(deal, 1) for deal in self.deals)

    @cached_property
    def nash(self) -> tuple[float, float]:
        """The shares of both sides in the deal with the largest product of payoffs: what two fair sides would settle
        on. Where several deals have that product, the means over them, so that no side has an easier target."""
        payoffs = [(self.payoff(deal, 0), self.payoff(deal, 1)) for deal in self.deals]
        most = max(first * second for first, second in payoffs)
        tied = [pair for pair in payoffs if pair[0] * pair[1] == most]
        first, second = (sum(pair[seat] for pair in tied) / len(tied) / self.best[seat] for seat in (0, 1))
        return first, second

    def is_efficient(self, deal: Deal) -> bool:
        """No other deal is better for one side and at least as good for the other."""
        mine, theirs = self.payoff(deal, 0), self.payoff(deal, 1)
        others = [(self.payoff(other, 0), self.payoff(other, 1)) for other in self.deals]
        return not any(a >= mine and b >= theirs and (a, b) != (mine, theirs) for a, b in others)

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "name": issue.name,
                "options": list(issue.options),
                "kind": issue.kind,
                "points": [list(row) for row in issue.points],
            }
            for issue in self.issues
        ]

    @classmethod
    def from_json(cls, rows: Sequence[Mapping[str, Any]]) -> PayoffTable:
        return cls(
            issues=tuple(
                Issue(
                    name=row["name"],
                    options=tuple(row["options"]),
                    kind=row["kind"],
                    points=(tuple(row["points"][0]), tuple(row["points"][1])),
                )
                for row in rows
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A story with two roles. Options are ordered: the first role wants the last one, where the two disagree."""

    roles: tuple[str, str]
    issues: Mapping[str, tuple[str, ...]]


SCENARIOS: Mapping[str, Scenario] = {
    "rental": Scenario(
        roles=("landlord", "tenant"),
        issues={
            "rent": ("900", "1,000", "1,100", "1,200"),
            "deposit": ("none", "1 month", "2 months", "3 months"),
            "start": ("August", "July", "June", "May"),
            "term": ("6 months", "12 months", "18 months", "24 months"),
            "pets": ("allowed", "one cat", "no dogs", "forbidden"),
        },
    ),
    "loan": Scenario(
        roles=("lender", "borrower"),
        issues={
            "rate": ("4%", "5%", "6%", "7%"),
            "amount": ("40,000", "30,000", "20,000", "10,000"),
            "fee": ("0", "100", "200", "300"),
            "years": ("8", "6", "4", "2"),
        },
    ),
    "used_car": Scenario(
        roles=("seller", "buyer"),
        issues={
            "price": ("7,500", "8,000", "8,500", "9,000"),
            "warranty": ("12 months", "6 months", "3 months", "none"),
            "pickup": ("Friday", "Thursday", "Wednesday", "Monday"),
            "tyres": ("four new", "two new", "checked", "as they are"),
        },
    ),
    "hotel": Scenario(
        roles=("manager", "guest"),
        issues={
            "nightly": ("80", "95", "110", "125"),
            "breakfast": ("free", "5", "10", "15"),
            "checkout": ("2 pm", "1 pm", "12 pm", "10 am"),
            "view": ("sea", "garden", "street", "yard"),
        },
    ),
    "merger": Scenario(
        roles=("owner", "acquirer"),
        issues={
            "shares": ("40 million", "45 million", "50 million", "55 million"),
            "board": ("no seat", "1 seat", "2 seats", "3 seats"),
            "closing": ("October", "July", "April", "January"),
            "brand": ("dropped", "kept a year", "kept", "leads"),
        },
    ),
}
OUT_OF_DOMAIN = ("hotel", "merger")
"""Scenarios that are never trained on, whatever the options say."""

RANDOM = "random"
_RANDOM_ROLES = ("first side", "second side")
_RANDOM_ISSUES: Mapping[str, tuple[str, ...]] = {
    "budget": ("1,500", "2,000", "2,500", "3,000"),
    "staff": ("2", "4", "6", "8"),
    "day": ("Monday", "Tuesday", "Thursday", "Sunday"),
    "colour": ("white", "green", "blue", "black"),
    "weight": ("10 kg", "20 kg", "30 kg", "40 kg"),
    "share": ("20%", "40%", "60%", "80%"),
    "hours": ("9", "12", "15", "18"),
    "size": ("small", "medium", "large", "huge"),
    "salary": ("45,000", "50,000", "55,000", "60,000"),
    "floor": ("1", "3", "5", "7"),
    "season": ("spring", "summer", "autumn", "winter"),
    "material": ("wood", "brick", "steel", "stone"),
    "length": ("5 m", "10 m", "15 m", "20 m"),
    "bonus": ("3%", "6%", "9%", "12%"),
    "visits": ("1", "2", "4", "5"),
    "speed": ("slow", "steady", "quick", "express"),
}
_NUM_TRAIN_WORDS = len(_RANDOM_ISSUES) // 2
ALL_GAMES = (*SCENARIOS, RANDOM)


def scenario_of(game: str, *, is_out_of_domain: bool) -> Scenario:
    """The scenario of a game's name; the random one has other words where it is held out."""
    if game != RANDOM:
        return SCENARIOS[game]
    names = list(_RANDOM_ISSUES)
    chosen = names[_NUM_TRAIN_WORDS:] if is_out_of_domain else names[:_NUM_TRAIN_WORDS]
    return Scenario(roles=_RANDOM_ROLES, issues={name: _RANDOM_ISSUES[name] for name in chosen})


def draw_table(
    scenario: Scenario, rng: random.Random, *, num_issues: int, num_options: int, kinds: Sequence[Kind]
) -> PayoffTable:
    """Draw which issues there are, of which kinds, and what they are worth. Two integrative issues mirror each other,
    so that each side can give way on what it cares less about."""
    names = rng.sample(list(scenario.issues), min(num_issues, len(scenario.issues)))
    issues: list[Issue] = []
    mirrored: tuple[int, int] | None = None
    for name in names:
        kind = rng.choice(list(kinds))
        weights = _draw_weights(kind, rng)
        if kind == "integrative" and mirrored is not None:
            weights, mirrored = (mirrored[1], mirrored[0]), None
        elif kind == "integrative":
            mirrored = weights
        labels = scenario.issues[name]
        start = rng.randrange(len(labels) - num_options + 1)
        ups = range(num_options)
        first = tuple(weights[0] * up for up in ups)
        second = tuple(weights[1] * (up if kind == "compatible" else num_options - 1 - up) for up in ups)
        if kind == "compatible" and rng.random() < 0.5:
            first, second = first[::-1], second[::-1]
        issues.append(Issue(name=name, options=labels[start : start + num_options], kind=kind, points=(first, second)))
    return PayoffTable(issues=tuple(issues))


def _draw_weights(kind: Kind, rng: random.Random) -> tuple[int, int]:
    first = rng.randint(1, NUM_WEIGHTS)
    if kind == "distributive":
        return first, first
    if kind == "compatible":
        return first, rng.randint(1, NUM_WEIGHTS)
    second = rng.choice([weight for weight in range(1, NUM_WEIGHTS + 1) if abs(weight - first) >= 2])
    return first, second
