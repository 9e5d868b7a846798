from __future__ import annotations

from typing import Any

import pytest

from attempts import play_replies, said
from turnwise.envs.base import Task, system, user
from turnwise.envs.library.key_door import KeyDoor, KeyDoorEnv
from turnwise.errors import ConfigError

ROOMS = [{"door": "red", "keys": ["blue", "red"]}, {"door": "blue", "keys": ["blue", "green"]}]


def make_env() -> KeyDoorEnv:
    return KeyDoor(num_rooms=2, num_keys=2).make_env(Task(id="t", data={"rooms": ROOMS}), seed=0)


async def test_the_dialogue_of_the_docstring() -> None:
    env = make_env()
    assert await env.start() == [
        system("Get out. Each turn say one thing: take and a colour, or open."),
        user("Room 1 of 2. Keys: blue, red. The door is red."),
    ]
    steps = await play_replies(env, "take red", "open", "open", "take blue", "open")
    assert said(steps) == [
        "You hold the red key.",
        "Room 2 of 2. Keys: blue, green. The door is blue.",
        "It is locked.",
        "You hold the blue key.",
    ]
    assert [step.reward_parts.get("shaping", 0.0) for step in steps] == [0.25, 0, 0, 0.25, 0]
    assert [step.reward_parts["outcome"] for step in steps] == [0, 0.25, 0, 0, 0.25]
    assert (steps[-1].terminated, steps[-1].is_success) == (True, True)


async def test_rewards_are_paid_once() -> None:
    steps = await play_replies(make_env(), "take red", "take blue", "take red", "take red")
    assert [sum(step.reward_parts.values()) for step in steps] == [0.25, 0, 0, 0]


async def test_a_key_fits_one_door_and_is_left_behind_it() -> None:
    steps = await play_replies(make_env(), "take blue", "open", "take red", "open", "open")
    assert said(steps)[1] == "The blue key does not fit."
    assert said(steps)[4] == "It is locked."


async def test_only_the_keys_of_the_room_can_be_taken() -> None:
    (step,) = await play_replies(make_env(), "take green")
    assert said([step]) == ["There is no green key."]
    assert not step.is_unparsable


async def test_turns_run_out() -> None:
    steps = await play_replies(make_env(), *["open"] * 7)
    assert [step.is_over for step in steps] == [False] * 6 + [True]
    assert steps[-1].is_success is False


@pytest.mark.parametrize("text", ["take red", "Take the RED key.", "I take red", "  take red\n"])
async def test_actions_are_read_in_whatever_words(text: str) -> None:
    (step,) = await play_replies(make_env(), text)
    assert said([step]) == ["You hold the red key."]


@pytest.mark.parametrize("text", ["", "red", "take", "take red and open", "take red take blue", "take pink", "opened"])
async def test_no_action_or_two_are_unparsable(text: str) -> None:
    (step,) = await play_replies(make_env(), text)
    assert step.is_unparsable
    assert said([step]) == ["Say take and a colour, or open."]


@pytest.mark.parametrize("num_rooms", [1, 2, 5])
async def test_demonstrations_earn_exactly_one_point(num_rooms: int) -> None:
    world = KeyDoor(num_rooms=num_rooms)
    tasks, dialogues = world.tasks("train", 5, 0), world.demonstrations(5, 0)
    for task, dialogue in zip(tasks, dialogues, strict=True):
        replies = [message.content for message in dialogue if message.role == "assistant"]
        assert len(replies) == 2 * num_rooms
        steps = await play_replies(world.make_env(task, 0), *replies)
        assert sum(sum(step.reward_parts.values()) for step in steps) == pytest.approx(1.0)
        assert steps[-1].is_success


async def test_the_exit_alone_can_pay() -> None:
    world = KeyDoor(num_rooms=3, pays="exit")
    (task,), (dialogue,) = world.tasks("train", 1, 0), world.demonstrations(1, 0)
    steps = await play_replies(world.make_env(task, 0), *[one.content for one in dialogue if one.role == "assistant"])
    assert [sum(step.reward_parts.values()) for step in steps] == [0] * 5 + [1]


