"""Several worlds as one: who plays which task, what is shown, and what stays held out."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.envs.base import Task, World
from turnwise.envs.joint import JointWorld, labels_of, leaf_of, leaves, level_name, wrap_leaves
from turnwise.envs.registry import get_world
from turnwise.envs.rewarded import RewardedWorld
from turnwise.errors import DataError


def _mix(**parts: World) -> JointWorld:
    return JointWorld(name="mix", kind="world", parts=parts, sources={name: part.name for name, part in parts.items()})


def _levels() -> JointWorld:
    parts = {level_name(rooms - 1): get_world("key_door", num_rooms=rooms) for rooms in (1, 2)}
    return JointWorld(name="key_door", kind="level", parts=parts, sources=dict.fromkeys(parts, "key_door"))


MIX = _mix(guess=get_world("guess_number"), doors=_levels())


def test_the_id_of_a_task_says_who_plays_it() -> None:
    for task in MIX.tasks("train", 8, 0):
        name, own = MIX.own_task(task)
        assert task.id == f"{name}/{own.id}"
        first = asyncio.run(MIX.make_env(task, 0).start())
        assert first == asyncio.run(MIX.parts[name].make_env(own, 0).start())
    assert leaf_of(MIX, "doors/level1/rooms-x") == "doors/level1"
    assert leaf_of(get_world("key_door"), "rooms-x") == ""


def test_labels_name_the_world_and_the_level() -> None:
    assert labels_of(MIX, "guess/a") == {"world": "guess"}
    assert labels_of(MIX, "doors/level1/a") == {"world": "doors", "level": "1"}
    assert labels_of(_levels(), "level0/a") == {"level": "0"}
    assert labels_of(get_world("key_door"), "level0/a") == {}


def test_a_task_of_nobody_is_refused() -> None:
    with pytest.raises(DataError, match=r"task other/a belongs to none of guess, doors"):
        MIX.own_task(Task(id="other/a"))


def test_limits_are_those_of_each_world_and_the_most_of_all() -> None:
    own = {name: leaf.max_turns for name, leaf in leaves(MIX).items()}
    assert own == {"guess": 5, "doors/level0": 5, "doors/level1": 7}
    assert MIX.max_turns == 7
    assert MIX.max_tokens == max(leaf.max_tokens for leaf in leaves(MIX).values())


def test_tasks_and_demonstrations_come_from_every_world_in_the_same_order() -> None:
    tasks, shown = MIX.tasks("train", 9, 3), MIX.demonstrations(9, 3)
    assert [leaf_of(MIX, task.id) for task in tasks] == ["guess"] * 5 + ["doors/level0"] * 2 + ["doors/level1"] * 2
    for task, dialogue in zip(tasks, shown, strict=True):
        start = asyncio.run(MIX.make_env(task, 0).start())
        assert list(dialogue[: len(start)]) == list(start)


def test_a_task_that_one_world_holds_out_is_neither_trained_on_nor_shown_by_another() -> None:
    world = _mix(easy=get_world("key_door", num_rooms=1), hard=get_world("key_door", num_rooms=1, spare_turns=0))
    held_out = [world.joint_task("easy", task) for task in world.parts["hard"].tasks("train", 4, 0)]
    apart = world.kept_apart(held_out)
    secret = {task.data["rooms"][0]["door"] + str(task.data["rooms"][0]["keys"]) for task in held_out}

    def seen(split_tasks: object) -> set[str]:
        return {task.data["rooms"][0]["door"] + str(task.data["rooms"][0]["keys"]) for task in split_tasks}  # type: ignore[attr-defined]

    assert secret & seen(world.tasks("train", 40, 0))
    assert not secret & seen(apart.tasks("train", 40, 0))
    assert len(apart.demonstrations(40, 0)) == len(apart.tasks("train", 40, 0)) < 40


def test_tasks_of_different_worlds_are_never_taken_for_the_same() -> None:
    world = _mix(a=get_world("key_door"), b=get_world("guess_number"))
    task = Task(id="1", data={"x": 1})
    apart = world.kept_apart([world.joint_task("a", task)])
    assert apart.is_apart(world.joint_task("a", task))
    assert not apart.is_apart(world.joint_task("b", task))


def test_a_wrapper_goes_around_every_world_that_plays() -> None:
    wrapped = wrap_leaves(MIX, lambda inner: RewardedWorld(inner, lambda *_: 0.5))
    assert all(isinstance(leaf, RewardedWorld) for leaf in leaves(wrapped).values())
    assert list(leaves(wrapped)) == list(leaves(MIX))
