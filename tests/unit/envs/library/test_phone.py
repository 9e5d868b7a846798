"""The world `phone`: its screens, its goals, and what counts as done."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from cases import for_each
from turnwise.envs.base import EnvStep, Task, assistant
from turnwise.envs.check import check_env
from turnwise.envs.library.phone import Phone, PhoneEnv
from turnwise.envs.library.phone_goals import GOAL_KINDS, Goal, draw_phone
from turnwise.envs.scripted import ScriptedPlayer, play_script
from turnwise.errors import ConfigError
from turnwise.runtime.blocking import run_to_end


def task_of(*goals: Goal, seed: int = 0, num_contacts: int = 12) -> Task:
    phone = draw_phone(random.Random(seed), num_contacts, 4)
    return Task(id="phone-own", data={"phone": phone.to_json(), "goals": [goal.to_json() for goal in goals]})


async def play(env: PhoneEnv, replies: Sequence[str]) -> list[EnvStep]:
    await env.start()
    return [await env.step(assistant(reply)) for reply in replies]


def played(world: Phone, task: Task, player: ScriptedPlayer) -> EnvStep:
    """The last step of an attempt."""

    async def go() -> EnvStep:
        env = world.make_env(task, 0)
        dialogue = list(await env.start())
        while True:
            dialogue.append(assistant(player(dialogue)))
            step = await env.step(dialogue[-1])
            if step.is_over:
                return step
            dialogue += step.messages

    return run_to_end(go())


@for_each("actions", [2, 3, 7, 25, 120])
def test_the_dial_is_the_number_of_actions_that_the_expert_needs(actions: int) -> None:
    world = Phone(actions=actions)
    for task in world.tasks("test", 5, seed=1):
        last = played(world, task, world.expert(task, 0))
        assert last.is_success
        assert last.info["actions"] == actions


@for_each("kind", GOAL_KINDS)
def test_every_kind_of_goal_can_be_reached_and_is_missed_by_doing_nothing(kind: str) -> None:
    lengths = {"open": 2, "switch": 3, "choose": 4, "send": 5, "tell_number": 8, "tell_note": 8, "ask": 3}
    world = Phone(actions=lengths.get(kind, 6 if kind in ("add_contact", "write_note") else 4), goals=[kind])
    for task in world.tasks("train", 3, seed=0):
        assert [goal["kind"] for goal in task.data["goals"]] == [kind]
        assert played(world, task, world.expert(task, 0)).is_success
        assert not played(world, task, lambda _: "done").is_success


async def test_rewards_are_paid_for_goals_and_taken_back_and_add_up() -> None:
    task = task_of(Goal(kind="switch", name="Wi-Fi", text="on"), Goal(kind="switch", name="Alarm", text="on"))
    task.data["phone"]["switches"].update({"Wi-Fi": False, "Alarm": False})
    steps = await play(Phone().make_env(task, 0), ["click 1", "click 5", "click 5", "click 5", "click 10", "done"])
    assert [sum(step.reward_parts.values()) for step in steps] == [0.0, 0.25, -0.25, 0.25, 0.25, 0.5]
    assert steps[-1].is_success


async def test_a_goal_that_was_reached_with_damage_beside_it_is_no_success() -> None:
    task = task_of(Goal(kind="switch", name="Wi-Fi", text="on"))
    task.data["phone"]["switches"]["Wi-Fi"] = False
    steps = await play(Phone().make_env(task, 0), ["click 1", "click 5", "click 6", "done"])
    assert not steps[-1].is_success
    assert steps[-1].info["goals_share"] == 1.0
    assert sum(sum(step.reward_parts.values()) for step in steps) == 0.5


async def test_what_was_typed_and_not_sent_is_lost_when_the_screen_is_left() -> None:
    task = task_of(Goal(kind="send", name="Nobody", text="hello"), num_contacts=4)
    first, *_ = task.data["phone"]["contacts"]
    env = Phone().make_env(task, 0)
    steps = await play(env, ["click 3", "click 5", "type 9 hello", "back", "click 5"])
    assert steps[2].messages[0].content.startswith(first)
    assert '[9] textbox "Message" = "hello"' in steps[2].messages[0].content
    assert '[9] textbox "Message" = ""' in steps[4].messages[0].content


@for_each(
    ("reply", "answer"),
    [
        ("click 99", "There is no element 99 on this screen."),
        ("type 1 hello", "Settings is a button; type works on a textbox."),
        ("select 1 Bell", "Element 1 is a button; select works on a combobox."),
        ("scroll down", "There is nothing more there."),
        ("press Escape", "This phone has the keys Home and Enter."),
    ],
)
def test_what_the_phone_cannot_do_it_says_and_shows_the_screen(reply: str, answer: str) -> None:
    env = Phone().make_env(task_of(Goal(kind="open", name="Notes")), 0)
    (step,) = run_to_end(play(env, [reply]))
    assert step.messages[0].content.startswith(f"{answer}\n\nHome\n[1] button")
    assert not step.is_unparsable


async def test_a_reply_without_an_action_is_flagged() -> None:
    env = Phone().make_env(task_of(Goal(kind="open", name="Notes")), 0)
    (step,) = await play(env, ["I would like to open the notes"])
    assert step.is_unparsable


def test_a_fork_in_the_middle_of_a_long_task_goes_its_own_way() -> None:
    world = Phone(actions=60)
    (task,) = world.tasks("train", 1, seed=3)
    replies = [m.content for m in world.demonstrations(1, seed=3)[0] if m.role == "assistant"]

    async def go() -> tuple[list[Any], list[Any]]:
        env = world.make_env(task, 0)
        await play(env, replies[:30])
        fork = env.fork()
        for _ in range(5):
            await fork.step(assistant("click 1"))
        again = env.fork()
        assert again.state_key() == env.state_key() != fork.state_key()
        return [await env.step(assistant(r)) for r in replies[30:]], [
            await again.step(assistant(r)) for r in replies[30:]
        ]

    ours, theirs = run_to_end(go())
    assert ours == theirs
    assert ours[-1].is_success


def test_random_play_does_not_solve_it() -> None:
    world = Phone(actions=6)
    tasks = world.tasks("test", 60, seed=0)
    assert sum(bool(played(world, task, world.random_player(task, 0)).is_success) for task in tasks) <= 1


def test_it_keeps_the_rules_with_tools_and_with_long_tasks() -> None:
    for world in (Phone(protocol="tool_call", partial_credit=0.0), Phone(actions=20)):
        report = check_env(world, num_tasks=1, deadline_s=120)
        assert report.is_ok, report


def test_a_demonstration_with_slips_still_matches_what_the_env_says() -> None:
    world = Phone(actions=6, demonstration_skill=0.5)
    for task, dialogue in zip(world.tasks("train", 8, 0), world.demonstrations(8, 0), strict=True):
        replies = iter([message.content for message in dialogue if message.role == "assistant"])
        again = run_to_end(play_script(world.make_env(task, 0), lambda _, said=replies: next(said), world.max_turns))
        assert again == dialogue


@for_each("options", [{"actions": 1}, {"actions": 201}, {"goals": ["fly"]}, {"goals": []}, {"partial_credit": 2.0}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Phone(**options)


def test_a_length_that_the_goals_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="no task of 100 actions"):
        Phone(actions=100, goals=["switch"]).tasks("train", 1, 0)
