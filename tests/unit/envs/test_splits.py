from __future__ import annotations

import json
import random

import pytest

from cases import for_each
from turnwise.envs.base import Task
from turnwise.envs.registry import get_world
from turnwise.envs.splits import draw, draw_tasks, in_split, random_for, split_of
from turnwise.errors import ConfigError


def test_the_split_of_a_key_is_fixed() -> None:
    assert [split_of(f"task-{n}") for n in range(6)] == ["train", "train", "train", "test", "train", "train"]


def test_about_one_key_in_five_is_held_out() -> None:
    share = sum(split_of(f"key-{n}") == "test" for n in range(5000)) / 5000
    assert share == pytest.approx(0.2, abs=0.02)


def test_each_item_is_drawn_once_before_any_comes_again() -> None:
    drawn = draw(range(7), 20, random.Random(0))
    assert len(drawn) == 20
    assert sorted(drawn[:7]) == sorted(drawn[7:14]) == list(range(7))
    assert drawn[:7] != drawn[7:14]


def test_nothing_to_draw_from_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no tasks"):
        draw([], 1, random.Random(0))


def make_task(rng: random.Random) -> Task:
    return Task(id=f"n-{rng.randrange(30)}")


def test_generated_tasks_differ_as_long_as_there_are_enough() -> None:
    tasks = draw_tasks(make_task, "train", 10, random_for("x", 0))
    assert len({task.id for task in tasks}) == 10
    assert all(split_of(task.id) == "train" for task in tasks)


def test_generated_tasks_come_again_when_there_are_too_few() -> None:
    train = {f"n-{n}" for n in range(30) if split_of(f"n-{n}") == "train"}
    tasks = draw_tasks(make_task, "train", 100, random_for("x", 0))
    assert len(tasks) == 100
    assert {task.id for task in tasks} == train


def test_a_generator_without_tasks_of_a_split_is_an_error() -> None:
    only = next(f"n-{n}" for n in range(30) if split_of(f"n-{n}") == "train")
    with pytest.raises(ConfigError, match="no test task"):
        draw_tasks(lambda _: Task(id=only), "test", 1, random_for("x"))


def test_splits_make_up_the_whole() -> None:
    tasks = [Task(id=f"n-{n}") for n in range(100)]
    assert len(in_split(tasks, "train")) + len(in_split(tasks, "test")) == 100


def test_text_seeds_mean_the_same_everywhere() -> None:
    assert random_for("world", "train", 3).randrange(10**6) == random.Random("world:train:3").randrange(10**6)


@for_each("name", ["household", "workflow", "repository"])
def test_the_smallest_tasks_of_long_worlds_are_held_out_by_what_they_hold(name: str) -> None:
    world = get_world(name, level=0)
    train, test = ({json.dumps(task.data) for task in world.tasks(split, 100, 0)} for split in ("train", "test"))
    assert train
    assert test
    assert not train & test
