"""The service's benchmark: three processes that start, take turns and end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from turnwise.bench.cli import main


@pytest.mark.slow
def test_both_sides_answer_every_request_and_leave_nothing_running(
    tiny_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tiny_dir.is_dir()
    load = ["--requests=4", "--waves=2", "--new-tokens=4", "--repeats=1", "--warmups=0"]
    assert main(["service", "--model=tiny", "--device=cpu", "--json", *load]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["load"] == "4 in flight x 2, 32 + 4 tokens each"
    assert found["share_of_in_process"] == pytest.approx(found["http_tokens_per_s"] / found["in_process_tokens_per_s"])
    assert found["http_tokens_per_s"] > 0
    for child in [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]:
        assert b"turnwise" not in Path(f"/proc/{child}/cmdline").read_bytes(), "the server or the client still runs"
