"""`swe`: the fix is judged in a fresh copy by hidden tests, and nothing but the fix gets the reward."""

from __future__ import annotations

import json
import random
import re
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from turnwise.envs.base import EnvStep, Task, assistant
from turnwise.envs.library.swe import Swe, read_action
from turnwise.envs.library.swe_bugs import (
    Bug,
    apply_bug,
    candidates,
    judge_bug,
    read_hidden,
    read_repo,
    repo_names,
    shipped_bugs,
    shown_modules,
    try_bug,
)
from turnwise.envs.library.swe_patch import apply_patch
from turnwise.envs.library.swe_tests import run_suite
from turnwise.envs.sandbox import Sandbox
from turnwise.envs.tools import format_tool_call
from turnwise.errors import ConfigError, DataError


def bug_in(path: str, old: str) -> Bug:
    return next(bug for bug in shipped_bugs().values() if bug.path == path and bug.old == old)


BUG = bug_in("ledger/split.py", "+")
TASK = Task(id="swe-split", data={"bug": BUG.id})
BROKEN = "    return [share - 1 if place < rest else share for place in range(people)]"
FIXED = BROKEN.replace("-", "+")
EDIT = f"edit ledger/split.py\n-{BROKEN}\n+{FIXED}"


async def play(*replies: str, task: Task = TASK, **options: Any) -> list[EnvStep]:
    env = Swe(**options).make_env(task, 0)
    try:
        await env.start()
        return [await env.step(assistant(reply)) for reply in replies]
    finally:
        await env.close()


def text_of(step: EnvStep) -> str:
    return "\n".join(message.content for message in step.messages)


async def test_look_edit_test_submit() -> None:
    before, look, edit, test, end = await play("test", "$ grep -n return ledger/split.py", EDIT, "test", "submit")
    assert text_of(before).startswith("8 of 9 tests pass.\ntest_ledger.SplitTest.test_split: ")
    assert text_of(look).startswith(f"8:{BROKEN}\n")
    assert (text_of(edit), edit.reward_parts) == ("line 8 changed.", {"format": 0.1})
    assert text_of(test) == "9 of 9 tests pass."
    assert (end.reward_parts, end.is_success) == ({"outcome": 1.0}, True)
    assert end.info == {"fail_to_pass_share": 1.0, "pass_to_pass_share": 1.0, "edits": 1.0}


async def test_the_shell_lives_through_the_dialogue_and_its_changes_count() -> None:
    moved, fixed, end = await play(
        "$ cd ledger; LINE=8", "$ sed -i ${LINE}s/-/+/ split.py; sed -n ${LINE}p $PWD/split.py", "submit"
    )
    assert text_of(moved) == "[no output]"
    assert text_of(fixed) == FIXED
    assert end.is_success


async def test_an_unfixed_repo_is_no_success() -> None:
    (end,) = await play("submit")
    assert (end.reward_parts, end.is_success) == ({"outcome": 0.0}, False)
    _, end = await play("$ ls", "submit")
    assert (end.reward_parts, end.is_success) == ({"outcome": 0.0}, False)
    assert end.info == {"fail_to_pass_share": 0.0, "pass_to_pass_share": 1.0, "edits": 0.0}


async def test_a_fix_for_the_shown_tests_alone_is_no_success() -> None:
    special = f"edit ledger/split.py\n-{BROKEN}\n+    return [4, 3, 3] if amount == 10 else [share] * people"
    _, test, end = await play(special, "test", "submit")
    assert text_of(test) == "9 of 9 tests pass."
    assert not end.is_success


@pytest.mark.parametrize(
    "trick",
    [
        "$ rm -r tests",
        "$ for f in tests/*.py; do echo > $f; done",
        "$ echo 'import unittest; unittest.TestCase.assertEqual = lambda *a: None' >> ledger/__init__.py",
        "$ printf 'import os\\nos._exit(0)\\n' >> ledger/__init__.py",
        "$ printf 'class TestCase: pass\\n' > unittest.py",
        "$ printf 'import os\\nos._exit(0)\\n' > sitecustomize.py",
        "$ ln -s /opt/python/lib ledger/split; rm ledger/split.py; ln -s ../tests/test_ledger.py ledger/split.py",
        "$ printf 'import sys\\nprint(sys.__stdout__.write(chr(10)))\\n' > tests/__init__.py",
        "$ head -c 40M /dev/urandom > a; for i in 1 2 3; do head -c 15M /dev/urandom > b$i; done",
    ],
)
async def test_tricks_get_no_outcome(trick: str) -> None:
    *_, end = await play(trick, "submit")
    assert (end.reward_parts, end.is_success) == ({"outcome": 0.0}, False)


async def test_tests_that_were_broken_on_the_way_do_no_harm_to_a_fix() -> None:
    *_, end = await play(f"edit ledger/split.py 8\n+{FIXED}", "$ rm -r tests; echo broken > tests; ls", "submit")
    assert end.is_success


