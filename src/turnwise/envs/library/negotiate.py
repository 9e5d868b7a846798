"""Two sides agree on several issues in free text. Each side knows only its own points.

    system     You are the landlord. Agree with the tenant on rent, pets. Propose with a line like
               Offer: rent=1,000; pets=one cat
               or take the last offer with the line Accept. Your points, which the tenant does not know:
               rent: 900 (0) 1,000 (2) 1,100 (4)
               pets: allowed (0) one cat (1) forbidden (2)
    user       The tenant says: I want a deal.
               Offer: rent=900; pets=allowed
               Turns left: 4
    assistant  Too little.
               Offer: rent=1,100; pets=allowed
    user       The tenant says: Accept                                  payoff 4 of 6: reward 0.67, terminated

Agreement is parsed, never judged (`negotiate_text.py`). An acceptance settles the issues of the other side's last
offer; an offer that repeats the other side's last offer accepts it. The payoff is computed from the table. The reward
is the policy's points as a share of the most it could get. `partial` says what counts if not every issue is settled:

    settled   (default) the issues that the accepted offer names pay; the others pay nothing
    overlap   as settled; and if nobody accepted, the issues on which both last offers agree pay
    none      only an offer that names every issue can be accepted

Without a deal the reward is 0. `is_success` means a deal with at least `success_share` of what the policy gets in the
Nash solution, the deal with the largest product of payoffs (of several such deals, their mean). A task fixes issues,
points, the policy's role and who begins; roles and beginners alternate. `hotel`, `merger` and half of the random
generator's words are out of domain: they are held out (`held_out=scenarios`), and training never sees them.
`held_out=payoffs` holds out other payoff tables of the games that are trained on.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

from turnwise.envs.base import Split, Task, system, user
from turnwise.envs.difficulty import Levels
from turnwise.envs.game import SeatOutcome
from turnwise.envs.library.negotiate_games import (
    ALL_GAMES,
    KINDS,
    OUT_OF_DOMAIN,
    RANDOM,
    Deal,
    Kind,
    PayoffTable,
    draw_table,
    scenario_of,
)
from turnwise.envs.library.negotiate_players import (
    CHARACTERS,
    MIXED,
    RANDOM_PLAYER,
    SCRIPTED_PLAYERS,
    scripted_text,
)
from turnwise.envs.library.negotiate_text import heard_part, read_reply, write_offer
from turnwise.envs.schema import check_fractions
from turnwise.envs.scripted import play_script
from turnwise.envs.seats import SeatedEnv, scripted_env, with_script
from turnwise.envs.splits import draw, random_for, split_of
from turnwise.errors import ConfigError
from turnwise.runtime.blocking import run_to_end
from turnwise.runtime.suggest import did_you_mean
from turnwise.trajectory import Message

Partial = Literal["settled", "overlap", "none"]

_TRIES_PER_TASK = 50
_DEMONSTRATION_PLAYERS = ("fair", "conceder", "tough")


class NegotiateGame:
    """One negotiation."""

    num_seats = 2

    def __init__(
        self,
        table: PayoffTable,
        roles: Sequence[str],
        *,
        first: int = 0,
        max_turns: int = 4,
        partial: Partial = "settled",
    ) -> None:
        self.table = table
        self.offers: tuple[Deal | None, Deal | None] = (None, None)
        self.deal: Deal | None = None
        """What was agreed on; None while the game goes on, and if it ended without a deal."""
        self.transcript: tuple[tuple[int, str], ...] = ()
        """Seat and words of every turn."""
        self._roles = tuple(roles)
        self._first = first
        self._max_turns = max_turns
        self._partial = partial
        self._is_over = False
        self._success_share = 0.0

    @property
    def to_move(self) -> int | None:
        return None if self._is_over else (self._first + len(self.transcript)) % 2

    def rules(self, seat: int) -> list[Message]:
        issues, other = self.table.issues, self._roles[1 - seat]
        example = write_offer({issue.name: len(issue.options) // 2 for issue in issues}, issues)
        points = "\n".join(
            f"{issue.name}: "
            + " ".join(f"{option} ({worth})" for option, worth in zip(issue.options, issue.points[seat], strict=True))
            for issue in issues
        )
        return [
            system(
                f"You are the {self._roles[seat]}. Agree with the {other} on "
                f"{', '.join(issue.name for issue in issues)}. Propose with a line like\n{example}\n"
                f"or take the last offer with the line Accept. Your points, which the {other} does not know:\n{points}"
            )
        ]

    def view(self, seat: int) -> list[Message]:
        left = f"Turns left: {self._max_turns - self._num_turns(seat)}"
        return [user(f"{self._heard(seat) or 'You begin.'}\n{left}")]

    def move(self, reply: Message) -> bool:
        seat = self.to_move
        assert seat is not None, "the game is over"
        said, theirs = read_reply(reply.content, self.table.issues), self.offers[1 - seat]
        self.transcript = (*self.transcript, (seat, reply.content))
        accepts = said.is_acceptance and said.offer is None and not said.is_malformed
        can_accept = theirs is not None and (self._partial != "none" or len(theirs) == len(self.table.issues))
        if said.offer is not None:
            accepts = said.offer == theirs
            self.offers = (said.offer, theirs) if seat == 0 else (theirs, said.offer)
        if accepts and can_accept:
            self.deal, self._is_over = theirs, True
        elif len(self.transcript) == 2 * self._max_turns:
            self.deal, self._is_over = self._overlap() or None, True
        is_empty_acceptance = accepts and not can_accept
        return not said.is_malformed and not is_empty_acceptance

    def outcome(self, seat: int) -> SeatOutcome:
        deal = self.deal or {}
        own, nash = self.table.share(deal, seat), self.table.nash[seat]
        heard = self._heard(seat)
        return SeatOutcome(
            reward=own,
            is_success=self.deal is not None and own >= self._success_share * nash - 1e-9,
            info={
                "agreement": float(self.deal is not None),
                "payoff": own,
                "other_payoff": self.table.share(deal, 1 - seat),
                "joint": self.table.joint(deal),
                "settled": len(deal) / len(self.table.issues),
                "efficient": float(self.deal is not None and self.table.is_efficient(deal)),
            },
            messages=[user(heard)] if heard and self.transcript[-1][0] != seat else (),
        )

    def progress(self, seat: int) -> float:
        return self._num_turns(seat) / (self._max_turns - 1) if self._max_turns > 1 else 1.0

    def key(self) -> str:
        """The last offers and the number of turns; the words around them do not matter."""
        offers = [sorted(offer.items()) if offer is not None else None for offer in self.offers]
        return f"turn {len(self.transcript)} offers {offers} deal {self.deal}"

    def copy(self) -> NegotiateGame:
        return copy.copy(self)  # what changes is replaced, never changed in place

    def requiring(self, success_share: float) -> NegotiateGame:
        """The same game, in which a success needs this share of the Nash solution's payoff."""
        twin = self.copy()
        twin._success_share = success_share
        return twin

    def _num_turns(self, seat: int) -> int:
        return sum(speaker == seat for speaker, _ in self.transcript)

    def _heard(self, seat: int) -> str:
        """The other side's last words."""
        said = [text for speaker, text in self.transcript if speaker != seat]
        if not said:
            return ""
        return f"The {self._roles[1 - seat]} says: {heard_part(said[-1], self.table.issues) or '(nothing)'}"

    def _overlap(self) -> Deal:
        first, second = self.offers[0] or {}, self.offers[1] or {}
        if self._partial != "overlap":
            return {}
        return {name: option for name, option in first.items() if second.get(name) == option}


