"""Negotiation: what the text means, what a deal pays, and that out-of-domain games stay apart."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from cases import for_each
from turnwise.envs.base import Split, Task, assistant
from turnwise.envs.check import check_env
from turnwise.envs.game import Game
from turnwise.envs.library.negotiate import Negotiate, NegotiateGame
from turnwise.envs.library.negotiate_games import OUT_OF_DOMAIN, SCENARIOS, Issue, PayoffTable
from turnwise.envs.library.negotiate_text import MAX_HEARD, find_option, read_reply, write_offer
from turnwise.envs.seats import SeatedEnv
from turnwise.errors import AttemptFailed, ConfigError, Party
from turnwise.trajectory import Message

RENT = Issue(name="rent", options=("900", "1,000", "1,100"), kind="distributive", points=((0, 2, 4), (4, 2, 0)))
PETS = Issue(name="pets", options=("allowed", "one cat", "forbidden"), kind="compatible", points=((3, 1, 0), (5, 2, 0)))
TABLE = PayoffTable(issues=(RENT, PETS))


def make_game(**options: object) -> NegotiateGame:
    return NegotiateGame(TABLE, ("landlord", "tenant"), **options)  # pyright: ignore[reportArgumentType]


def say(game: NegotiateGame, *replies: str) -> list[bool]:
    return [game.move(assistant(reply)) for reply in replies]


def test_a_number_is_read_in_every_usual_format() -> None:
    options = ("900", "1,000", "1,100", "12,500")
    for text in ("1100", "1,100", "1 100", "1'100", "1.100", "$1,100", "1,100.00", "1100.0", "EUR 1.100,00", "1.1k"):
        assert find_option(text, options) == 2, text
    assert find_option("12 500 a year", options) == 3
    for text in ("110", "11000", "1,1000", "", "yes", "1.1"):
        assert find_option(text, options) is None, text
    assert find_option("40,000,000", ("40 million", "45 million")) == 0
    assert find_option("45m", ("40 million", "45 million")) == 1
    assert find_option("6 %", ("5%", "6%")) == 1
    assert find_option("One Cat, please", PETS.options) == 1
    assert find_option("kept a year", ("kept", "kept a year")) == 1
    assert find_option("1,100 (4)", options) == 2, "with the points, as the rules list them"
    assert find_option("May 1", ("June", "May")) == 1, "a number says nothing where no option has one"


DEPOSIT = ("none", "1 month", "2 months", "3 months")


@for_each(
    ("text", "options"),
    [
        ("900 or 1,000", RENT.options),
        ("900 1,000", RENT.options),
        ("1,100, not 900", RENT.options),
        ("allowed or forbidden", PETS.options),
        ("one cat, else forbidden", PETS.options),
        ("none for 3 months", DEPOSIT),
        ("3 months, then none", DEPOSIT),
        ("kept a year then dropped", ("dropped", "kept a year", "kept", "leads")),
    ],
)
def test_a_term_that_names_two_options_makes_the_offer_unreadable(text: str, options: Sequence[str]) -> None:
    assert find_option(text, options) is None


@for_each(
    "quote",
    [
        "> Offer: rent=900; pets=one cat\nToo low.",
        '"Offer: rent=900; pets=one cat" is too low.',
        "“Offer: rent=900; pets=one cat” will not do.",
        "'Offer: rent=900; pets=one cat'?",
        "> > Offer: rent=900; pets=one cat",
        "> Accept",
        '"Accept"? Never.',
    ],
)
def test_who_quotes_an_offer_neither_makes_nor_accepts_it(quote: str) -> None:
    game = make_game()
    assert say(game, "Offer: rent=900; pets=one cat", quote) == [True, True]
    assert game.deal is None
    assert game.offers == ({"rent": 0, "pets": 1}, None)
    both = read_reply(f"{quote}\nOffer: rent=1,000; pets=allowed", TABLE.issues)
    assert both.offer == {"rent": 1, "pets": 0}


def test_every_option_of_every_game_is_read_back_as_itself() -> None:
    for scenario in SCENARIOS.values():
        for options in scenario.issues.values():
            assert [find_option(option, options) for option in options] == list(range(len(options))), options
    for deal in TABLE.deals:
        assert read_reply(f"Well.\n{write_offer(deal, TABLE.issues)}", TABLE.issues).offer == deal


def test_offers_and_acceptance_stand_on_lines_of_their_own() -> None:
    def read(text: str) -> object:
        said = read_reply(text, TABLE.issues)
        return "malformed" if said.is_malformed else said.offer if said.offer is not None else said.is_acceptance

    assert read("offer: RENT: 1100, pets = One Cat") == {"rent": 2, "pets": 1}
    assert read("Offer: rent=900\nNo, better:\nOffer: rent=1,000; pets=allowed") == {"rent": 1, "pets": 0}
    for talk in ("I would offer more.", "Never.", ""):
        assert read(talk) is False, talk
    for bad in ("Offer: rent=950", "Offer: rent=900; rent=1,000", "Offer:", "Offer: car=3"):
        assert read(bad) == "malformed", bad


@for_each(
    "text",
    [
        *("Accept", "I accept.", "accepted!", "**Accept**", "- Agreed.", "Fine.\nAccept", "I accept your offer."),
        *(
            "Accept the deal",
            "I accept that, thank you very much!",
            "Agreed, thanks.",
            "Accept - deal",
            "Agreed to that",
        ),
        *("Accepted, with pleasure.", "I accept your last offer then."),
    ],
)
def test_a_line_that_says_no_more_than_that_it_accepts_is_an_acceptance(text: str) -> None:
    assert read_reply(text, TABLE.issues).is_acceptance


@for_each(
    "text",
    [
        *("I accept no less than 1,200.", "I accept nothing under 8,000", "Accept? Never.", "Agreed? No.", "Accept?"),
        *("Accept my offer instead", "Agreed, except pets", "Accept if pets are allowed", "I cannot accept that."),
        *("Agreed, but only for 900", "Accept 900", "I accept that it is hard.", "Accept\nAccept? No."),
    ],
)
def test_a_line_that_says_more_than_that_it_accepts_is_talk(text: str) -> None:
    assert not read_reply(text, TABLE.issues).is_acceptance


def test_the_other_side_hears_the_offer_that_is_in_force_wherever_it_stands() -> None:
    talk = "Well, well. " * 40
    for said, heard in (
        (f"{talk}\nOffer: rent=1,100; pets=one cat", "Offer: rent=1,100; pets=one cat"),
        (f"Offer: rent=900\n{talk}\nI offer rent 1100!", "Offer: rent=1,100"),
        (f"{talk[:389]}\nOffer: rent=1,100", "Offer: rent=1,100"),  # the 400th character is in the middle of the offer
        (f"Offer: rent=900\n{talk}\nOffer: rent=950", "Offer: (unreadable)"),
        (f"Offer: rent=900\n{talk}", "well."),
    ):
        game = make_game()
        say(game, said)
        words = game.view(1)[0].content.removesuffix("\nTurns left: 4")
        assert words.endswith(heard), said
        assert len(words) < MAX_HEARD + 80


def test_a_deal_pays_exactly_its_points_to_each_side() -> None:
    game = make_game()
    assert say(game, "Offer: rent=1,100; pets=allowed", "Accept") == [True, True]
    assert game.to_move is None
    landlord, tenant = game.outcome(0), game.outcome(1)
    assert (landlord.reward, tenant.reward) == (1.0, 5 / 9)
    assert landlord.info["joint"] == pytest.approx((1 + 5 / 9) / (1 + 5 / 9))
    assert landlord.info["efficient"] == 1
    for deal in TABLE.deals:  # by hand: nobody wants to forbid pets, so no such deal is efficient
        assert TABLE.is_efficient(deal) == (deal["pets"] == 0)


def test_a_success_asks_as_much_of_one_side_as_of_the_other_where_several_deals_are_fair() -> None:
    for num_options, needed in ((2, 1 / 2), (3, 1 / 2), (4, 1 / 2)):
        ups = tuple(3 * up for up in range(num_options))
        issue = Issue(name="x", options=tuple("abcd"[:num_options]), kind="distributive", points=(ups, ups[::-1]))
        table = PayoffTable(issues=(issue,))
        assert table.nash == pytest.approx((needed, needed)), num_options
        for option in range(num_options):
            game = NegotiateGame(table, ("landlord", "tenant")).requiring(0.8)
            say(game, f"Offer: x={issue.options[option]}", "Accept")
            for seat in (0, 1):
                outcome = game.outcome(seat)
                assert outcome.is_success == (outcome.reward >= 0.8 * needed), (num_options, option, seat)
    assert TABLE.nash == pytest.approx((6 / 7, 6 / 9))  # rent 1,100 or 1,000, pets allowed: 7 and 5, or 5 and 7


def test_a_repeated_offer_accepts_and_an_acceptance_of_nothing_does_not() -> None:
    game = make_game()
    assert say(game, "Accept", "Offer: rent=900; pets=one cat", "Offer: pets=one cat; rent=900") == [False, True, True]
    assert game.deal == {"rent": 0, "pets": 1}


def test_partial_agreement_follows_its_option() -> None:
    for partial, deal in (("settled", {"rent": 2}), ("overlap", {"rent": 2}), ("none", None)):
        game = make_game(partial=partial)
        say(game, "Offer: rent=1,100", "Accept")
        assert game.deal == deal, partial
        assert (game.to_move is None) == (deal is not None)
    for partial, deal in (("settled", None), ("overlap", {"pets": 0}), ("none", None)):
        game = make_game(partial=partial, max_turns=1)
        say(game, "Offer: rent=1,100; pets=allowed", "Offer: rent=900; pets=allowed")
        assert game.to_move is None
        assert game.deal == deal, partial
        assert game.outcome(0).reward == (3 / 7 if deal else 0.0)


def test_each_side_sees_its_own_points_only_and_the_others_last_words() -> None:
    game = make_game(first=1)
    assert "900 (0) 1,000 (2) 1,100 (4)" in game.rules(0)[0].content
    assert "900 (4) 1,000 (2) 1,100 (0)" in game.rules(1)[0].content
    assert game.to_move == 1
    say(game, "Hello.\nOffer: rent=900")
    assert game.view(0)[0].content == "The tenant says: Hello.\nOffer: rent=900\nTurns left: 4"


def test_out_of_domain_games_and_held_out_payoffs_are_never_trained_on() -> None:
    def table(task: Task) -> str:
        return f"{task.data['game']} {sorted(map(str, task.data['issues']))}"  # in whichever order they are named

    def words(tasks: Sequence[Task]) -> set[str]:
        return {issue["name"] for task in tasks if task.data["game"] == "random" for issue in task.data["issues"]}

    world = Negotiate()
    train = [task for seed in range(3) for task in world.tasks("train", 400, seed)]
    other = world.tasks("test", 400, 9)
    same = Negotiate(held_out="payoffs").tasks("test", 400, 9)
    assert {task.data["game"] for task in train}.isdisjoint(OUT_OF_DOMAIN)
    assert {task.data["game"] for task in other} == {*OUT_OF_DOMAIN, "random"}
    assert words(train).isdisjoint(words(other))
    assert {task.data["game"] for task in same} == {task.data["game"] for task in train}
    assert {table(task) for task in train}.isdisjoint({table(task) for task in same})
    by_id = {task.id: table(task) for task in [*train, *other, *same]}
    assert all(by_id[task.id] == table(task) for task in [*train, *other, *same]), "one id, one table"


def test_roles_and_beginners_alternate_in_every_game() -> None:
    splits: list[tuple[Negotiate, Split]] = [
        (Negotiate(), "train"),
        (Negotiate(), "test"),
        (Negotiate(held_out="payoffs"), "test"),
        (Negotiate(games="rental,hotel,merger"), "test"),
    ]
    for world, split in splits:
        tasks = world.tasks(split, 200, 5)
        for game in {task.data["game"] for task in tasks}:
            seats = Counter((task.data["seat"], task.data["first"]) for task in tasks if task.data["game"] == game)
            assert len(seats) == 4, game
            assert max(seats.values()) - min(seats.values()) <= 1, game


def test_the_world_keeps_the_rules_at_every_difficulty() -> None:
    for world in (
        Negotiate(),
        Negotiate(num_issues=4, num_options=4, opponent="tough", partial="overlap"),
        Negotiate(num_issues=1, num_options=2, max_turns=1, games="loan,merger", opponent="conceder"),
    ):
        report = check_env(world, num_tasks=2, deadline_s=120)
        assert report.is_ok, report


def test_options_that_cannot_work_are_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"games": "rentel"}, "did you mean 'rental'"),
        ({"games": "hotel"}, "out of domain"),
        ({"num_issues": 5}, "1 to 4"),
        ({"opponent": ""}, "opponent is empty"),
    ]
    for options, words in refused:
        with pytest.raises(ConfigError, match=words):
            Negotiate(**options)
    with pytest.raises(ConfigError, match="held_out=payoffs"):
        Negotiate(games="rental").tasks("test", 1, 0)
    with pytest.raises(ConfigError, match="nobody has loaded it"):
        Negotiate(opponent="smollm2").make_env(Negotiate().tasks("train", 1, 0)[0], 0)


class Talker:
    """An opponent that is no script: it says what it is told to, or fails."""

    name, is_scripted = "talker", False

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.seeds: list[int] = []

    async def reply(self, game: Game, dialogue: Sequence[Message], seed: int) -> str:  # noqa: ARG002 - it does not look
        self.seeds.append(seed)
        assert dialogue[0].role == "system"
        assert dialogue[-1].role == "user"
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer == "sleep":
            await asyncio.sleep(30)
        return self.answer  # pyright: ignore[reportReturnType]


async def test_an_opponent_that_fails_is_to_blame_and_one_that_talks_is_labelled() -> None:
    for answer, detail in ((OSError("gone"), "gone"), (17, "expected text"), ("sleep", "no answer within 0.05 s")):
        env = SeatedEnv(make_game(first=1), 0, Talker(answer), 0, deadline_s=0.05)
        with pytest.raises(AttemptFailed, match=detail) as caught:
            await env.start()
        assert caught.value.party is Party.OPPONENT
    env = SeatedEnv(make_game(), 0, talker := Talker("Offer: rent=900"), 7)
    await env.start()
    twin = env.fork()
    step = await env.step(assistant("Hello."))
    twin.reseed(8)
    await twin.step(assistant("Hello."))
    assert step.labels == {"opponent": "talker", "opponent_said": '["Offer: rent=900"]'}
    assert talker.seeds[0] != talker.seeds[1], "a branch draws its own luck"
    assert env.state_key() == twin.state_key()
    end = await env.step(assistant("Accept"))
    assert end.terminated
    own, other = env.game.outcome(0).reward, env.game.outcome(1).reward
    assert end.labels["result"] == ("won" if own > other else "lost")