async def test_edits_that_do_not_fit_say_why() -> None:
    missing, twice, beyond, other, nowhere, outside, new = await play(
        f"edit ledger/split.py\n-{BROKEN}  # wrong\n+    x",
        "edit ledger/accounts.py\n-        if amount <= 0:\n+        if amount < 0:",
        "edit ledger/split.py 99\n+b",
        f"edit ledger/split.py 8\n-{FIXED}\n+b",
        "edit nowhere.py\n-a\n+b",
        "edit ../../etc/passwd\n-a\n+b",
        "edit notes/new.txt\n+hello",
        max_turns=9,
    )
    assert text_of(missing) == f"error: no such lines; the nearest is {BROKEN!r}"
    assert text_of(twice) == "error: these lines stand there 2 times; say which by number"
    assert text_of(beyond) == "error: the file has 24 lines"
    assert text_of(other) == f"error: line 8 is {BROKEN!r}"
    assert text_of(nowhere) == "error: there is no such file"
    assert "expected the path of a file in /work" in text_of(outside)
    assert text_of(new) == "written."
    assert [step.reward_parts.get("format", 0) for step in (missing, twice, new)] == [0, 0, 0.1]


async def test_the_last_turn_submits_and_replies_without_an_action_are_unparsable() -> None:
    lost, end = await play("I am not sure.", EDIT, max_turns=2)
    assert lost.is_unparsable
    assert end.terminated
    assert (end.reward_parts, end.is_success) == ({"format": 0.1, "outcome": 1.0}, True)


async def test_a_command_that_hangs_is_stopped_and_the_attempt_goes_on() -> None:
    late, after, *_ = await play("$ sleep 100", "$ pwd", command_s=2.5)
    assert text_of(late) == "[stopped: not done after 2.5 s; it was killed with all of its processes]"
    assert text_of(after) == "/work"


async def test_tool_calls_do_the_same() -> None:
    steps = await play(
        format_tool_call("shell", command="ls"),
        format_tool_call("edit", path="ledger/split.py", old=BROKEN, new=FIXED),
        format_tool_call("test"),
        format_tool_call("submit"),
        protocol="tool_call",
    )
    assert text_of(steps[0]) == "ledger\ntests"
    assert text_of(steps[2]) == "9 of 9 tests pass."
    assert steps[3].is_success


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("$ ls", "shell", {"command": "ls"}),
        ("Let me look.\n$ cd a\n$ ls", "shell", {"command": "cd a\nls"}),
        ("```bash\nls\n```", "shell", {"command": "ls\n"}),
        ("edit a.py\n-x\n+y\n+z\nDone.", "edit", {"path": "a.py", "old": "x", "new": "y\nz"}),
        ("edit a.py 12\n+y", "edit", {"path": "a.py", "line": 12, "new": "y"}),
        ("Submit it? No:\ntest", "test", {}),
        ("submit.", "submit", {}),
    ],
)
def test_the_first_action_of_a_reply_counts(text: str, name: str, arguments: dict[str, str]) -> None:
    action = read_action(text)
    assert action is not None
    assert (action.name, dict(action.arguments)) == (name, arguments)


@pytest.mark.parametrize("repo", repo_names())
async def test_every_repo_passes_its_shown_and_hidden_tests_without_a_bug(repo: str) -> None:
    files = {**read_repo(repo), **read_hidden(repo)}
    report = await run_suite(Sandbox(), files, [*shown_modules(repo), "tests.test_hidden"])
    assert (report.failed, report.verdict) == ({}, "")
    assert len(report.problems) >= 13


async def test_shipped_bugs_fail_the_tests_they_name() -> None:
    sandbox = Sandbox()
    for bug in random.Random(0).sample(list(shipped_bugs().values()), 12):
        assert judge_bug(bug, await try_bug(sandbox, bug)) == bug


def test_shipped_bugs_are_changes_of_the_shipped_repos() -> None:
    places = {
        (each.repo, each.path, each.line, each.column, each.new) for name in repo_names() for each in candidates(name)
    }
    for bug in shipped_bugs().values():
        assert (bug.repo, bug.path, bug.line, bug.column, bug.new) in places
        assert apply_bug(bug)[bug.path] != read_repo(bug.repo)[bug.path]
    assert len(shipped_bugs()) >= 150


# --- tasks in the style of SWE-bench ---------------------------------------------------------------------------------

TEST_PATCH = """\
diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -3,2 +3,6 @@
 def test_one():
     assert add(1, 0) == 1
+
+
+def test_two():
+    assert add(2, 3) == 5
"""
FILES = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    "tests/test_calc.py": "from calc import add\n\ndef test_one():\n    assert add(1, 0) == 1\n",
}


