"""The status file of a run: what is written is read again, also from runs of an earlier version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnwise.watch.status import STATUS_FILE, ShownCall, Status, read_status, write_status

CALL = ShownCall(party="env", what="step", who="task 3", waited_s=1.5, deadline_s=60.0)
STATUS = Status(
    pid=7, time=1.0, phase="training", step=3, num_steps=9, version=3, reason="", pending_calls=(CALL,), alarms=("kl",)
)


def test_a_status_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_status(tmp_path, STATUS)
    assert read_status(tmp_path) == STATUS


def test_a_status_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    write_status(tmp_path, STATUS)
    file = tmp_path / STATUS_FILE
    fields = json.loads(file.read_text())
    fields["waits"], fields["num_waits"] = fields.pop("pending_calls"), fields.pop("num_pending_calls")
    file.write_text(json.dumps(fields))
    assert read_status(tmp_path) == STATUS


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_file_that_holds_no_status_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / STATUS_FILE).write_text(text)
    assert read_status(tmp_path) is None
