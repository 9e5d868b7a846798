"""The multi-turn tasks of bfcl-eval, with its own data, tools and checks."""

from __future__ import annotations

import pytest

bfcl_eval = pytest.importorskip("bfcl_eval", reason="run by tests/contract/test_world_packages.py")

from attempts import play  # noqa: E402 - after the check that the library is there
from turnwise.envs.adapters.bfcl import CATEGORIES, NEW_TOOLS, BfclWorld  # noqa: E402
from turnwise.envs.base import Task  # noqa: E402
from turnwise.envs.check import check_env  # noqa: E402
from turnwise.envs.registry import get_world  # noqa: E402
from turnwise.envs.scripted import play_script  # noqa: E402
from turnwise.envs.tools import format_tool_call as call  # noqa: E402
from turnwise.errors import ConfigError  # noqa: E402

FIRST = Task(id="multi_turn_base_0", data={"entry": "multi_turn_base_0"})
MOVE = [
    call("cd", folder="document"),
    call("mkdir", dir_name="temp"),
    call("mv", source="final_report.pdf", destination="temp"),
]


def _replies(world: BfclWorld, task: Task) -> list[str]:
    player = world.expert(task)
    return [player(()) for _ in range(world.max_turns)]


@pytest.mark.parametrize("category", CATEGORIES)
def test_a_category_keeps_the_rules(category: str) -> None:
    report = check_env(get_world(f"bfcl:{category}"), num_tasks=2, deadline_s=120.0)
    assert report.is_ok, report


@pytest.mark.parametrize("category", CATEGORIES)
async def test_the_answer_solves_every_held_out_task(category: str) -> None:
    world = BfclWorld(category)
    for task in {task.id: task for task in world.tasks("test", 60, 0)}.values():
        _, steps = await play(world, _replies(world, task), task)
        assert (steps[-1].is_success, steps[-1].reward) == (True, 1.0), task.id


async def test_a_request_that_changed_too_much_ends_the_attempt() -> None:
    start, steps = await play(BfclWorld("multi_turn_base"), [*MOVE, call("touch", file_name="x.txt"), "Done."], FIRST)
    assert start[1].content.startswith("Move 'final_report.pdf' within document directory")
    assert (steps[-1].terminated, steps[-1].is_success, steps[-1].reward) == (True, False, 0.0)


async def test_a_request_without_a_call_is_not_done_and_partial_credit_counts_those_before() -> None:
    world = BfclWorld("multi_turn_base", partial_credit=0.4)
    _, steps = await play(world, [*MOVE, "Moved.", "Found."], FIRST)
    assert [step.is_over for step in steps] == [False] * 4 + [True]
    assert steps[-1].reward == pytest.approx(0.1)


async def test_an_attempt_that_runs_out_of_turns_keeps_its_partial_credit() -> None:
    world = BfclWorld("multi_turn_base", partial_credit=0.4, max_turns=5)
    _, steps = await play(world, [*MOVE, "Moved.", call("ls")], FIRST)
    assert (steps[-1].truncated, steps[-1].is_success) == (True, False)
    assert steps[-1].reward == pytest.approx(0.1)


async def test_looking_around_first_does_no_harm() -> None:
    world = BfclWorld("multi_turn_base")
    _, steps = await play(world, [call("ls"), *_replies(world, FIRST)], FIRST)
    assert steps[-1].is_success


async def test_attempts_do_not_share_a_state() -> None:
    world = BfclWorld("multi_turn_base")
    results = [(await play(world, [call("cd", folder="document")], FIRST))[1][0].messages[0].content for _ in range(2)]
    assert results[0] == results[1] == '{"current_working_directory": "document"}'


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (call("__init__"), "Error: no tool '__init__'"),
        (call("_load_scenario", scenario={}), "Error: no tool '_load_scenario'"),
        (call("cp", source="a", destination="b"), "Error: no tool 'cp'"),
        (call("cd", path="document"), "Error: cd takes folder; check 'path'"),
        (call("cd", folder=3), "Error: "),
    ],
)
async def test_a_wrong_call_is_answered_with_an_error(text: str, answer: str) -> None:
    _, steps = await play(BfclWorld("multi_turn_base"), [text], FIRST)
    assert steps[0].messages[0].content.startswith(answer)
    assert not steps[0].is_over


async def test_a_sum_that_would_take_hours_is_refused() -> None:
    world = BfclWorld("multi_turn_base")
    found = (task for task in world.tasks("train", 150, 0) if "MathAPI" in world.entry(task)["involved_classes"])
    _, steps = await play(world, [call("power", base=10, exponent=10**9)], next(found))
    assert steps[0].messages[0].content.startswith("Error: ValueError: exponent=1000000000 is too large")


async def test_a_tool_that_comes_later_is_refused_before_and_announced() -> None:
    world = BfclWorld("multi_turn_miss_func")
    task = Task(id="multi_turn_miss_func_0", data={"entry": "multi_turn_miss_func_0"})
    dialogue = await play_script(world.make_env(task, 0), world.expert(task), world.max_turns)
    assert "- sort(" not in dialogue[0].content
    announced = [message.content for message in dialogue if message.content.startswith(NEW_TOOLS)]
    assert [text.splitlines()[1][:7] for text in announced] == ["- sort("]
    _, steps = await play(world, [call("sort", file_name="final_report.pdf")], task)
    assert steps[0].messages[0].content.startswith("Error: no tool 'sort'")


def test_a_scene_is_in_the_same_split_in_all_categories() -> None:
    held_out = [
        {task.id.rpartition("_")[2] for task in BfclWorld(category).tasks("test", 60, 0)}
        for category in ("multi_turn_base", "multi_turn_long_context")
    ]
    assert held_out[0] == held_out[1]


def test_levels_take_tasks_with_few_calls_and_a_category_has_a_name() -> None:
    few, all_tasks = (
        len({task.id for task in BfclWorld(CATEGORIES[0], max_calls=calls).tasks("train", 200, 0)}) for calls in (3, 99)
    )
    assert 0 < few < all_tasks
    with pytest.raises(ConfigError, match="multi_turn_base"):
        BfclWorld("multi_turn_bas")
