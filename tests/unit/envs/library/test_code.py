"""`code`: hidden tests decide, near misses and tricks get nothing, and published files are read as they are."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from turnwise.envs.base import EnvStep, Task, assistant
from turnwise.envs.library.code import Code, read_reply
from turnwise.envs.library.code_data import check_to_tests, row_to_task
from turnwise.envs.library.code_problems import LEVELS, draw_problem
from turnwise.envs.sandbox import SandboxWarning
from turnwise.envs.sandbox.python_tests import CallTest, StatementTest
from turnwise.envs.splits import random_for
from turnwise.errors import ConfigError

TASK = Task(
    id="double",
    data={
        "question": "Write solve(n). It returns n times 2.",
        "entry_point": "solve",
        "visible": [["solve(2)", "4"], ["solve(5)", "10"]],
        "hidden": [["solve(0)", "0"], ["solve(-3)", "-6"], ["solve('a')", "'aa'"], ["solve(7)", "14"]],
        "setup": "",
        "solution": "def solve(n):\n    return n * 2\n",
    },
)
RIGHT = "```python\ndef solve(n):\n    return n * 2\n```"
SHELL: dict[str, Any] = {"shell": True, "max_turns": 8}


async def play(*replies: str, task: Task = TASK, **options: Any) -> list[EnvStep]:
    env = Code(**options).make_env(task, 0)
    await env.start()
    try:
        return [await env.step(assistant(reply)) for reply in replies]
    finally:
        await env.close()


async def test_code_that_passes_is_told_so_and_submit_is_judged_by_the_hidden_tests() -> None:
    tried, submitted = await play(RIGHT, "submit")
    assert tried.messages[0].content == "2 of 2 tests pass. Say submit, or write it again."
    assert tried.reward_parts == {"format": 0.1}
    assert submitted.reward_parts == {"outcome": 1.0}
    assert submitted.is_success
    assert submitted.info["hidden_tests_passed_share"] == 1.0


async def test_code_and_submit_in_one_reply() -> None:
    (step,) = await play(f"Here it is.\n{RIGHT}\nSubmit.")
    assert step.reward_parts == {"format": 0.1, "outcome": 1.0}


async def test_a_failure_says_what_came_and_what_was_expected() -> None:
    step, *_ = await play("```python\ndef solve(n):\n    print('hm')\n    return n + 2\n```")
    assert step.messages[0].content == ("1 of 2 tests pass.\nsolve(5) gave 7, expected 10.\nIt printed: hm\nhm")
    step, *_ = await play("```python\ndef solve(n):\n    return n / 0\n```")
    assert "solve(2) raised ZeroDivisionError: division by zero (line 2), expected 4." in step.messages[0].content
    step, *_ = await play("```python\ndef solve(n):\n    while True: pass\n```")
    assert step.messages[0].content == "0 of 2 tests pass. The code was stopped: more than 2 s of CPU time."


async def test_passing_the_visible_tests_alone_is_no_success() -> None:
    shown_only = "```python\ndef solve(n):\n    return {2: 4, 5: 10}.get(n)\n```"
    _, step = await play(shown_only, "submit")
    assert (step.reward_parts, step.is_success) == ({"outcome": 0.0}, False)
    _, step = await play("```python\ndef solve(n):\n    return abs(n) * 2\n```", "submit", partial_credit=0.5)
    assert step.reward_parts == {"outcome": 0.5 * 2 / 4}


@pytest.mark.parametrize(
    "code",
    [
        "class Yes:\n    def __eq__(self, other): return True\ndef solve(n): return Yes()",
        "class Four:\n    def __repr__(self): return '4'\ndef solve(n): return Four()",
        'import os\nfor fd in range(3, 20):\n    try: os.write(fd, b\'{"value": "4"}\\n\' * 9)\n    except: pass',
        "print('{\"passed\": true}')\nraise SystemExit(0)",
        "import sys, os\nos._exit(0)",
        "import gc\nfor each in gc.get_objects():\n    if isinstance(each, dict): each['expected'] = 4",
    ],
)
async def test_tricks_get_no_outcome(code: str) -> None:
    *_, step = await play(f"```python\n{code}\n```", "submit")
    assert step.reward_parts == {"outcome": 0.0}


async def test_the_last_turn_judges_the_last_code() -> None:
    wrong = RIGHT.replace("2", "3")
    *_, step = await play(wrong, "hmm", RIGHT, max_turns=3)
    assert step.is_success
    *_, step = await play(wrong, RIGHT, wrong, max_turns=3)
    assert step.terminated
    assert not step.is_success


async def test_replies_without_code_are_unparsable_and_the_attempt_ends_in_time() -> None:
    steps = await play("submit", "I think so.", "", max_turns=3)
    assert [step.is_unparsable for step in steps] == [True] * 3
    assert [step.terminated for step in steps] == [False, False, True]
    assert sum(sum(step.reward_parts.values()) for step in steps) == 0


@pytest.mark.parametrize(
    ("text", "code", "says_submit"),
    [
        ("```python\nx = 1\n```", "x = 1\n", False),
        ("```\nx = 1\n```\nthen\n```py\nx = 2\n```\nsubmit", "x = 2\n", True),
        ("```python\nx = 1  # cut", "x = 1  # cut", False),
        ("Sure:\ndef f():\n    return 1\n\nsubmit", "def f():\n    return 1\n\n", True),
        ("```python\nsubmit\n```", "submit\n", False),
        ("I will submit it later", None, False),
        (" SUBMIT! ", None, True),
    ],
)
def test_replies_are_read_as_people_write_them(text: str, code: str | None, says_submit: bool) -> None:
    assert read_reply(text) == (code, says_submit)


async def test_with_a_shell_the_code_is_a_file_that_commands_change_and_the_hidden_tests_judge() -> None:
    wrong = RIGHT.replace("n * 2", "n * 3")
    steps = await play("$ ls", wrong, "$ sed -i 's/3/2/' solution.py; cat solution.py", "test", "submit", **SHELL)
    assert [step.messages[0].content for step in steps[:4]] == [
        "[no output]",
        "0 of 2 tests pass.\nsolve(2) gave 6, expected 4.\nsolve(5) gave 15, expected 10.",
        "def solve(n):\n    return n * 2",
        "2 of 2 tests pass. Say submit, or write it again.",
    ]
    assert [sum(step.reward_parts.values()) for step in steps] == [0.0, 0.1, 0.0, 0.0, 1.0]


async def test_what_a_shell_leaves_in_place_of_the_code_is_not_followed() -> None:
    link = "$ rm -f solution.py; ln -s /etc/passwd solution.py"
    steps = await play(RIGHT, link, "$ rm solution.py; mkdir solution.py", RIGHT, "submit", **SHELL)
    assert steps[-1].is_success  # the last code counts
    (ended,) = await play("$ true", max_turns=1, shell=True)
    assert (ended.terminated, ended.is_success) == (True, False)
    (step,) = await play("$ ls")  # without the option a command is no code
    assert step.is_unparsable


async def test_a_fork_goes_on_in_a_shell_of_its_own() -> None:
    env = Code(**SHELL).make_env(TASK, 0)
    await env.start()
    for reply in (RIGHT, "$ X=7"):
        await env.step(assistant(reply))
    fork = env.fork()
    await env.step(assistant("$ X=8; echo 'def solve(n): return 0' > solution.py"))
    assert (await fork.step(assistant("$ echo $X"))).messages[0].content == "7"
    assert (await fork.step(assistant("submit"))).is_success
    assert not (await env.step(assistant("submit"))).is_success
    for one in (env, fork):
        await one.close()


@pytest.mark.parametrize("level", LEVELS)
def test_generated_solutions_are_right_and_tests_are_their_own(level: Any) -> None:
    rng = random_for("test", level)
    for _ in range(60):
        problem = draw_problem(rng, level)
        namespace: dict[str, Any] = {}
        exec(problem.solution, namespace)  # noqa: S102 - generated here
        for call, expected in (*problem.visible, *problem.hidden):
            assert eval(call, namespace) == ast.literal_eval(expected)  # noqa: S307
        assert len({call for call, _ in (*problem.visible, *problem.hidden)}) == 8
        assert len({expected for _, expected in problem.hidden}) > 1


def test_an_answer_that_is_lazy_in_the_likely_way_fails_a_hidden_test() -> None:
    for task in Code(level="medium").tasks("train", 100, 0):
        source, _, condition = task.data["solution"].partition(" if ")
        lazy: dict[str, Any] = {}
        exec(f"{source}]{condition.partition(']')[2]}", lazy)  # noqa: S102 - without the condition
        results = [eval(call, lazy) == ast.literal_eval(value) for call, value in task.data["hidden"]]  # noqa: S307
        assert not all(results), task.data["question"]


MBPP = {
    "task_id": 2,
    "text": "Write a function to find the shared elements.",
    "code": "def similar(a, b):\n    return tuple(set(a) & set(b))",
    "test_list": [
        "assert set(similar((3, 4), (4, 5))) == set((4,))",
        "assert similar((1, 2), (2, 3)) == (2,)",
        "assert similar((1,), (3,)) == ()",
    ],
    "test_setup_code": "",
}
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": "from typing import List\n\n\ndef double(xs: List[int]) -> List[int]:\n    'Twice each.'\n",
    "entry_point": "double",
    "canonical_solution": "    return [2 * x for x in xs]\n",
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert True\n    assert candidate([1]) == [2]\n"
    "    assert candidate([]) == []\n",
}
APPS = {
    "problem_id": 7,
    "question": "Add two numbers.",
    "input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}),
    "solutions": json.dumps(["def add(a, b):\n    return a + b"]),
}


@pytest.mark.parametrize("row", [MBPP, HUMAN_EVAL, APPS], ids=["mbpp", "humaneval", "apps"])
async def test_the_published_solution_of_a_published_row_succeeds(row: dict[str, Any]) -> None:
    task = row_to_task(row, 1)
    *_, step = await play(f"```python\n{task.data['solution']}\n```\nsubmit", task=task)
    assert step.is_success
    *_, step = await play(f"```python\ndef {task.data['entry_point']}(*args):\n    return None\n```\nsubmit", task=task)
    assert not step.is_success


def test_rows_become_tests_whose_answers_stay_outside_where_that_is_possible() -> None:
    assert row_to_task(MBPP, 1).data["visible"] == [["assert set(similar((3, 4), (4, 5))) == set((4,))"]]
    assert row_to_task(MBPP, 1).data["hidden"] == [["similar((1, 2), (2, 3))", "(2,)"], ["similar((1,), (3,))", "()"]]
    assert row_to_task(MBPP, 1).data["entry_point"] == "similar"
    assert check_to_tests(HUMAN_EVAL["test"], "double") == [CallTest("double([1])", [2]), CallTest("double([])", [])]
    loop = "def check(candidate):\n    for n in range(3):\n        assert candidate([n]) == [2 * n]\n"
    assert check_to_tests(loop, "double") == [StatementTest(f"{loop}\n\ncheck(double)")]


def test_a_file_is_split_by_hash_and_a_folder_keeps_its_splits(tmp_path: Path) -> None:
    rows = [{**MBPP, "task_id": number} for number in range(40)]
    single = tmp_path / "mbpp.jsonl"
    single.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    world = Code(path=single)
    train, test = ({task.id for task in world.tasks(split, 40, 0)} for split in ("train", "test"))
    assert len(train | test) == 40
    assert not train & test
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows[:30])), encoding="utf-8")
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows[25:])), encoding="utf-8")
    world = Code(path=tmp_path)
    assert {task.id for task in world.tasks("test", 10, 0)} == {f"mbpp-{number}" for number in range(30, 40)}
    assert world.demonstrations(1, 0)[0][-1].content == "submit"


def test_a_row_of_another_layout_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"question": "?", "answer": "42"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"row 1: columns question, answer; expected MBPP \(test_list\)"):
        Code(path=path)


@pytest.mark.parametrize("options", [{"level": "epic"}, {"max_turns": 0}, {"partial_credit": 2}, {"sandbox": "docker"}])
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Code(**options)


async def test_the_sandbox_is_an_option() -> None:
    with pytest.warns(SandboxWarning, match="no walls"):
        steps = await play(RIGHT, "submit", sandbox="subprocess")
    assert steps[-1].is_success
