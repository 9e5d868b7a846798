"""Reads programming problems as published: rows in the layouts of MBPP, HumanEval and APPS, one JSON object per line.

    MBPP       {"task_id", "text" or "prompt", "code", "test_list": ["assert f(1) == 2", ...]}
    HumanEval  {"task_id", "prompt", "entry_point", "canonical_solution", "test": "def check(candidate): ..."}
    APPS       {"question", "input_output": {"fn_name", "inputs", "outputs"}, "solutions"}; problems that are
               called, not those that read standard input

A test that compares a call with a literal is checked outside the sandbox. Any other test runs inside it.
"""

from __future__ import annotations

import ast
import builtins
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.envs.base import Split, Task
from turnwise.envs.rows import Row, read_rows
from turnwise.envs.sandbox.python_tests import CallTest, PythonTest, StatementTest, statement_to_test
from turnwise.envs.splits import in_split
from turnwise.errors import ConfigError

_LAYOUTS = "MBPP (test_list), HumanEval (entry_point and test) or APPS (input_output with fn_name)"


def load_problems(path: Path, num_visible: int) -> Mapping[Split, Sequence[Task]]:
    """Load both splits: `train.jsonl` and `test.jsonl` of a folder, or one file, divided by the hash of its ids."""
    path = path.expanduser()
    if path.is_dir():
        train, test = (_read_file(path / f"{split}.jsonl", num_visible) for split in ("train", "test"))
        seen = {task.id for task in train}
        return {"train": train, "test": [task for task in test if task.id not in seen]}
    tasks = _read_file(path, num_visible)
    return {"train": in_split(tasks, "train"), "test": in_split(tasks, "test")}


def _read_file(path: Path, num_visible: int) -> list[Task]:
    tasks: dict[str, Task] = {}
    for number, row in enumerate(read_rows(path), start=1):
        try:
            task = row_to_task(row, num_visible)
        except ConfigError as error:
            raise ConfigError(f"{path}, row {number}: {error}") from error
        tasks[task.id] = task
    return list(tasks.values())


def row_to_task(row: Row, num_visible: int) -> Task:
    """Make a task from a row of any known layout."""
    if isinstance(row.get("test_list"), list):
        return _mbpp(row, num_visible)
    if isinstance(row.get("entry_point"), str) and isinstance(row.get("test"), str):
        return _human_eval(row, num_visible)
    if "input_output" in row:
        return _apps(row, num_visible)
    raise ConfigError(f"columns {', '.join(list(row)[:6])}; expected {_LAYOUTS}")


def _mbpp(row: Row, num_visible: int) -> Task:
    question = _text(row, "text", "prompt")
    lines: list[object] = [*row["test_list"], *(row.get("challenge_test_list") or [])]
    asserts = [str(line) for line in lines]
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or [])
    tests = [statement_to_test(line) for line in asserts]
    if not tests:
        raise ConfigError("test_list is empty; expected at least one assert")
    solution = f"{setup}\n{row['code']}" if setup and "code" in row else row.get("code")
    return _task(
        f"mbpp-{row.get('task_id')}", question, _called_name(tests), _divide(tests, num_visible), solution, setup
    )


def _human_eval(row: Row, num_visible: int) -> Task:
    prompt, name = _text(row, "prompt"), str(row["entry_point"])
    tests = check_to_tests(str(row["test"]), name)
    solution = prompt + str(row["canonical_solution"]) if "canonical_solution" in row else None
    question = f"Complete the function.\n{prompt.rstrip()}"
    # The imports before the first function belong to the problem: an answer need not repeat them.
    setup = "\n".join(line for line in prompt.splitlines() if line.startswith(("import ", "from ")))
    return _task(str(row.get("task_id")), question, name, _divide(tests, num_visible), solution, setup)


def check_to_tests(source: str, name: str) -> list[PythonTest]:
    """Turn `def check(candidate)` into one test per assert, or into a single test if it does more than assert."""
    whole = StatementTest(f"{source}\n\ncheck({name})")
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ConfigError(f"test is not Python: {error}") from error
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if not checks:
        raise ConfigError("test has no function check(candidate)")
    if not all(isinstance(node, ast.Assert) for node in checks[0].body):
        return [whole]

    class Named(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.Name:
            return ast.Name(id=name, ctx=node.ctx) if node.id == "candidate" else node

    tests = [statement_to_test(ast.unparse(Named().visit(node))) for node in checks[0].body]
    telling = [test for test in tests if name in str(test)]  # some files begin with `assert True`
    return telling or [whole]


def _apps(row: Row, num_visible: int) -> Task:
    cases: Any = row["input_output"]
    try:
        cases = json.loads(cases) if isinstance(cases, str) else cases
        name, pairs = cases["fn_name"], list(zip(cases["inputs"], cases["outputs"], strict=True))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"input_output has no fn_name with inputs and outputs ({error!r})") from error
    tests: list[PythonTest] = [
        CallTest(f"{name}({', '.join(map(repr, arguments))})", value[0] if isinstance(value, list) else value)
        for arguments, value in pairs
    ]
    if not tests:
        raise ConfigError("input_output holds no case; expected at least one")
    solutions: Any = row.get("solutions")
    solutions = json.loads(solutions) if isinstance(solutions, str) and solutions else solutions
    task_id = f"apps-{row.get('problem_id', row.get('id'))}"
    return _task(
        task_id, _text(row, "question"), name, _divide(tests, num_visible), solutions[0] if solutions else None, ""
    )


def _divide(tests: Sequence[PythonTest], num_visible: int) -> tuple[Sequence[PythonTest], Sequence[PythonTest]]:
    """Divide tests into shown and hidden ones. A single test is both."""
    shown = tests[: max(1, min(num_visible, len(tests) - 1))]
    return shown, tests[len(shown) :] or tests


def _task(
    task_id: str,
    question: str,
    name: str,
    tests: tuple[Sequence[PythonTest], Sequence[PythonTest]],
    solution: object,
    setup: str,
) -> Task:
    shown, hidden = tests
    data = {
        "question": question.strip(),
        "entry_point": name,
        "visible": [test_to_json(test) for test in shown],
        "hidden": [test_to_json(test) for test in hidden],
        "setup": setup,
        "solution": solution if isinstance(solution, str) else "",
    }
    return Task(id=task_id, data=data)


def test_to_json(test: PythonTest) -> list[str]:
    return [test.call, repr(test.expected)] if isinstance(test, CallTest) else [test.statements]


def json_to_test(item: Sequence[str]) -> PythonTest:
    return CallTest(item[0], ast.literal_eval(item[1])) if len(item) == 2 else StatementTest(item[0])


def _called_name(tests: Sequence[PythonTest]) -> str:
    """The first function called by a test that is not a Python builtin."""
    for test in tests:
        for node in ast.walk(ast.parse(test.call if isinstance(test, CallTest) else test.statements)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in _BUILTINS:
                return node.func.id
    raise ConfigError("the tests call no function; expected `assert f(...) == ...`")


_BUILTINS = frozenset(dir(builtins))


def _text(row: Row, *names: str) -> str:
    for name in names:
        if isinstance(row.get(name), str) and row[name].strip():
            return row[name]
    raise ConfigError(f"no text in {' or '.join(names)}")
