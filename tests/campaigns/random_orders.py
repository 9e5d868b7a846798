"""The tests in random orders: no test may rely on another one.

    make campaign NAME=random_orders ARGS="--orders 10 --parallel 4"
    PYTHONPATH=tests python -m campaigns.random_orders --orders 3 tests/unit/envs

First the tests run in the order of the files, then in `--orders` random orders (seeds 1, 2, ...), `--parallel` runs at
a time. Every run is a process of its own with a temporary folder of its own. Every test that fails in any of them is a
finding. It is then run by itself. If it fails in the order of the files and alone, it is broken, whatever the order. If
it fails only in random orders and alone, it needs something that an earlier test leaves. One that passes alone is
disturbed by another test, or by the load.

The report is JSON on stdout, and the exit status is 1 if there is a finding.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
RUN_S = 7200.0
"""How long one run may take; one that is slower is a finding."""
SHOWN_CHARACTERS = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRun:
    """One run of the tests."""

    seed: int | None
    """None: the order of the files."""
    num_tests: int
    failures: dict[str, str]
    """By test, the end of its message."""
    seconds: float
    problem: str = ""
    """Why the run itself is no good: it found no tests, or it did not end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A test that fails in at least one run."""

    test: str
    seeds: list[int]
    """The random orders in which it fails."""
    fails_in_file_order: bool
    message: str
    fails_alone: bool
    """False: another test disturbs it, or the load does."""

    @property
    def where(self) -> str:
        orders = ["in the order of the files"] if self.fails_in_file_order else []
        return " and ".join([*orders, *([f"with seeds {self.seeds}"] if self.seeds else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class OrdersReport:
    """What the campaign found."""

    runs: list[OrderRun]
    findings: list[Finding] = field(default_factory=list[Finding])

    @property
    def problems(self) -> list[str]:
        broken = [f"seed {run.seed}: {run.problem}" for run in self.runs if run.problem]
        return [*broken, *(f"{one.test} fails {one.where}" for one in self.findings)]


def run_tests(seed: int | None, tests: Sequence[str], options: Sequence[str] = ()) -> OrderRun:
    """Run the tests once, in the order of that seed."""
    with tempfile.TemporaryDirectory(prefix="turnwise-order-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += [f"--basetemp={Path(folder) / 'tests'}", *options]
        if seed is not None:
            command += ["--random-order", str(seed)]
        started, problem = time.monotonic(), ""
        try:
            done = subprocess.run(
                [*command, *tests], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=RUN_S,
                check=False,
            )  # fmt: skip
            if done.returncode not in (0, 1):
                problem = f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-SHOWN_CHARACTERS:]}"
        except subprocess.TimeoutExpired:
            problem = f"not over after {RUN_S:.0f} s"
        seconds = time.monotonic() - started
        num_tests, failures = _read_report(report)
        if not (num_tests or problem):
            problem = "no test ran"
        return OrderRun(seed=seed, num_tests=num_tests, failures=failures, seconds=round(seconds, 1), problem=problem)


def _read_report(report: Path) -> tuple[int, dict[str, str]]:
    if not report.exists():
        return 0, {}
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failures: dict[str, str] = {}
    for case in cases:
        bad = [part for part in case if part.tag in ("failure", "error")]
        if bad:
            name = f"{str(case.get('classname')).replace('.', '/')}.py::{case.get('name')}"
            failures[name] = "\n".join(str(part.text) for part in bad)[-SHOWN_CHARACTERS:]
    return len(cases), failures


def run_orders(tests: Sequence[str], *, orders: int, parallel: int, options: Sequence[str] = ()) -> OrdersReport:
    """Run the tests in file order and in `orders` random orders, and look closer at every test that fails."""
    with ThreadPoolExecutor(parallel) as pool:
        seeds: list[int | None] = [None, *range(1, orders + 1)]
        runs = list(pool.map(lambda seed: run_tests(seed, tests, options), seeds))
    broken: dict[str, list[OrderRun]] = {}
    for run in runs:
        for test in run.failures:
            broken.setdefault(test, []).append(run)
    findings = [
        Finding(
            test=test,
            seeds=[run.seed for run in own if run.seed is not None],
            fails_in_file_order=any(run.seed is None for run in own),
            message=own[0].failures[test],
            fails_alone=bool(run_tests(None, [test], options).failures),
        )
        for test, own in broken.items()
    ]
    return OrdersReport(runs=runs, findings=findings)


def main() -> int:
    parser = argparse.ArgumentParser(description="run the tests in random orders and report what depends on the order")
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or folders; default: all tests")
    parser.add_argument("--orders", type=int, default=10, help="how many random orders (default 10)")
    parser.add_argument("--parallel", type=int, default=1, help="how many runs at a time (default 1)")
    parser.add_argument("--marks", default="not gpu", help="pytest's -m (default: not gpu)")
    arguments = parser.parse_args()
    report = run_orders(
        arguments.tests, orders=arguments.orders, parallel=arguments.parallel, options=["-m", arguments.marks]
    )
    print(json.dumps({**asdict(report), "problems": report.problems}, indent=2))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
