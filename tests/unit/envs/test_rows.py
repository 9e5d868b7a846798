from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from turnwise.envs.base import Task
from turnwise.envs.rows import read_rows, split_row_tasks
from turnwise.envs.splits import in_split
from turnwise.errors import ConfigError


@pytest.mark.parametrize("text", ['[{"a": 1}, {"a": 2}]', '{"a": 1}\n\n{"a": 2}\n', '\n [{"a": 1},\n {"a": 2}]\n'])
def test_a_json_list_and_json_lines_give_the_same_rows(tmp_path: Path, text: str) -> None:
    file = tmp_path / "rows"
    file.write_text(text, encoding="utf-8")
    assert read_rows(file) == [{"a": 1}, {"a": 2}]
    assert read_rows(str(file)) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no rows"),
        ("[]", "holds no rows"),
        ("[1]", "row 1 is int; expected an object"),
        ('{"a": 1}\n{bad', "line 2: "),
        ("[{bad", "expected a JSON list, or one JSON object per line"),
    ],
)
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "rows"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=problem):
        read_rows(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*/nothing\.jsonl"):
        read_rows(tmp_path / "nothing.jsonl")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    file = tmp_path / "train.parquet"
    file.touch()
    with pytest.raises(ConfigError, match=r"pip install 'turnwise\[pairs\]'"):
        read_rows(file)


def test_parquet_is_read_through_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Table:
        def to_pylist(self) -> list[dict[str, Any]]:
            return [{"question": "q"}]

    parquet: Any = ModuleType("pyarrow.parquet")
    parquet.read_table = lambda path: Table() if path.is_file() else None
    monkeypatch.setitem(sys.modules, "pyarrow", ModuleType("pyarrow"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    file = tmp_path / "train.parquet"
    file.touch()
    assert read_rows(file) == [{"question": "q"}]


def test_rows_that_ask_different_things_are_split_by_their_ids() -> None:
    tasks = [Task(id=f"row-{n}", data={"prompt": f"Say {n}.", "answer": n}) for n in range(60)]
    assert split_row_tasks([*tasks, tasks[3]]) == {"train": in_split(tasks, "train"), "test": in_split(tasks, "test")}


def test_the_split_of_rows_that_ask_the_same_does_not_follow_from_their_order() -> None:
    tasks = [Task(id=f"row-{n}-{copy}", data={"prompt": f"Say {n}.", "i": copy}) for n in range(60) for copy in "abc"]
    found = split_row_tasks(tasks)
    train, test = ({task.data["prompt"] for task in found[split]} for split in ("train", "test"))
    assert not train & test
    assert len(train | test) == 60
    assert {task.id for task in split_row_tasks(tasks[::-1])["test"]} == {task.id for task in found["test"]}


def test_rows_of_a_game_that_all_ask_the_same_are_tasks_of_their_own() -> None:
    tasks = [Task(id=f"row-{n}", data={"prompt": "Guess.", "secret": n}) for n in range(60)]
    assert split_row_tasks(tasks)["test"] == in_split(tasks, "test")
    assert len(split_row_tasks(tasks[:30], tasks[30:])["test"]) == 30