def write_repo(root: Path) -> Path:
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def write_rows(path: Path, repos: Sequence[str], **more: Any) -> Path:
    rows = [
        {
            "instance_id": f"calc-{number}",
            "repo": repo,
            "problem_statement": "add() subtracts.",
            "test_patch": TEST_PATCH,
            "FAIL_TO_PASS": json.dumps(["tests/test_calc.py::test_two"]),
            "PASS_TO_PASS": ["tests/test_calc.py::test_one"],
            **more,
        }
        for number, repo in enumerate(repos)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def make_repo(kind: str, root: Path) -> tuple[str, dict[str, str]]:
    folder = write_repo(root / "calc")
    if kind == "folder":
        return "calc", {}
    if kind == "archive":
        with tarfile.open(root / "calc.tar.gz", "w:gz") as archive:
            archive.add(folder, "calc-1.0")
        return "calc.tar.gz", {}
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "broken"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (folder / "calc.py").write_text("later state", encoding="utf-8")
    return "calc", {"base_commit": head}


@pytest.mark.parametrize("kind", ["folder", "archive", "git"])
async def test_a_swe_style_row_is_played_and_judged_with_its_hidden_tests(kind: str, tmp_path: Path) -> None:
    repo, more = make_repo(kind, tmp_path)
    world = Swe(path=write_rows(tmp_path / "tasks.jsonl", [repo] * 10, **more))
    (task,) = world.tasks("train", 1, 0)
    fixed = "edit calc.py\n-    return a - b\n+    return a + b"

    async def outcome(*replies: str) -> list[EnvStep]:
        env = world.make_env(task, 0)
        try:
            first = await env.start()
            assert first[-1].content == "add() subtracts."
            return [await env.step(assistant(reply)) for reply in replies]
        finally:
            await env.close()

    test, _, after, end = await outcome("test", fixed, "$ cat tests/test_calc.py", "submit")
    assert text_of(test) == "1 of 1 tests pass."
    assert "test_two" not in text_of(after)
    assert end.is_success
    _, end = await outcome("$ ls", "submit")
    assert end.info == {"fail_to_pass_share": 0.0, "pass_to_pass_share": 1.0, "edits": 0.0}
    _, end = await outcome("$ printf 'def pytest_runtest_call(item): item.obj = lambda: 0' > conftest.py", "submit")
    assert not end.is_success


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"repo": "nowhere"}, "does not exist; expected a folder"),
        ({"FAIL_TO_PASS": "x"}, "is not a list of tests"),
        ({"FAIL_TO_PASS": []}, "nothing would have to be fixed"),
        ({"test_patch": TEST_PATCH.replace("add(1, 0)", "add(9, 9)")}, "does not fit the file"),
        ({"base_commit": "0" * 40}, "git archive of 0000"),
    ],
)
def test_rows_that_cannot_be_played_are_named_at_once(more: dict[str, Any], problem: str, tmp_path: Path) -> None:
    write_repo(tmp_path / "calc")
    with pytest.raises(ConfigError, match=f"row 1: .*{problem}"):
        Swe(path=write_rows(tmp_path / "tasks.jsonl", ["calc"], **more))


def test_patches_add_change_rename_and_remove_files() -> None:
    files = {"a.txt": b"one\ntwo\nthree\n", "b.txt": b"x\n", "c.txt": b"- old\n--- not a header\n"}
    patch = (
        "--- a/a.txt\n+++ b/a.txt\n@@ -11,3 +11,3 @@\n one\n-two\n+2\n three\n"
        "--- a/b.txt\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
        "--- /dev/null\n+++ b/new/d.txt\n@@ -0,0 +1,2 @@\n+hello\n+world\n"
        "--- a/c.txt\n+++ b/c.txt\n@@ -1,2 +1 @@\n - old\n---- not a header\n"
    )
    assert apply_patch(files, patch) == {"a.txt": b"one\n2\nthree\n", "new/d.txt": b"hello\nworld", "c.txt": b"- old\n"}
    with pytest.raises(DataError, match=r"changes z\.txt, which is not in the repo"):
        apply_patch(files, "--- a/z.txt\n+++ b/z.txt\n@@ -1 +1 @@\n-a\n+b\n")


@pytest.mark.parametrize("options", [{"max_turns": 0}, {"command_s": 0}, {"observation_chars": 5}])
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected at least 1 turn"):
        Swe(**options)


def test_demonstrations_use_no_line_number_that_was_not_shown_before() -> None:
    for hint in ("none", "line"):
        for dialogue in Swe(hint=hint).demonstrations(8, 0):
            shown = dialogue[1].content
            for message in dialogue[2:]:
                if message.role != "assistant":
                    shown += f"\n{message.content}"
                elif message.content.startswith("edit"):
                    number = message.content.split("\n")[0].split()[-1]
                    assert re.search(rf"(?<!\d){number}(?!\d)", shown), (message.content, shown)
            assert [message.content for message in dialogue if message.role == "assistant"][-1] == "submit"
            assert re.fullmatch(r"(\d+) of \1 tests pass\.", dialogue[-2].content)


async def test_the_hint_names_the_line_and_is_for_shipped_bugs(tmp_path: Path) -> None:
    env = Swe(hint="line").make_env(TASK, 0)
    assert (await env.start())[1].content.endswith("].\nBug: ledger/split.py, line 8")
    with pytest.raises(ConfigError, match="hint='line' is for shipped bugs"):
        Swe(hint="line", path=tmp_path / "tasks.jsonl")
