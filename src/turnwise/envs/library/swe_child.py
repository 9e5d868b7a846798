"""The program that runs a repo's unittest suites in a sandbox; `swe_tests.py` starts it.

It reads `{"root", "modules"}` from stdin and writes one JSON line for each test, then `done`. The repo comes last on
Python's path, so that its files cannot replace the standard library. At the end it runs a test that must fail: if it
passes, the code under test has tampered with unittest. Nothing of turnwise is imported.
"""

import json
import os
import sys
import unittest
from typing import Any, TextIO


class Reporter(unittest.TestResult):
    """Writes the result of each test as soon as it is known."""

    def __init__(self, results: TextIO) -> None:
        super().__init__()
        self._results = results

    def send(self, test: object, problem: str | None) -> None:
        name = test.id() if isinstance(test, unittest.TestCase) else str(test)
        self._results.write(json.dumps({"test": name, "problem": problem}) + "\n")
        self._results.flush()

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802 - unittest's own spelling
        self.send(test, None)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self.send(test, describe(err[1]))

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self.send(test, describe(err[1]))

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:  # noqa: ARG002, N802
        if err is not None:
            self.send(test, describe(err[1]))


def describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:200] if lines else type(error).__name__


class MustFail(unittest.TestCase):
    """Passes only if somebody has disabled assertions."""

    def test_equal(self) -> None:
        self.assertEqual(1, 2)  # noqa: PT009 - unittest is what is checked

    def test_true(self) -> None:
        self.assertTrue(False)  # noqa: PT009

    def test_raises(self) -> None:
        with self.assertRaises(ValueError):  # noqa: PT027
            pass

    def test_plain(self) -> None:
        raise AssertionError


def main() -> None:
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as results:
        request = json.loads(sys.stdin.read())
        os.dup2(2, 1)
        root = os.path.realpath(request["root"])
        os.chdir(root)
        sys.path.append(root)
        loader, reporter = unittest.TestLoader(), Reporter(results)
        for module in request["modules"]:
            loader.loadTestsFromName(module).run(reporter)
        rules = unittest.TestResult()
        loader.loadTestsFromTestCase(MustFail).run(rules)
        is_honest = len(rules.failures) == rules.testsRun == 4
        results.write(json.dumps({"done": True, "is_honest": is_honest}) + "\n")


if __name__ == "__main__":
    main()
    os._exit(0)
