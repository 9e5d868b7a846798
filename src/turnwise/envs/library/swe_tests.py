"""Runs the tests of a repo in a new sandbox, on a new copy of its files.

Tests run in the same process as the code that they test, so malicious code can deceive them. These measures make it
harder: tests and settings of test runners are restored first, the standard library cannot be shadowed, a test run that
does not finish passes nothing, and disabled assertions are noticed.
"""

from __future__ import annotations

import io
import json
import re
import secrets
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from turnwise.envs.sandbox import Limits, Sandbox
from turnwise.errors import SandboxError

Runner = Literal["unittest", "pytest"]

SUITE_LIMITS = Limits(wall_s=60.0, cpu_s=30, processes=32, file_bytes=32 << 20, disk_bytes=128 << 20)

_CHILD = Path(__file__).with_name("swe_child.py")
_UNPACK = "mkdir repo && tar -xf .repo.tar -C repo && rm .repo.tar && exec "
_PYTEST = "python3 -P -B -m pytest -q -rA --tb=no --no-header -p no:cacheprovider -o pythonpath=. -o addopts="
_LINE = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) (\S+)(?: - (.*))?$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteReport:
    """How each test went, and how the run ended."""

    problems: Mapping[str, str | None]
    """What went wrong, by test; None if it passed. Tests that did not run are missing."""
    verdict: str
    """Why the test run did not finish. Empty if it did."""

    @property
    def failed(self) -> dict[str, str]:
        return {test: problem for test, problem in self.problems.items() if problem is not None}

    def share_passed(self, tests: Sequence[str]) -> float:
        """The share of these tests that passed: 0 if the test run did not finish, 1 if there are no tests."""
        if self.verdict:
            return 0.0
        passed = sum(test in self.problems and self.problems[test] is None for test in tests)
        return passed / len(tests) if tests else 1.0


async def run_suite(
    sandbox: Sandbox,
    files: Mapping[str, bytes],
    tests: Sequence[str],
    runner: Runner = "unittest",
    limits: Limits = SUITE_LIMITS,
) -> SuiteReport:
    """Run test modules (unittest: `tests.test_x`) or files and ids (pytest: `tests/test_x.py::test_y`)."""
    if runner == "unittest":
        return await _run_unittest(sandbox, files, tests, limits)
    return await _run_pytest(sandbox, files, tests, limits)


async def _run_unittest(
    sandbox: Sandbox, files: Mapping[str, bytes], modules: Sequence[str], limits: Limits
) -> SuiteReport:
    name = f"{secrets.token_hex(8)}.py"  # the file has no name, so the code under test cannot write to it
    command = f"{_UNPACK}python3 -I -S -B {name}"
    request = json.dumps({"root": "repo", "modules": list(modules)})
    given = {".repo.tar": _to_tar(files), name: _child_source()}
    result = await sandbox.run(["bash", "-c", command], stdin=request, files=given, limits=limits)
    problems: dict[str, str | None] = {}
    is_done = is_honest = False
    for line in result.stdout.splitlines():
        try:
            report = json.loads(line)
        except ValueError:
            break
        if "test" in report:
            problems[report["test"]] = report["problem"] or problems.get(report["test"])
        is_done, is_honest = "done" in report, bool(report.get("is_honest"))
    if "repo" in result.stderr and "tar:" in result.stderr and not problems:
        raise SandboxError(f"the repo could not be unpacked: {result.stderr[-200:]}")
    verdict = result.verdict() or ("" if is_done else "the tests ended before their end")
    return SuiteReport(problems=problems, verdict=verdict or ("" if is_honest else "assertions were tampered with"))


async def _run_pytest(sandbox: Sandbox, files: Mapping[str, bytes], ids: Sequence[str], limits: Limits) -> SuiteReport:
    targets = sorted({test.partition("::")[0] for test in ids})  # whole files, so that ids need no quoting
    command = f"{_UNPACK}bash -c 'cd repo && exec {_PYTEST} {' '.join(map(shlex.quote, targets))}'"
    result = await sandbox.run(["bash", "-c", command], files={".repo.tar": _to_tar(files)}, limits=limits)
    if "No module named pytest" in result.stderr:
        raise SandboxError("pytest is not in the sandbox; make it with packages=['pytest']")
    found = _LINE.findall(result.stdout)
    problems = {test: None if word in ("PASSED", "XFAIL") else (text or word.lower()) for word, test, text in found}
    has_run = result.ending == "finished" and result.exit_code in (0, 1)
    return SuiteReport(problems=problems, verdict="" if has_run else result.verdict() or "pytest did not run")


@cache
def _child_source() -> bytes:
    return _CHILD.read_bytes()


def _to_tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
