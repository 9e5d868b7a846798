from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from attempts import play_replies, said
from turnwise.envs.base import EnvStep, Task, system, user
from turnwise.envs.check import check_env
from turnwise.envs.library.twenty_questions import THINGS, WORDS, TwentyQuestions
from turnwise.envs.seats import SeatedEnv
from turnwise.errors import ConfigError

TASK = Task(id="t", data={"things": ["ant", "bee", "hat", "sun"], "secret": "bee"})


def make_env(**options: Any) -> SeatedEnv:
    return TwentyQuestions(**options).make_env(TASK, 0)


async def test_the_dialogue_of_the_docstring() -> None:
    env = make_env()
    assert await env.start() == [
        system("Find the thing. Ask about one word, or guess the thing. Words: alive big food hard home red sea wet"),
        user("It is one of: ant, bee, hat, sun. Ask."),
    ]
    steps = await play_replies(env, "alive", "big", "ant", "bee")
    assert said(steps) == ["yes", "no", "no, not the ant"]
    assert [step.reward_parts["outcome"] for step in steps] == [0, 0, 0, 1]
    assert (steps[-1].terminated, steps[-1].is_success) == (True, True)


def test_no_two_things_are_alike_and_no_word_is_a_thing() -> None:
    assert len({frozenset(words.split()) for words in THINGS.values()}) == len(THINGS)
    assert not set(WORDS) & set(THINGS)


async def test_turns_run_out() -> None:
    steps = await play_replies(make_env(max_turns=3), "red", "red", "red")
    assert [step.terminated for step in steps] == [False, False, True]
    assert steps[-1].is_success is False


async def test_an_early_win_is_worth_more_with_a_decay() -> None:
    steps = await play_replies(make_env(turn_decay=0.5), "alive", "bee")
    assert steps[-1].reward_parts == {"outcome": 0.5}


@pytest.mark.parametrize("text", ["alive", "Is it ALIVE?", "alive, is it alive?"])
async def test_questions_are_read_in_whatever_words(text: str) -> None:
    assert said(await play_replies(make_env(), text)) == ["yes"]


@pytest.mark.parametrize("text", ["", "alive big", "ant or bee", "dog", "redder"])
async def test_no_word_or_two_are_unparsable(text: str) -> None:
    (step,) = await play_replies(make_env(), text)
    assert step.is_unparsable
    assert said([step]) == ["Ask about one word, or guess one thing."]


async def test_the_state_is_what_is_left_whatever_led_there() -> None:
    one, other = make_env(), make_env()
    await play_replies(one, "alive", "red")
    await play_replies(other, "red", "alive")
    assert one.state_key() == other.state_key() == "left ant bee turn 2"
    fork = one.fork()
    await play_replies(fork, "home")
    assert (one.state_key(), fork.state_key()) == ("left ant bee turn 2", "left bee turn 3")


@pytest.mark.parametrize(("num_things", "max_turns"), [(6, 6), (12, 7), (23, 8)])
async def test_the_demonstrated_questions_always_find_the_thing(num_things: int, max_turns: int) -> None:
    world = TwentyQuestions(num_things=num_things, max_turns=max_turns)
    for task, dialogue in zip(world.tasks("train", 60, 1), world.demonstrations(60, 1), strict=True):
        assert dialogue[-1].content == task.data["secret"]


async def test_asking_pays_and_guessing_one_thing_after_the_other_does_not() -> None:
    """Otherwise the game can be won without a question, and there is nothing to learn."""
    world = TwentyQuestions(max_turns=4)  # as in the preset
    tasks, demonstrations = world.tasks("train", 200, 1), world.demonstrations(200, 1)
    asked = sum(d[-1].content == t.data["secret"] for t, d in zip(tasks, demonstrations, strict=True))
    guessed = 0
    for task in tasks:
        steps = await play_until_over(world.make_env(task, 0), task.data["things"])
        guessed += steps[-1].is_success is True
    assert asked > 0.95 * len(tasks)
    assert guessed < 0.75 * len(tasks)


async def play_until_over(env: SeatedEnv, replies: Sequence[str]) -> list[EnvStep]:
    steps: list[EnvStep] = []
    for reply in replies:
        if not steps or not steps[-1].is_over:
            steps += await play_replies(env, reply)
    return steps


def test_unskilled_demonstrations_often_fail() -> None:
    world = TwentyQuestions(demonstration_skill=0.0)
    found = [
        dialogue[-1].content == task.data["secret"]
        for task, dialogue in zip(world.tasks("train", 60, 1), world.demonstrations(60, 1), strict=True)
    ]
    assert sum(found) < 40


def test_another_size_keeps_the_rules() -> None:
    report = check_env(TwentyQuestions(num_things=2, max_turns=2), num_tasks=2, deadline_s=120)
    assert report.is_ok, report


@pytest.mark.parametrize(
    "options", [{"num_things": 1}, {"num_things": 99}, {"max_turns": 0}, {"turn_decay": 2}, {"demonstration_skill": -1}]
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        TwentyQuestions(**options)
