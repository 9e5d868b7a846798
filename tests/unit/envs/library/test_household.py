from __future__ import annotations

from typing import Any

import pytest

from cases import for_each
from turnwise.envs.base import EnvStep, Task, assistant, system, user
from turnwise.envs.library.household import Household, HouseholdEnv
from turnwise.envs.library.household_house import LEVELS, shortest_play
from turnwise.errors import ConfigError
from turnwise.runtime.blocking import run_to_end

HOUSE: dict[str, Any] = {
    "doors": {"hall": ["kitchen", "attic"], "kitchen": ["hall", "attic"], "attic": ["hall", "kitchen"]},
    "places": {"cup": "kitchen", "book": "kitchen"},
    "chores": [["cup", "attic"], ["book", "hall"]],
}
PLAY = ("go kitchen", "take cup", "go attic", "put cup", "go kitchen", "take book", "go hall", "put book")


def make_env(**options: Any) -> HouseholdEnv:
    return Household(**{"level": 2, "patience": 2.0, **options}).make_env(Task(id="t", data=HOUSE), seed=0)


def play(env: HouseholdEnv, *replies: str) -> list[EnvStep]:
    async def steps() -> list[EnvStep]:
        return [await env.step(assistant(reply)) for reply in replies]

    return run_to_end(steps())


def said(steps: list[EnvStep]) -> list[str]:
    return [message.content for step in steps for message in step.messages]


def test_the_dialogue_of_the_docstring() -> None:
    env = make_env()
    assert run_to_end(env.start()) == [
        system("Do the chores. Say go and a room, take and a thing, or put and a thing."),
        user(
            "Chore 1 of 2: bring the cup from the kitchen to the attic. You are in the hall: nothing. Doors: kitchen, "
            "attic."
        ),
    ]
    steps = play(env, *PLAY)
    assert said(steps) == [
        "kitchen: cup, book. Doors: hall, attic.",
        "You have the cup.",
        "attic: nothing. Doors: hall, kitchen.",
        "Done. Chore 2 of 2: bring the book from the kitchen to the hall.",
        "kitchen: book. Doors: hall, attic.",
        "You have the book.",
        "hall: nothing. Doors: kitchen, attic.",
    ]
    assert [step.reward_parts.get("outcome", 0.0) for step in steps] == [0, 0, 0, 0.5, 0, 0, 0, 0.5]
    assert (steps[-1].is_success, len(PLAY)) == (True, shortest_play(HOUSE))


def test_with_pays_end_only_the_last_chore_pays() -> None:
    assert [step.reward_parts.get("outcome", 0.0) for step in play(make_env(pays="end"), *PLAY)] == [0.0] * 7 + [1.0]


@for_each(
    ("reply", "told"),
    [
        ("go cellar", "There is no door to the cellar."),
        ("take cup", "There is no cup here."),
        ("put cup", "You do not carry the cup."),
    ],
)
def test_what_cannot_be_done_is_told_counted_and_changes_nothing(reply: str, told: str) -> None:
    env = make_env(patience=1.0)
    before = env.state_key()
    (step,) = play(env, reply)
    assert (said([step]), step.is_unparsable) == ([told], False)
    assert env.state_key().partition(" turn ")[0] == before.partition(" turn ")[0]
    assert play(env, *[reply] * 7)[-1].info["refused"] == 8


def test_a_second_thing_is_refused_and_a_thing_put_elsewhere_is_no_chore() -> None:
    env = make_env()
    steps = play(env, "go kitchen", "take cup", "take book", "put cup")
    assert said(steps)[2:] == ["You carry the cup.", "You put the cup down."]
    assert env.potential() == 0


@for_each("reply", ["", "hello", "go kitchen, then go attic", "go"])
def test_a_reply_without_exactly_one_action_is_unparsable(reply: str) -> None:
    (step,) = play(make_env(), reply)
    assert step.is_unparsable


def test_attempts_end_when_patience_does() -> None:
    steps = play(make_env(patience=1.0), *["go kitchen", "go hall"] * 4)
    assert [step.terminated for step in steps] == [False] * 7 + [True]
    assert steps[-1].is_success is False


def test_from_level_7_on_a_chore_does_not_say_where_its_thing_lies() -> None:
    text = run_to_end(make_env(level=7).start())[1].content
    assert text.startswith("Chore 1 of 2: bring the cup to the attic.")


@for_each("level", range(len(LEVELS)))
def test_the_script_does_every_chore_of_held_out_houses(level: int) -> None:
    world = Household(level=level)
    (dialogue,) = world.demonstrations(1, seed=level)
    assert dialogue[-1].role == "assistant"
    replies = [message.content for message in dialogue if message.role == "assistant"]
    assert 3 <= len(replies) <= world.max_turns
    (task,) = world.tasks("train", 1, seed=level)
    steps = play(world.make_env(task, seed=0), *replies)
    assert steps[-1].is_success
    assert steps[-1].info["chores"] == LEVELS[level].chores


def test_a_fork_goes_its_own_way() -> None:
    env = make_env()
    play(env, *PLAY[:2])
    twin = env.fork()
    play(twin, *PLAY[2:4])
    assert (env.potential(), twin.potential()) == (0.25, 0.5)
    assert said(play(env, "put cup")) == ["You put the cup down."], "the cup of the first one is still in its hand"


def test_a_summary_keeps_the_chore_what_is_carried_and_where_things_lie() -> None:
    env = make_env()
    dialogue = [*run_to_end(env.start())]
    for reply in PLAY[:2]:
        dialogue += [assistant(reply), *play(env, reply)[0].messages]
    assert Household().summary(dialogue, 48) == "cup from kitchen to attic. Have it. book kitchen"


@for_each("options", [{"level": 11}, {"rooms": 13}, {"chores": -1}, {"patience": 0.5}, {"demonstration_skill": 2.0}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        Household(**options)
