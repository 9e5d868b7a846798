"""Whatever the code does, the runner comes back in time, leaves nothing behind and believes no claims."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from turnwise.envs.sandbox import Sandbox, SandboxWarning
from turnwise.errors import ConfigError
from turnwise.single_turn.code_runner import RunLimits, Test, run_tests

LIMITS = RunLimits(cpu_s=10, wall_s=30.0)
SHORT = RunLimits(cpu_s=1, wall_s=3.0)
"""For what would never end; what is to end by itself gets longer, since the machine may be busy."""
SLACK_S = 20.0
"""To start and stop a process on a busy machine."""
ADD = (Test("add(2, 3)", 5), Test("add('a', 'b')", "ab"))


def test_each_test_is_judged_by_itself() -> None:
    outcome = run_tests("def add(a, b):\n    return 5 if a == 2 else 1 / 0", ADD, LIMITS)
    assert outcome.ending == "finished"
    assert outcome.passed == (True, False)
    assert outcome.errors == (None, "ZeroDivisionError: division by zero (line 2)")


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("while True: pass", "timeout"),
        ("import time\ntime.sleep(600)", "timeout"),
        ("import os\nwhile True:\n    os.fork()", "finished"),
        ("while True:\n    try:\n        __import__('os').fork()\n    except OSError:\n        pass", "timeout"),
        ("while True: print('x' * 100000)", "timeout"),
        ("hog = bytearray(1 << 40)", "finished"),
        ("hog = []\nwhile True: hog.append(bytearray(1 << 20))", "finished"),
        ("import os\nos._exit(0)", "crash"),
        ("import sys\nsys.exit(0)", "finished"),
        ("import os\nos.closerange(0, 64)\nwhile True: pass", "timeout"),
        ("def add(a, b):\n    return add(a, b)", "finished"),
        ("def add(", "finished"),
        ("def add(a, b):\n    return '\\ud800'", "finished"),
        ("def add(a, b):\n    return 10**4000", "finished"),
    ],
    ids=[
        "infinite loop",
        "sleep",
        "fork bomb",
        "stubborn fork bomb",
        "huge output",
        "huge allocation",
        "memory hog",
        "early exit",
        "polite exit",
        "closes its pipes",
        "endless recursion",
        "no Python",
        "a broken character",
        "a number too long to print",
    ],
)
def test_code_that_misbehaves_passes_nothing_and_ends_in_time(code: str, ending: str) -> None:
    limits = SHORT if ending == "timeout" else LIMITS
    started = time.monotonic()
    outcome = run_tests(code, ADD, limits)
    assert time.monotonic() - started < limits.wall_s + SLACK_S
    assert (outcome.ending, outcome.num_passed) == (ending, 0)
    assert not processes_running_code()


def processes_running_code() -> list[str]:
    """Command lines of sandboxes of this process that are still there, orphans too; a zombie has none."""
    found: list[str] = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command_line = (place / "cmdline").read_text(encoding="utf-8", errors="replace")
            parent = (place / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
        except OSError:
            continue
        if ".run.py" in command_line and int(parent) in (os.getpid(), 1):
            found.append(command_line)
    return found


def test_not_a_byte_can_be_written_to_a_file() -> None:
    code = "def add(a, b):\n    open('/tmp/written', 'wb', 0).write(b'x')\n    return a + b"
    outcome = run_tests(code, ADD, LIMITS)
    assert outcome.num_passed == 0
    assert "File too large" in (outcome.errors[0] or "")


def test_the_code_inherits_no_environment_no_modules_and_no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    code = "import os, sys"
    tests = (
        Test("'SECRET_TOKEN' in os.environ", False),
        Test("any('site-packages' in place for place in sys.path)", False),
        Test("[name for name in sys.modules if name.startswith('turnwise')]", []),
        Test("os.listdir()", [".run.py"]),
    )
    assert run_tests(code, tests, LIMITS).passed == (True,) * 4


def test_code_started_by_root_is_not_root() -> None:
    outcome = run_tests("import os", (Test("os.geteuid() != 0", True), Test("os.getuid() != 0", True)), LIMITS)
    assert outcome.num_passed == 2


def test_claims_of_success_are_not_believed() -> None:
    printed = "print('passed ' * 1000)\nprint({'value': '5'})"
    assert run_tests(printed, ADD, LIMITS).num_passed == 0
    equal_to_all = "class Yes:\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return Yes()"
    assert run_tests(equal_to_all, ADD, LIMITS).num_passed == 0
    forged = "import os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, b'nonsense\\n' * 99)\n"
    forged += "    except OSError:\n        pass\ndef add(a, b):\n    return a + b"
    assert run_tests(forged, ADD, LIMITS).num_passed == 0


def test_a_flood_on_the_result_pipe_is_cut_off() -> None:
    code = "import os\nwhile True:\n    for fd in range(3, 64):\n        try:\n            os.write(fd, b'x' * 65536)\n"
    code += "        except OSError:\n            pass"
    started = time.monotonic()
    assert run_tests(code, ADD, RunLimits(cpu_s=60, wall_s=60.0)).num_passed == 0
    assert time.monotonic() - started < SLACK_S


def test_values_are_compared_as_python_compares_them() -> None:
    tests = (Test("[1, (2, 3)]", [1, (2, 3)]), Test("{'a': {1, 2}}", {"a": {2, 1}}), Test("6.0", 6), Test("None", None))
    assert run_tests("", tests, LIMITS).passed == (True,) * 4


def test_common_modules_can_be_imported() -> None:
    code = "import collections, functools, itertools, math, re\ndef area(r):\n    return math.floor(math.pi * r * r)"
    assert run_tests(code, (Test("area(10)", 314),), LIMITS).num_passed == 1


def test_limits_without_walls_are_asked_for_and_warned_of() -> None:
    with pytest.warns(SandboxWarning, match="no walls"):
        sandbox = Sandbox("subprocess")
    assert run_tests("def add(a, b):\n    return a + b", ADD, LIMITS, sandbox).num_passed == 2
    assert run_tests("while True: pass", ADD, SHORT, sandbox).ending == "timeout"
    not_root = run_tests("import os", (Test("os.geteuid() != 0", True),), LIMITS, sandbox)
    assert not_root.num_passed == 1


def test_runs_leave_no_file_descriptors_and_no_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_tests("", ADD, LIMITS)
    before = sorted(Path("/proc/self/fd").iterdir())
    for _ in range(3):
        run_tests("x = 1", ADD, LIMITS)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limits", [{"cpu_s": 0}, {"wall_s": 0}, {"memory_bytes": 1000}, {"file_bytes": -1}])
def test_limits_that_cannot_work_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        RunLimits(**limits)
