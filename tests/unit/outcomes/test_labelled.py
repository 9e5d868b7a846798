"""Files of labelled attempts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from cases import for_each
from turnwise.envs.base import assistant, user
from turnwise.errors import ConfigError
from turnwise.memory.dialogue import request
from turnwise.outcomes.labelled import LabelledAttempt, read_labelled, write_labelled
from turnwise.outcomes.model import read_ids
from turnwise.trajectory import Message


def _file(directory: Path, **verdict: object) -> Path:
    path = directory / "data.jsonl"
    row = {"world": "w", "task_id": "t", "messages": [{"role": "user", "content": "go"}], **verdict}
    path.write_text(f"{json.dumps(row)}\n")
    return path


def test_the_verdicts_of_pools_are_numbers_and_are_read_as_labels(tmp_path: Path) -> None:
    assert [read_labelled(_file(tmp_path, is_success=number))[0].label for number in (0, 1)] == [False, True]


def test_a_task_of_a_pool_is_the_same_one_at_every_level(tmp_path: Path) -> None:
    rows = [{"is_success": 1, "task_id": name, "difficulty": 2} for name in ("level2/board", "board")]
    found = [read_labelled(_file(tmp_path, **row))[0] for row in rows]
    assert [one.task_id for one in found] == ["board", "board"], "so both are learned from, or both are held out"
    assert read_labelled(_file(tmp_path, label=True, task_id="level2/board"))[0].task_id == "level2/board"


class ShowsNames:
    """A renderer whose template shows the names of messages."""

    def start(self, messages: Sequence[Message]) -> list[int]:
        return list("".join(f"<{one.role} {one.name}>{one.content}" for one in messages).encode())


def test_what_a_model_learns_from_a_file_reads_as_what_it_scores_in_a_run(tmp_path: Path) -> None:
    played = (
        user("go"),
        assistant("call"),
        Message(role="tool", content="4", name="add"),
        request(12),
        assistant("sum"),
    )
    one = LabelledAttempt(world="w", task_id="t", messages=played, label=True)
    write_labelled(tmp_path / "data.jsonl", [one])
    (stored,) = read_labelled(tmp_path / "data.jsonl")
    renderer = cast(Any, ShowsNames())
    learned, scored = (read_ids(renderer, messages) for messages in (stored.messages, played))
    assert learned == scored
    text = bytes(learned).decode()
    assert "<tool add>4" in text
    assert "<user memory>" not in text, "the mark on a request for a summary is ours alone"


@for_each(
    ("verdict", "match"),
    [
        ({"is_success": None}, "line 1 has is_success=null: nobody said"),
        ({"label": None, "is_success": 1}, "line 1 has label=null"),
        ({"label": "false"}, "has label='false'; expected true or false"),
        ({"is_success": 0.5}, "has is_success=0.5; expected true or false"),
        ({}, "line 1 is no labelled attempt"),
    ],
)
def test_a_line_without_a_verdict_is_refused_and_never_read_as_a_failure(
    tmp_path: Path, verdict: dict[str, object], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        read_labelled(_file(tmp_path, **verdict))
