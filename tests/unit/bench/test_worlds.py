"""`turnwise bench worlds`: the expert and a random policy in the same tasks, and a table of what they came to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from turnwise.bench import worlds
from turnwise.bench.cli import main
from turnwise.bench.worlds import TABLE_HEAD, all_rows, measure_world, table_row
from turnwise.envs.base import Task
from turnwise.envs.browser.pool import close_pools
from turnwise.envs.library.phone import Phone

WORKER = """
import subprocess, sys, time
from turnwise.envs.base import EnvStep, Task, assistant, user

WORK = "import time\\nwhile time.process_time() < 0.5: pass"

class Worker:
    name, max_turns, max_tokens = "worker", 1, 4
    def __init__(self, way: str): self.way = way
    def tasks(self, split, count, seed): return [Task(id=f"{split}-{n}") for n in range(count)]
    def make_env(self, task, seed): return WorkerEnv(self.way)
    def demonstrations(self, count, seed): return [[user("Go."), assistant(f"go {n}")] for n in range(count)]

class WorkerEnv:
    def __init__(self, way): self.way = way
    def start(self): return [user("Go.")]
    def step(self, reply):
        time.sleep(0.5) if self.way == "waits" else subprocess.run([sys.executable, "-c", WORK], check=True)
        return EnvStep(reward=1.0, terminated=True, is_success=True)
    def close(self): pass
"""


def test_the_expert_reaches_every_goal_in_its_number_of_turns_and_a_random_policy_does_not() -> None:
    measured = measure_world("phone", {"actions": 6}, 8, 2)
    assert not isinstance(measured, str)
    assert (measured["expert"].successes, measured["expert"].turns) == (1.0, 6.0)
    assert measured["random"].successes < 0.5


def test_cpu_time_is_that_of_other_processes_too_and_leaves_waiting_out(tmp_path: Path) -> None:
    file = tmp_path / "worker.py"
    file.write_text(WORKER, encoding="utf-8")
    found = {way: measure_world(f"{file}:Worker", {"way": way}, 2, 1) for way in ("waits", "works")}
    waits, works = (one["expert"] if not isinstance(one, str) else pytest.fail(one) for one in found.values())
    assert min(waits.step_ms, works.step_ms) >= 500
    assert waits.cpu_ms < 250
    assert works.cpu_ms >= 500


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
    kept, fresh = (f"| `browser` | 8% |  | 1 % | {cell} | 100% | 3.0 | 1 | 2 | 120 |" for cell in ("5 %", "7 %"))
    page = tmp_path / "page.md"
    page.write_text("\n".join(["# Worlds", *TABLE_HEAD, "| `key_door` | old |", kept, "", "after", ""]))
    (tmp_path / "trained.json").write_text(json.dumps({"key_door": {"trained": "9 %"}, "browser": {"trained": "7 %"}}))
    monkeypatch.setattr(worlds, "VARIANTS", ())
    monkeypatch.setattr(worlds, "PRESETS", ())
    monkeypatch.setattr(worlds, "measure_world", _no_browser(worlds.measure_world))
    names = ["key_door", "browser", "calculator"]
    assert main(["worlds", "--only", *names, "--attempts", "2", "--markdown", str(page)]) == 0
    lines = page.read_text().splitlines()
    assert [line.split("`")[1] for line in lines[3:6]] == ["key_door", "browser", "calculator"]
    assert "| 9 % |" in lines[3]
    assert lines[4] == fresh.replace("| 1 % |", "|  |")
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


def test_the_page_has_every_row_of_the_table_with_the_trained_results_of_its_own_tasks() -> None:
    folder = Path(__file__).parents[3] / "docs" / "worlds"
    results = json.loads((folder / "trained.json").read_text())
    lines = (folder / "README.md").read_text().splitlines()
    assert lines[lines.index(TABLE_HEAD[0]) + 1] == TABLE_HEAD[1]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| `")]
    shown = {row[1].strip("`"): row[3:6] for row in rows}
    assert set(shown) == {label for label, _, _ in all_rows()}
    for label, cells in shown.items():
        trained = results.get(label, {})
        assert cells == [trained.get(key, "") for key in ("base", "warm_up", "trained")], label


def test_pages_without_playwright_are_not_played_and_the_row_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "playwright.async_api", None)
    problem = measure_world("browser", {}, 2, 1)
    close_pools()
    assert problem == "pages need Playwright: pip install 'turnwise[browser]'"


def test_trained_results_name_rows_of_the_table() -> None:
    rows = {label for label, _, _ in all_rows()}
    results = json.loads((Path(__file__).parents[3] / "docs" / "worlds" / "trained.json").read_text())
    assert set(results) <= rows
    assert all(set(cells) <= {"base", "warm_up", "trained"} for cells in results.values())
