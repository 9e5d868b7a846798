"""Every metric has a row that says what it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from turnwise.runlog.writer import RunWriter
from turnwise.watch.catalogue import CATALOGUE, Metric, check_names, find_metric

SOURCE = Path(__file__).resolve().parents[3] / "src" / "turnwise"
ROOMS = "|".join(sorted({metric.name.partition("/")[0] for metric in CATALOGUE}))
NAME = re.compile(rf"(?:{ROOMS})/[a-z][a-z0-9_]*[a-z0-9]")
"""A whole name; `train/` alone and `rollout/dropped_` are beginnings of names."""
LOSS_METRIC = re.compile(r"([a-z][a-z0-9_]*):(sum|mean|max)")


def _texts(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_name_in_the_source_is_in_the_catalogue() -> None:
    files = [file for file in SOURCE.rglob("*.py") if file.parts[-2] not in ("bench", "ops")]
    named = {(file.name, text) for file in files for text in _texts(file) if NAME.fullmatch(text)}
    assert {(file, name) for file, name in named if find_metric(name) is None} == set()
    assert len(named) > 30


def test_every_number_of_a_loss_is_in_the_catalogue() -> None:
    found = [
        (file.name, match[1] + ("_max" if match[2] == "max" else ""))
        for file in (SOURCE / "engine" / "training").glob("*.py")
        for text in _texts(file)
        if (match := LOSS_METRIC.fullmatch(text))
    ]
    rooms = ("train/", "train/critic_", "critic/")
    assert [one for one in found if not any(find_metric(f"{room}{one[1]}") for room in rooms)] == []
    assert len(found) > 15


def test_rows_are_unique_complete_and_name_a_file_that_is_there() -> None:
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)
    assert [metric for metric in CATALOGUE if not (metric.unit and metric.meaning.endswith("."))] == []
    assert {metric.emitter for metric in CATALOGUE if not (SOURCE / metric.emitter).is_file()} == set()


def _is_named_in(metric: Metric, texts: Collection[str]) -> bool:
    """Whether a file writes the name, or its part after the slash, or a beginning such as `world/`."""
    name = metric.name.partition("{")[0]
    short = name.partition("/")[2]
    plain = {text.partition(":")[0] for text in texts}
    is_whole = bool({name, short, short.removesuffix("_max"), short.removesuffix("_mean")} & plain - {""})
    return is_whole or any(text[-1] in "/_" and (name.startswith(text) or short.startswith(text)) for text in texts)


def test_the_file_that_a_row_names_as_the_emitter_writes_the_name() -> None:
    texts = {file: {one for one in _texts(SOURCE / file) if one} for file in {one.emitter for one in CATALOGUE}}
    assert [one.name for one in CATALOGUE if not _is_named_in(one, texts[one.emitter])] == []
    elsewhere = Metric("fleet/requests", "", "", "")
    assert not _is_named_in(elsewhere, {one for one in _texts(SOURCE / "backends/servers/fleet.py") if one})


def test_a_name_in_braces_stands_for_what_may_take_its_place() -> None:
    assert find_metric("rollout/stop_time_limit_share") == find_metric("rollout/stop_max_turns_share") is not None
    assert find_metric("rollout/env_anything_mean") is not None
    assert find_metric("rollout/stop_nowhere_share") is None
    assert find_metric("train/critic_error") is None


def test_a_run_that_writes_an_unknown_metric_fails_its_test(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'train/los' is not in the catalogue; did you mean 'train/loss'"):
        check_names(["train/loss", "train/los"])
    writer = RunWriter.create(tmp_path / "run", "", max_size_mb=1)
    with pytest.raises(ValueError, match=r"add its row to watch/catalogue\.py"):
        writer.metrics(1, {"train/surprise": 1.0})
    writer.close()
