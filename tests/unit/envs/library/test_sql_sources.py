from __future__ import annotations

import asyncio
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from turnwise.envs.base import Split, Task, assistant
from turnwise.envs.check import check_env
from turnwise.envs.library.sql_schema_questions import SCHEMA_LEVELS, SchemaLevel
from turnwise.envs.library.text_to_sql import TextToSql
from turnwise.errors import ConfigError, DataError

READ_ONLY = "error: only SELECT is allowed, and the database is read-only"


def submit(world: TextToSql, task: Task, sql: str) -> bool | None:
    async def play() -> bool | None:
        env = world.make_env(task, 0)
        await env.start()
        return (await env.step(assistant(f"submit {sql}"))).is_success

    return asyncio.run(play())


@pytest.fixture(scope="module")
def shops() -> dict[SchemaLevel, TextToSql]:
    return {level: TextToSql(databases="shop", difficulty=level) for level in SCHEMA_LEVELS}


def test_each_level_asks_what_its_name_says(shops: dict[SchemaLevel, TextToSql]) -> None:
    forms: dict[SchemaLevel, tuple[int, int, str]] = {
        "easy": (0, 0, r"SELECT (DISTINCT )?\w+(, \w+)? FROM"),
        "medium": (0, 0, r"SELECT (COUNT|AVG|SUM|MAX|MIN)\(.* WHERE "),
        "hard": (0, 1, r" JOIN | NOT IN "),
        "hardest": (2, 3, r" GROUP BY "),
    }
    for level, (least, most, form) in forms.items():
        for task in shops[level].tasks("train", 12, seed=1):
            gold = task.data["gold"]
            assert least <= gold.count(" JOIN ") <= most, gold
            assert re.search(form, gold), gold


def test_the_right_query_is_right_and_its_answer_as_a_constant_is_not(shops: dict[SchemaLevel, TextToSql]) -> None:
    for world in shops.values():
        for task in world.tasks("test", 3, seed=0):
            assert submit(world, task, task.data["gold"])
            ((shown, _),) = [world.make_env(task, 0).databases]
            result = asyncio.run(shown.run(task.data["gold"], world.limits))
            rows = ", ".join(f"({', '.join(literal(value) for value in row)})" for row in result.rows)
            assert submit(world, task, f"SELECT * FROM (VALUES {rows})") is False


def literal(value: Any) -> str:
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else "NULL" if value is None else repr(value)


def test_no_kind_of_question_is_in_both_splits(shops: dict[SchemaLevel, TextToSql]) -> None:
    """The id holds the shape: the tables, the columns and the form, without the values."""

    def shapes(world: TextToSql, split: Split) -> set[str]:
        return {task.id.rsplit("-", 1)[0] for task in world.tasks(split, 24, seed=5)}

    for world in shops.values():
        assert len(shapes(world, "test")) >= 4
        assert not shapes(world, "train") & shapes(world, "test")


def test_the_expert_always_wins_and_a_query_for_another_question_does_not(
    shops: dict[SchemaLevel, TextToSql],
) -> None:
    world = shops["medium"]
    tasks = world.tasks("train", 8, seed=0)
    dialogues = TextToSql(databases="shop", difficulty="medium", demonstration_mistakes=0.0).demonstrations(8, seed=0)
    assert [dialogue[-2].role for dialogue in dialogues] == ["tool"] * 8
    assert all(submit(world, task, dialogue[2].content) for task, dialogue in zip(tasks, dialogues, strict=True))
    unskilled = TextToSql(databases="shop", difficulty="medium", demonstration_skill=0.0, demonstration_mistakes=0.0)
    wrong = [dialogue[2].content for dialogue in unskilled.demonstrations(8, seed=0)]
    assert not any(submit(world, task, sql) for task, sql in zip(tasks, wrong, strict=True))


def test_no_demonstration_shows_a_query_of_a_held_out_kind() -> None:
    world = TextToSql(databases="shop", demonstration_skill=0.0, demonstration_mistakes=0.0)
    held_out = {task.data["gold"] for seed in range(3) for task in world.tasks("test", 150, seed)}
    shown = {dialogue[2].content for dialogue in world.demonstrations(250, seed=0)}
    assert len(shown) > 100
    assert not shown & held_out


def test_a_folder_of_databases_is_asked_about_and_never_written(tmp_path: Path) -> None:
    for name, column in (("zoo", "weight"), ("garage", "power")):
        with closing(sqlite3.connect(tmp_path / f"{name}.sqlite")) as connection:
            connection.execute(f"CREATE TABLE things (id INTEGER PRIMARY KEY, name TEXT, kind TEXT, {column} INTEGER)")
            rows = [(f"{name} {n}", f"kind {n % 7}", n * n % 83) for n in range(90)]
            connection.executemany(f"INSERT INTO things (name, kind, {column}) VALUES (?, ?, ?)", rows)
            connection.commit()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    world = TextToSql(databases=str(tmp_path), difficulty="mixed")
    tasks = world.tasks("train", 20, seed=0)
    assert {task.data["source"] for task in tasks} == {"zoo", "garage"}
    assert [task.id for task in TextToSql(databases=str(tmp_path), difficulty="mixed").tasks("train", 20, seed=0)] == [
        task.id for task in tasks
    ]
    assert check_env(world).is_ok

    async def write() -> str:
        step = await world.make_env(tasks[0], 0).step(assistant("DELETE FROM things"))
        return step.messages[0].content

    assert asyncio.run(write()) == READ_ONLY
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(ConfigError, match=r"no train question with difficulty=hard .* linked by keys"):
        TextToSql(databases=str(tmp_path), difficulty="hard").tasks("train", 3, seed=0)


def test_hardest_asks_about_the_shop_where_nothing_else_is_named() -> None:
    assert {task.data["source"] for task in TextToSql(difficulty="hardest").tasks("train", 4, seed=0)} == {"shop"}


def test_two_places_are_refused_and_a_task_of_another_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="path and databases are set"):
        TextToSql(databases="shop", path=tmp_path)
    task = Task(id="x", data={"source": "zoo", "prompt": "", "gold": ""})
    with pytest.raises(DataError, match="no database 'zoo' among shop"):
        TextToSql(databases="shop").make_env(task, 0)
