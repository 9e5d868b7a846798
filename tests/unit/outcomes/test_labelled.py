"""Files of labelled attempts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cases import for_each
from turnwise.errors import ConfigError
from turnwise.outcomes.labelled import read_labelled


def _file(directory: Path, **verdict: object) -> Path:
    path = directory / "data.jsonl"
    row = {"world": "w", "task_id": "t", "messages": [{"role": "user", "content": "go"}], **verdict}
    path.write_text(f"{json.dumps(row)}\n")
    return path


def test_the_verdicts_of_pools_are_numbers_and_are_read_as_labels(tmp_path: Path) -> None:
    assert [read_labelled(_file(tmp_path, is_success=number))[0].label for number in (0, 1)] == [False, True]


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
