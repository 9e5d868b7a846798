from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from cases import for_each
from turnwise.config.files import load_config
from turnwise.envs.agents import AgentWorld
from turnwise.envs.base import Task, World, assistant
from turnwise.envs.difficulty import levels_of
from turnwise.envs.listed import ListedTask, list_world, write_tasks
from turnwise.envs.registry import load_target
from turnwise.errors import ConfigError
from turnwise.training.objects import NO_OBJECTS


def _world(*overrides: str) -> World:
    return NO_OBJECTS.make_world(load_config("key_door", list(overrides)).env)


def _write(path: Path, levels: dict[int, int]) -> list[ListedTask]:
    """So many train tasks, and one held-out task, of each level."""
    listed: list[ListedTask] = []
    for level, count in levels.items():
        world = _world(f"env.difficulty={level}")
        listed += [ListedTask(task=task, split="train", difficulty=level) for task in world.tasks("train", count, 0)]
        listed += [ListedTask(task=task, split="test", difficulty=level) for task in world.tasks("test", 1, 0)]
    write_tasks(path, listed)
    return listed


def test_a_world_with_a_file_of_tasks_plays_those_and_no_others(tmp_path: Path) -> None:
    listed = _write(tmp_path / "tasks.jsonl", {0: 3, 3: 2})
    world = _world(f"env.tasks={tmp_path / 'tasks.jsonl'}")
    train = [one.task for one in listed if one.split == "train"]
    assert world.tasks("train", 100, 7) == train
    assert world.tasks("test", 100, 7) == [one.task for one in listed if one.split == "test"]


def test_every_listed_task_is_played_in_the_world_of_its_own_level(tmp_path: Path) -> None:
    """The limit on turns is the world's: two per room, and three to spare."""
    listed = _write(tmp_path / "tasks.jsonl", {0: 1, 5: 1})
    world = _world(f"env.tasks={tmp_path / 'tasks.jsonl'}")
    assert world.max_turns == 2 * 10 + 3

    async def turns_until_lost(task: Task) -> int:
        env = world.make_env(task, 0)
        await env.start()
        for turn in range(1, 100):
            if (await env.step(assistant("open"))).is_over:
                return turn
        return 0

    easy, hard = (next(one.task for one in listed if one.difficulty == level) for level in (0, 5))
    assert asyncio.run(turns_until_lost(easy)) == 2 * 1 + 3
    assert asyncio.run(turns_until_lost(hard)) == 2 * 10 + 3


def test_a_file_that_holds_a_task_in_both_splits_is_refused(tmp_path: Path) -> None:
    task = Task(id="one", data={})
    write_tasks(tmp_path / "t.jsonl", [ListedTask(task=task, split="train"), ListedTask(task=task, split="test")])
    with pytest.raises(ConfigError, match="line 2: task one is there twice"):
        _world(f"env.tasks={tmp_path / 't.jsonl'}")


@for_each("line", ["{", "[]", '{"split": "train"}', '{"id": "a", "split": "dev"}', '{"id": "a", "difficulty": "hard"}'])
def test_a_line_that_is_no_task_is_refused_with_its_place(line: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(line + "\n")
    with pytest.raises(ConfigError, match="line 1"):
        _world(f"env.tasks={tmp_path / 't.jsonl'}")


@for_each("name", ["text_to_sql", "search", "code", "key_door", "guess_number"])
def test_the_levels_of_a_world_give_other_tasks_and_none_is_held_out_and_trained(name: str) -> None:
    """Also across levels: what is held out on one is not drawn for training on another."""
    levels = range(len(levels_of(load_target(name))))
    assert len(levels) >= 3
    worlds = [NO_OBJECTS.make_world(load_config(name, [f"env.difficulty={level}"]).env) for level in levels]
    train = [{task.id for task in world.tasks("train", 40, 1)} for world in worlds]
    held_out = {task.id for world in worlds for task in world.tasks("test", 40, 2)}
    assert not set().union(*train) & held_out
    assert all(not one & other for index, one in enumerate(train) for other in train[:index])


@for_each(
    ("overrides", "match"),
    [
        (["env.difficulty=6"], "the levels 0 to 5"),
        (["env.difficulty=1", "env.options.num_rooms=4"], "both set num_rooms"),
        (["env=gymnasium:Taxi-v4", "env.difficulty=1"], "gymnasium:Taxi-v4 has no levels"),
    ],
)
def test_a_level_that_cannot_be_set_is_refused(overrides: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        _world(*overrides)


def test_the_same_data_under_two_ids_is_refused_in_both_splits_and_allowed_in_one(tmp_path: Path) -> None:
    path, (one,) = tmp_path / "tasks.jsonl", _world().tasks("train", 1, 0)
    twin = Task(id="another-name", data=one.data)
    write_tasks(path, [ListedTask(task=task, split="train") for task in (one, twin)])
    assert len(_world(f"env.tasks={path}").tasks("train", 9, 0)) == 2
    write_tasks(path, [ListedTask(task=one, split="train"), ListedTask(task=twin, split="test")])
    with pytest.raises(ConfigError, match="hold the same data"):
        _world(f"env.tasks={path}")


def test_a_warm_up_does_not_show_the_held_out_tasks_of_the_file(tmp_path: Path) -> None:
    """The file holds out tasks of the world's own train split, one under another id."""
    path, own = tmp_path / "tasks.jsonl", _world().tasks("train", 8, 3)
    held_out = [own[0], Task(id="another-name", data=own[1].data)]
    listed = [ListedTask(task=task, split="test") for task in held_out]
    write_tasks(path, [*listed, ListedTask(task=own[2], split="train")])
    shown = _world(f"env.tasks={path}").demonstrations(8, 3)
    assert shown == _world().demonstrations(8, 3)[2:]


@for_each("name", ["calculator", "guess_number", "negotiate", "phone"])
def test_a_file_of_another_world_is_refused_with_what_came_and_what_is_expected(name: str, tmp_path: Path) -> None:
    path, other = tmp_path / "tasks.jsonl", NO_OBJECTS.make_world(load_config(name, []).env)
    (task,) = other.tasks("train", 1, 0)
    write_tasks(path, [ListedTask(task=task, split="train")])
    expected = f"key_door cannot play task {re.escape(task.id)}. Its data holds {', '.join(sorted(task.data))}; "
    with pytest.raises(ConfigError, match=f"{expected}the data of a task of key_door holds rooms"):
        _world(f"env.tasks={path}")


def test_a_world_may_take_tasks_with_other_data_than_its_own(tmp_path: Path) -> None:
    """An agent gets any row; without a file of rows its own tasks are seeds."""
    path = tmp_path / "tasks.jsonl"
    write_tasks(path, [ListedTask(task=Task(id="a", data={"question": "2 + 2"}), split="train")])
    world = list_world(AgentWorld(_agent), path, lambda _: AgentWorld(_agent))
    assert [task.data for task in world.tasks("train", 9, 0)] == [{"question": "2 + 2"}]


def _agent(client: object, task: object) -> float:
    raise NotImplementedError
