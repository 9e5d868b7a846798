"""`turnwise bench worlds`: the expert and a random policy in the same tasks, and a table of what they came to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from turnwise.bench import worlds
from turnwise.bench.cli import main
from turnwise.bench.worlds import TABLE_HEAD, all_rows, measure_world, table_row
from turnwise.envs.base import Task
from turnwise.envs.library.phone import Phone


def test_the_expert_reaches_every_goal_in_its_number_of_turns_and_a_random_policy_does_not() -> None:
    measured = measure_world("phone", {"actions": 6}, 8, 2)
    assert not isinstance(measured, str)
    assert (measured["expert"].successes, measured["expert"].turns) == (1.0, 6.0)
    assert measured["random"].successes < 0.5


def test_the_table_has_a_row_for_each_world_that_was_asked_for_and_says_what_was_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = tmp_path / "trained.json"
    trained.write_text(json.dumps({"key_door": {"base": "1 %", "trained": "9 %"}}))
    assert main(["worlds", "--only", "key_door", "--attempts", "2", "--trained", str(trained)]) == 0
    head, _, row, load = capsys.readouterr().out.splitlines()
    assert len(head.split("|")) == len(row.split("|"))
    assert row.startswith("| `key_door` |")
    assert "| 1 % |  | 9 % | 100% |" in row
    assert load.startswith("load average ")


def test_the_table_of_a_page_is_written_in_place_and_a_row_that_cannot_be_played_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = "| `browser` | kept |"
    page = tmp_path / "page.md"
    page.write_text("\n".join(["# Worlds", *TABLE_HEAD, "| `key_door` | old |", old, "", "after", ""]))
    (tmp_path / "trained.json").write_text(json.dumps({"key_door": {"trained": "9 %"}}))
    monkeypatch.setattr(worlds, "VARIANTS", ())
    monkeypatch.setattr(worlds, "PRESETS", ())
    monkeypatch.setattr(worlds, "measure_world", _no_browser(worlds.measure_world))
    names = ["key_door", "browser", "calculator"]
    assert main(["worlds", "--only", *names, "--attempts", "2", "--markdown", str(page)]) == 0
    lines = page.read_text().splitlines()
    assert [line.split("`")[1] for line in lines[3:6]] == ["key_door", "browser", "calculator"]
    assert "| 9 % |" in lines[3]
    assert lines[4] == old
    assert lines[6:] == ["", "after"]
    assert "wrote 2 rows" in (said := capsys.readouterr().err)
    assert "not played here: browser" in said


def _no_browser(measure: Any) -> Any:
    return lambda name, *rest: "no Chromium" if name == "browser" else measure(name, *rest)


def test_a_row_of_a_preset_has_its_tasks_and_the_random_player_of_its_world(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, str]] = []
    real = Phone.random_player

    def watched(world: Phone, task: Task, seed: int) -> Any:
        made.append(((world.actions, world.goals), task.id))
        return real(world, task, seed)

    monkeypatch.setattr(Phone, "random_player", watched)
    assert main(["worlds", "--only", "phone_tiny", "--attempts", "6"]) == 0
    (row,) = capsys.readouterr().out.splitlines()[2:-1]
    assert row.startswith("| `preset phone_tiny` |")
    assert "| 100% | 3.0 |" in row
    assert len(made) == 6
    assert all(options == (3, ["switch"]) for options, _ in made)


def test_what_cannot_be_played_here_is_said_in_its_row() -> None:
    problem = measure_world("search", {"path": Path("/nowhere")}, 1, 1)
    assert isinstance(problem, str)
    assert "not played" in table_row("search", problem, {})
    with pytest.raises(Exception, match="no such world"):
        main(["worlds", "--only", "nonsense"])


def test_trained_results_name_rows_of_the_table() -> None:
    rows = {label for label, _, _ in all_rows()}
    results = json.loads((Path(__file__).parents[3] / "docs" / "worlds" / "trained.json").read_text())
    assert set(results) <= rows
    assert all(set(cells) <= {"base", "warm_up", "trained"} for cells in results.values())
