from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest

from attempts import play_replies, said
from turnwise.envs.base import Task, system, user
from turnwise.envs.check import check_env
from turnwise.envs.library.bargain import Bargain, BargainGame, Mood, highest_price
from turnwise.envs.seats import ScriptedOpponent, SeatedEnv
from turnwise.errors import ConfigError

GOODS = [
    {"name": "hat", "worth": 3},
    {"name": "key", "worth": 4},
    {"name": "box", "worth": 2},
    {"name": "cup", "worth": 4},
]


def make_env(mood: Mood) -> SeatedEnv:
    opponent = ScriptedOpponent(Bargain(), "limit", Task(id="market"))
    return SeatedEnv(BargainGame(GOODS, mood), 0, opponent, 0)


async def test_the_dialogue_of_the_docstring() -> None:
    env = make_env("glad")
    assert await env.start() == [system("Sell each thing. Say one price from 1 to 9."), user("The hat is worth 3.")]
    steps = await play_replies(env, "5", "8", "6", "8")
    assert said(steps) == [
        "I am glad. I take it. The key is worth 4.",
        "I am glad. I take it. The box is worth 2.",
        "I am glad. No deal. The cup is worth 4.",
    ]
    assert [step.reward_parts["outcome"] for step in steps] == pytest.approx([0, 0, 0, 21 / 26])
    assert (steps[-1].terminated, steps[-1].is_success) == (True, True)


async def test_what_is_a_success_for_the_seller_is_none_for_the_buyer() -> None:
    for prices, is_sold_well in ((("5", "8", "4", "8"), True), (("9", "9", "9", "9"), False)):
        env = make_env("glad")
        await env.start()
        await play_replies(env, *prices)
        seller, buyer = env.game.outcome(0), env.game.outcome(1)
        assert (seller.is_success, buyer.is_success) == (is_sold_well, not is_sold_well)
        assert seller.reward + buyer.reward == pytest.approx(1)


async def test_the_mood_moves_the_payoff_more_than_any_price_does() -> None:
    best: dict[Mood, float] = {}
    for mood in ("glad", "sad"):
        prices = [str(highest_price(good["worth"], mood)) for good in GOODS]  # type: ignore[arg-type]
        steps = await play_replies(make_env(mood), *prices)
        best[mood] = steps[-1].reward_parts["outcome"]
        assert steps[-1].is_success
    assert best["glad"] == 1.0
    assert best["glad"] - best["sad"] > 0.6


def test_the_mood_comes_with_the_seed_and_not_with_the_task() -> None:
    world = Bargain()
    (task,) = world.tasks("train", 1, 0)
    moods = ["glad" in world.make_env(task, seed).state_key() for seed in range(400)]
    assert 0.4 < fmean(moods) < 0.6
    assert world.make_env(task, 5).state_key() == world.make_env(task, 5).state_key()


async def test_prices_given_the_mood_pay_more_than_any_fixed_rule() -> None:
    """What there is to learn: the same price for everybody earns clearly less."""
    world = Bargain()
    tasks = world.tasks("train", 150, 0)

    async def payoff(price: Any) -> float:
        total = 0.0
        for number, task in enumerate(tasks):
            env = world.make_env(task, number)
            mood: Mood | None = None
            for turn, good in enumerate(task.data["goods"]):
                (step,) = await play_replies(env, str(price(good["worth"], mood)))
                if turn == 0:
                    mood = "glad" if "I am glad" in said([step])[0] else "sad"
            total += step.reward_parts["outcome"]
        return total / len(tasks)

    informed = await payoff(lambda worth, mood: highest_price(worth, mood or "glad"))
    fixed = [await payoff(lambda _worth, _mood, price=price: price) for price in range(1, 10)]
    assert informed > max(fixed) + 0.1


@pytest.mark.parametrize("text", ["", "0", "10", "3 or 4", "much"])
async def test_a_reply_without_one_price_sells_nothing(text: str) -> None:
    (step,) = await play_replies(make_env("glad"), text)
    assert step.is_unparsable
    assert "No deal." in said([step])[0]


async def test_a_fork_in_the_middle_keeps_the_mood_and_goes_its_own_way() -> None:
    env = make_env("sad")
    await play_replies(env, "2")
    fork = env.fork()
    assert fork.state_key() == env.state_key() == "turn 1 sad earned 2+0"
    await play_replies(fork, "3")
    assert (env.state_key(), fork.state_key()) == ("turn 1 sad earned 2+0", "turn 2 sad earned 2+3")


def test_demonstrations_meet_both_moods() -> None:
    firsts = [dialogue[3].content for dialogue in Bargain().demonstrations(30, 0)]
    assert 5 < sum("I am glad" in first for first in firsts) < 25


@pytest.mark.parametrize("options", [{"num_goods": 2}, {"num_goods": 5, "glad_share": 0.2}])
def test_other_sizes_keep_the_rules(options: dict[str, Any]) -> None:
    report = check_env(Bargain(**options), num_tasks=2, deadline_s=120)
    assert report.is_ok, report


@pytest.mark.parametrize(
    "options", [{"num_goods": 1}, {"num_goods": 9}, {"glad_share": 2}, {"demonstration_skill": -1}]
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Bargain(**options)


async def test_the_mood_can_come_with_the_first_price_so_that_it_differs_inside_a_group() -> None:
    world = Bargain(mood_from="price")
    tasks = world.tasks("train", 60, 0)
    glad: list[list[bool]] = []
    for task in tasks:
        moods: list[bool] = []
        for price in range(1, 10):
            for _ in range(2):
                env = world.make_env(task, 7)
                assert "None" in env.state_key(), "before the first price there is none"
                (step,) = await play_replies(env, str(price))
                moods.append(step.messages[0].content.startswith("I am glad."))
            assert moods[-1] == moods[-2], "the same start and the same price, the same mood"
        glad.append(moods[::2])
    by_price = [fmean(column) for column in zip(*glad, strict=True)]
    assert all(0.2 < share < 0.8 for share in by_price), "no price is a lucky one"
    assert sum(len(set(row)) == 2 for row in glad) > 55, "attempts at one task meet both"


def test_a_mood_from_elsewhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="mood_from='moon'; expected seed or price"):
        Bargain(mood_from="moon")  # type: ignore[arg-type]