@dataclass(frozen=True, slots=True, kw_only=True)
class Negotiate:
    """The world `negotiate`."""

    name: ClassVar[str] = "negotiate"
    difficulties: ClassVar[Levels] = tuple({"num_issues": count} for count in range(1, 5))
    max_tokens: ClassVar[int] = 48
    scripted_opponents: ClassVar[tuple[str, ...]] = SCRIPTED_PLAYERS

    opponent: str = MIXED
    """Who has the other side: fair, conceder, tough, random, mixed (one of the four, drawn with the task), or a model:
    base, self, pool, a run, a checkpoint, a model's name or directory, or an address (docs/opponents.md)."""
    games: str = "all"
    """The games to play, by name, with commas: rental, loan, used_car, hotel, merger, random; or all."""
    held_out: Literal["scenarios", "payoffs"] = "scenarios"
    """What the test split has: games that are never trained on, or other payoff tables of those that are."""
    num_issues: int = 2
    """Issues of a game: the difficulty. 1 to 4."""
    num_options: int = 3
    """Options of an issue, 2 to 4."""
    kinds: Literal["mixed", "distributive", "integrative", "compatible"] = "mixed"
    """Which kinds of issues there are."""
    max_turns: int = 4
    """Turns of each side."""
    partial: Partial = "settled"
    """What pays if not every issue is settled."""
    success_share: float = 0.8
    """A success is a deal with this share of what the policy gets in the Nash solution."""
    demonstration_skill: float = 1.0
    """How often a demonstration is played by a player with a plan, and not at random."""

    def __post_init__(self) -> None:
        check_fractions(self, "success_share", "demonstration_skill")
        for name, low, high in (("num_issues", 1, 4), ("num_options", 2, 4), ("max_turns", 1, 20)):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name}={getattr(self, name)}; expected {low} to {high}")
        if not self.opponent:
            raise ConfigError("opponent is empty; expected one of the scripts, or a model (docs/opponents.md)")
        for game in self._chosen():
            if game not in ALL_GAMES:
                known = ", ".join(ALL_GAMES)
                raise ConfigError(f"games: no game {game!r}{did_you_mean(game, ALL_GAMES)}; expected {known}, or all")
        if not self._games("train"):
            raise ConfigError(f"games={self.games} are all out of domain; add one to train on, such as rental")

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        games = self._games(split)
        if not games:
            raise ConfigError(
                f"games={self.games} has none of the out-of-domain games {', '.join(OUT_OF_DOMAIN)}; add one, or set "
                "held_out=payoffs"
            )
        rng, found = random_for(self.name, split, seed), dict[str, Task]()
        per_game: Counter[str] = Counter()  # so that both roles and both orders come up in each game
        for number in range(_TRIES_PER_TASK * max(count, 10)):
            if len(found) >= count:
                break
            game = games[number % len(games)]
            task = self._draw_task(split, game, per_game[game], rng)
            if task is not None and task.id not in found:
                found[task.id] = task
                per_game[game] += 1
        return draw(list(found.values()), count, rng) if count else []

    def policy_seat(self, task: Task) -> int:
        return task.data["seat"]

    def make_game(self, task: Task, seed: int) -> NegotiateGame:  # noqa: ARG002 - a task fixes everything
        data = task.data
        game = NegotiateGame(
            PayoffTable.from_json(data["issues"]),
            data["roles"],
            first=data["first"],
            max_turns=self.max_turns,
            partial=self.partial,
        )
        return game.requiring(self.success_share)

    def make_env(self, task: Task, seed: int) -> SeatedEnv:
        return scripted_env(self, task, seed)

    def scripted_reply(self, opponent: str, task: Task, game: Any, seed: int) -> str:
        if opponent == MIXED:
            opponent = random_for("character", task.id).choice((*CHARACTERS, RANDOM_PLAYER))
        assert game.to_move is not None, "the game is over"
        return scripted_text(opponent, game, game.to_move, random.Random(seed))

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        """Scripted negotiations. Those of players with a plan are left out where no plan led to a success."""

        async def play_all() -> list[list[Message]]:
            played = [await self._demonstrate(task, seed) for task in self.tasks("train", count, seed)]
            return [dialogue for dialogue in played if dialogue]

        return run_to_end(play_all())

    async def _demonstrate(self, task: Task, seed: int) -> list[Message]:
        """The dialogue of the first player that succeeds, or of one that plays at random; empty if nobody succeeds."""
        rng = random_for("demo", seed, task.id)
        if rng.random() >= self.demonstration_skill:
            return (await self._play_script(task, seed, RANDOM_PLAYER, rng))[0]
        players = rng.sample(_DEMONSTRATION_PLAYERS, len(_DEMONSTRATION_PLAYERS))
        for player in (*players, *players):  # a second try draws other words and other deals
            dialogue, is_success = await self._play_script(task, seed, player, rng)
            if is_success:
                return dialogue
        return []

    async def _play_script(self, task: Task, seed: int, player: str, rng: random.Random) -> tuple[list[Message], bool]:
        env = self._scripted_env(task, seed)

        def reply(_: Sequence[Message]) -> str:
            game = cast(NegotiateGame, env.game)
            assert game.to_move is not None, "the game is over"
            return scripted_text(player, game, game.to_move, rng)

        dialogue = await play_script(env, reply, self.max_turns)
        return dialogue, env.game.outcome(self.policy_seat(task)).is_success

    def _scripted_env(self, task: Task, seed: int) -> SeatedEnv:
        """Against the scripted opponent; a warm-up against a model shows games against all scripts."""
        return scripted_env(with_script(self), task, seed)

    def _chosen(self) -> tuple[str, ...]:
        return ALL_GAMES if self.games == "all" else tuple(game.strip() for game in self.games.split(","))

    def _games(self, split: Split) -> list[str]:
        is_other = split == "test" and self.held_out == "scenarios"
        return [game for game in self._chosen() if game == RANDOM or (game in OUT_OF_DOMAIN) == is_other]

    def _draw_task(self, split: Split, game: str, number: int, rng: random.Random) -> Task | None:
        """A game with other points, in the role and the order that are next. None if it is of the other split."""
        is_other = split == "test" and self.held_out == "scenarios"
        kinds: tuple[Kind, ...] = KINDS if self.kinds == "mixed" else (self.kinds,)
        scenario = scenario_of(game, is_out_of_domain=is_other)
        table = draw_table(scenario, rng, num_issues=self.num_issues, num_options=self.num_options, kinds=kinds)
        points = [
            f"{issue.name}{issue.options[0]}:{'.'.join(str(row[end]) for row in issue.points for end in (0, -1))}"
            for issue in table.issues
        ]
        key, table_key = (f"{game}-{'-'.join(order)}".replace(" ", "") for order in (points, sorted(points)))
        # A table that is held out is held out for both sides, whoever begins and whichever issue is named first.
        if not is_other and split_of(table_key) != split:
            return None
        seat, first = number % 2, number // 2 % 2
        return Task(
            id=f"{key}-seat{seat}-first{first}",
            data={"game": game, "roles": list(scenario.roles), "issues": table.to_json(), "seat": seat, "first": first},
        )
