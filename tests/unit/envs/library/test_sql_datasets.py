"""Spider's and BIRD's folders, in miniature."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from turnwise.envs.base import Split, assistant
from turnwise.envs.check import check_env
from turnwise.envs.library.sql_datasets import load_dataset, read_schema
from turnwise.envs.library.text_to_sql import TextToSql
from turnwise.errors import ConfigError


def write_database(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT, age INTEGER)")
        connection.execute(
            'CREATE TABLE concert (id INTEGER, "Concert Name" TEXT, singer_id INTEGER REFERENCES singer(id))'
        )
        connection.executemany("INSERT INTO singer VALUES (?, ?, ?)", [(1, "Ada", 30), (2, "Bo", 40), (3, "Bo", 50)])
        connection.executemany("INSERT INTO concert VALUES (?, ?, ?)", [(1, "Night", 1), (2, "Day", 1)])
        connection.execute("INSERT INTO singer VALUES (4, CAST(x'ff41' AS TEXT), 60)")  # not UTF-8, as in Spider
        connection.commit()


def write_json(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows), encoding="utf-8")


@pytest.fixture
def spider(tmp_path: Path) -> Path:
    root = tmp_path / "spider"
    for name in ("concert_singer", "pets"):
        write_database(root / "database" / name / f"{name}.sqlite")
    write_json(root / "tables.json", [{"db_id": "concert_singer"}, {"db_id": "pets"}])
    row = {"db_id": "pets", "question": "How many singers are there?", "query": "SELECT count(*) FROM singer"}
    write_json(root / "train_spider.json", [row, {**row, "question": "All names?", "query": "SELECT name FROM singer"}])
    write_json(root / "train_others.json", [{**row, "question": "Ages?", "query": "SELECT age FROM singer"}])
    ordered = {"question": "Names by age?", "query": "SELECT name FROM singer ORDER BY age DESC ;"}
    write_json(root / "dev.json", [{"db_id": "concert_singer", **ordered}])
    return root


@pytest.fixture
def bird(tmp_path: Path) -> Path:
    root = tmp_path / "bird"
    row = {"question": "How many are old?", "evidence": "old means age > 35", "difficulty": "simple"}
    gold = {"SQL": "SELECT COUNT(*) FROM singer WHERE age > 35"}
    for split in ("train", "dev"):
        name = f"{split}_songs"
        write_database(root / split / f"{split}_databases" / name / f"{name}.sqlite")
        write_json(root / split / f"{split}.json", [{"db_id": name, **row, **gold}])
    return root


def test_spider_is_read_with_its_own_splits(spider: Path) -> None:
    found = load_dataset(spider)
    assert [question.text for question in found["train"]] == ["How many singers are there?", "All names?", "Ages?"]
    assert [question.gold for question in found["test"]] == ["SELECT name FROM singer ORDER BY age DESC"]
    assert found["test"][0].database == spider / "database" / "concert_singer" / "concert_singer.sqlite"


def test_bird_is_read_with_its_hints(bird: Path) -> None:
    found = load_dataset(bird)
    assert found["test"][0].text == "How many are old?\nHint: old means age > 35"
    assert found["train"][0].database == bird / "train" / "train_databases" / "train_songs" / "train_songs.sqlite"


def test_the_schema_names_columns_types_and_links(spider: Path) -> None:
    assert read_schema(spider / "database" / "pets" / "pets.sqlite") == (
        "singer(id integer, name text, age integer)\n"
        'concert(id integer, "Concert Name" text, singer_id integer, singer_id -> singer.id)'
    )


@pytest.mark.parametrize("layout", ["spider", "bird"])
async def test_the_gold_of_a_data_set_is_right_in_the_world(layout: str, request: pytest.FixtureRequest) -> None:
    world = TextToSql(path=request.getfixturevalue(layout))
    splits: tuple[Split, ...] = ("train", "test")
    for split in splits:
        for task in world.tasks(split, 3, 0):
            env = world.make_env(task, 0)
            (_, question) = await env.start()
            assert question.content.startswith("singer(id integer")
            gold = next(q.gold for q in load_dataset(world.path)[split] if q.id == task.data["row"])  # type: ignore[arg-type]
            assert not (await env.step(assistant(gold))).is_over
            assert (await env.step(assistant("submit"))).is_success


async def test_order_and_duplicates_count_in_a_data_set(spider: Path) -> None:
    world = TextToSql(path=spider)
    (by_age,) = world.tasks("test", 1, 0)
    step = await world.make_env(by_age, 0).step(assistant("submit SELECT name FROM singer ORDER BY age"))
    assert step.is_success is False
    names = next(task for task in world.tasks("train", 3, 0) if task.data["row"] == "train_spider-train-2")
    step = await world.make_env(names, 0).step(assistant("submit SELECT DISTINCT name FROM singer"))
    assert step.is_success is False


def test_a_data_set_keeps_the_rules_of_worlds(spider: Path) -> None:
    report = check_env(TextToSql(path=spider), num_tasks=1, deadline_s=120)
    assert report.is_ok, report


def test_a_folder_with_one_file_is_split_by_database(tmp_path: Path) -> None:
    names = [f"db{n}" for n in range(12)]
    for name in names:
        write_database(tmp_path / "database" / name / f"{name}.sqlite")
    row = {"question": "How many?", "query": "SELECT COUNT(*) FROM singer"}
    write_json(tmp_path / "dev.json", [{"db_id": name, **row} for name in names for _ in range(2)])
    found = load_dataset(tmp_path)
    train, test = ({question.database for question in found[split]} for split in ("train", "test"))
    assert train
    assert test
    assert not train & test


def test_what_is_wrong_with_a_folder_is_said(spider: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder; expected Spider's or BIRD's"):
        load_dataset(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no questions in .* expected one of train_spider.json"):
        load_dataset(spider / "database")
    write_json(spider / "dev.json", [{"db_id": "other", "question": "?", "query": "SELECT 1"}])
    with pytest.raises(ConfigError, match=r"asks about other, but there is no other/other\.sqlite"):
        load_dataset(spider)
    write_json(spider / "dev.json", [{"db_id": "pets", "question": "?"}])
    with pytest.raises(ConfigError, match="row 1: expected db_id, question, and the gold as query or SQL"):
        load_dataset(spider)