async def test_without_second_chances_a_wrong_key_costs_its_room_and_nothing_else() -> None:
    world = KeyDoor(num_rooms=3, num_keys=2, spare_turns=0, second_chances=False)
    (task,) = world.tasks("train", 1, 0)
    rooms = task.data["rooms"]
    right = [room["door"] for room in rooms]
    wrong = [next(key for key in room["keys"] if key != room["door"]) for room in rooms]
    steps = await play_replies(world.make_env(task, 0), *[f"take {wrong[0]}", "open", f"take {right[1]}", "open"])
    assert said(steps)[1].startswith(f"The {wrong[0]} key does not fit. You take the window. Room 2 of 3.")
    assert [sum(step.reward_parts.values()) for step in steps] == pytest.approx([0, 0, 1 / 6, 1 / 6])
    for first, is_success in ((right[0], True), (wrong[0], False)):
        replies = [reply for key in (first, *right[1:]) for reply in (f"take {key}", "open")]
        steps = await play_replies(world.make_env(task, 0), *replies)
        assert steps[-1].terminated
        assert steps[-1].is_success is is_success
        assert sum(sum(step.reward_parts.values()) for step in steps) == pytest.approx(1.0 if is_success else 2 / 3)
    with pytest.raises(ConfigError, match="pays=exit is for doors that must be opened"):
        KeyDoor(pays="exit", second_chances=False)


async def test_a_demonstration_without_skill_takes_wrong_keys_and_goes_on() -> None:
    worlds = {skill: KeyDoor(num_rooms=4, spare_turns=20, demonstration_skill=skill) for skill in (0.0, 0.7, 1.0)}
    lengths: dict[float, float] = {}
    for skill, world in worlds.items():
        dialogues = world.demonstrations(40, 0)
        replies = [[one.content for one in dialogue if one.role == "assistant"] for dialogue in dialogues]
        lengths[skill] = sum(map(len, replies)) / len(replies)
        assert any("does not fit" in one.content for dialogue in dialogues for one in dialogue) == (skill < 1)
        for task, said_in in zip(world.tasks("train", 40, 0), replies, strict=True):
            steps = await play_replies(world.make_env(task, 0), *said_in)
            assert len(said_in) == world.max_turns or steps[-1].is_success
    assert lengths[0.0] > lengths[0.7] > lengths[1.0] == 8


async def test_states_that_look_alike_but_are_not_have_different_keys() -> None:
    empty_handed, holding = make_env(), make_env()
    await play_replies(empty_handed, "open")
    await play_replies(holding, "take blue")
    assert empty_handed.state_key() != holding.state_key()
    paid, unpaid = make_env(), make_env()
    await play_replies(paid, "take red", "take blue")
    await play_replies(unpaid, "take blue", "take blue")
    assert paid.state_key() != unpaid.state_key()  # the same key in hand, but the red one pays no more


async def test_a_fork_goes_its_own_way() -> None:
    env = make_env()
    await play_replies(env, "take red")
    fork = env.fork()
    assert fork.state_key() == env.state_key()
    await play_replies(fork, "open")
    assert env.state_key() == "room 0 key red paid turn 1"
    assert fork.state_key() == "room 1 key None unpaid turn 2"


@pytest.mark.parametrize("options", [{"num_rooms": 0}, {"num_keys": 1}, {"num_keys": 7}, {"spare_turns": -1}])
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        KeyDoor(**options)


async def test_the_potential_grows_with_the_way_that_is_behind() -> None:
    env = make_env()
    seen = [env.potential()]
    for reply in ("take blue", "take red", "open", "take blue", "open"):
        await play_replies(env, reply)
        seen.append(env.potential())
    assert seen == [0, 0, 0.25, 0.5, 0.75, 1]
