from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from turnwise.envs.base import EnvStep, Task, assistant, system, user
from turnwise.envs.library.guess_number import NUM_PHRASINGS, GuessNumber, GuessNumberEnv
from turnwise.errors import ConfigError


def make_env(secret: int, world: GuessNumber | None = None, phrasing: int = 0) -> GuessNumberEnv:
    task = Task(id="t", data={"secret": secret, "phrasing": phrasing})
    return (world or GuessNumber()).make_env(task, seed=0)


async def play(env: GuessNumberEnv, *replies: str) -> list[EnvStep]:
    await env.start()
    return [await env.step(assistant(reply)) for reply in replies]


async def test_the_dialogue_of_the_docstring() -> None:
    env = make_env(10)
    assert await env.start() == [
        system("Find the number. Say one number and nothing more. You have 5 tries."),
        user("I am thinking of a number from 1 to 16. What is it?"),
    ]
    first, second = [await env.step(assistant(reply)) for reply in ("8", "12")]
    assert first.messages == [user("Higher than 8.")]
    assert second.messages == [user("Lower than 12.")]
    last = await env.step(assistant("10"))
    assert (last.reward, last.terminated, last.is_success) == (1.0, True, True)


async def test_five_wrong_guesses_lose() -> None:
    steps = await play(make_env(16), "1", "2", "3", "4", "5")
    assert [step.is_over for step in steps] == [False] * 4 + [True]
    assert (steps[-1].reward, steps[-1].terminated, steps[-1].is_success) == (0.0, True, False)


@pytest.mark.parametrize("text", ["7", " 7 ", "My guess is 7.", "7!", "07", "7, yes 7"])
async def test_one_number_in_whatever_words_is_a_guess(text: str) -> None:
    (step,) = await play(make_env(7), text)
    assert step.is_success


@pytest.mark.parametrize("text", ["", "seven", "7 or 8", "1 2 3 4 5 6 7", "0", "17", "-7", "7.5", "9" * 5000])
async def test_anything_else_is_flagged_and_uses_up_a_try(text: str) -> None:
    steps = await play(make_env(7), *[text] * 5)
    assert all(step.is_unparsable for step in steps)
    assert steps[0].messages == [user("Say one number from 1 to 16.")]
    assert steps[-1].is_success is False


async def test_a_late_win_is_worth_less_with_decay() -> None:
    steps = await play(make_env(3, GuessNumber(turn_decay=0.5)), "1", "2", "3")
    assert [step.reward for step in steps] == [0.0, 0.0, 0.25]


def test_splits_share_no_task_and_every_secret_and_phrasing_is_in_both() -> None:
    world = GuessNumber()
    train, test = world.tasks("train", 192, 0), world.tasks("test", 64, 0)
    assert len({task.id for task in train}) == 192
    assert len({task.id for task in test}) == 64
    assert not {task.id for task in train} & {task.id for task in test}
    for tasks, times in ((train, 12), (test, 4)):
        assert Counter(task.data["secret"] for task in tasks) == dict.fromkeys(range(1, 17), times)
        assert Counter(task.data["phrasing"] for task in tasks) == dict.fromkeys(range(NUM_PHRASINGS), times)


async def test_held_out_phrasings_are_first_messages_that_training_never_sees() -> None:
    world = GuessNumber(holdout="phrasing")

    async def first_messages(tasks: list[Task]) -> set[str]:
        return {(await world.make_env(task, 0).start())[1].content for task in tasks}

    train, test = world.tasks("train", 192, 0), world.tasks("test", 64, 0)
    assert not await first_messages(train) & await first_messages(test)
    assert {task.data["secret"] for task in train} == {task.data["secret"] for task in test} == set(range(1, 17))


def test_tasks_come_from_the_seed() -> None:
    world = GuessNumber()
    assert world.tasks("train", 10, 1) == world.tasks("train", 10, 1)
    assert world.tasks("train", 10, 1) != world.tasks("train", 10, 2)


def test_more_tasks_than_there_are_come_round_again() -> None:
    tasks = GuessNumber(low=1, high=2).tasks("test", 100, 0)
    assert len(tasks) == 100
    assert len({task.id for task in tasks}) == 8


def test_demonstrations_halve_the_range_and_always_win() -> None:
    dialogues = GuessNumber().demonstrations(192, 0)
    assert len(dialogues) == 192
    assert {dialogue[2].content for dialogue in dialogues} == {"8"}
    assert max(sum(message.role == "assistant" for message in dialogue) for dialogue in dialogues) <= 5


def test_demonstrations_without_skill_show_the_form_and_win_by_chance() -> None:
    world = GuessNumber(demonstration_skill=0.0)
    dialogues = world.demonstrations(192, 0)
    guesses = [message.content for dialogue in dialogues for message in dialogue if message.role == "assistant"]
    assert set(guesses) == {str(number) for number in range(1, 17)}
    secrets = [str(task.data["secret"]) for task in world.tasks("train", 192, 0)]
    wins = sum(dialogue[-1].content == secret for dialogue, secret in zip(dialogues, secrets, strict=True))
    assert 0.15 < wins / 192 < 0.4  # five guesses anywhere in 16: 1 - (15/16)**5 = 0.28


async def test_state_is_what_is_left_and_how_many_tries_are_gone() -> None:
    env = make_env(10)
    assert env.state_key() == "1..16 turn 0"
    await play(env, "8", "12")
    assert env.state_key() == "9..11 turn 2"
    other = make_env(10)
    await play(other, "12", "8")
    assert other.state_key() == env.state_key()


async def test_a_fork_goes_its_own_way() -> None:
    env = make_env(10)
    await play(env, "8")
    fork = env.fork()
    assert fork.state_key() == env.state_key()
    assert (await fork.step(assistant("10"))).is_success
    assert env.state_key() == "9..16 turn 1"
    assert (await env.step(assistant("12"))).messages == [user("Lower than 12.")]


@pytest.mark.parametrize(
    "options",
    [{"low": 3, "high": 3}, {"max_turns": 0}, {"turn_decay": 1.5}, {"demonstration_skill": -0.1}],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        GuessNumber(**options)
