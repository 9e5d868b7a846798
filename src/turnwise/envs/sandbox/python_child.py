"""The program that runs a policy's code and its tests; `python_tests.py` starts it in a sandbox.

It reads `{"code", "tests", ...}` from stdin and answers in JSON lines on what was its stdout: `ready`, then one line
for each test. What the code itself prints goes to stderr. Nothing of turnwise is imported.
"""

import contextlib
import json
import os
import resource
import sys
from collections.abc import Mapping
from typing import TextIO

NOBODY = 65534
SHOWN_CHARACTERS = 10_000
COMMON_MODULES = (
    *("bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools"),
    *("heapq", "itertools", "math", "operator", "random", "re", "statistics", "string", "textwrap", "typing"),
)


def main() -> None:
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as results, open(0, encoding="utf-8") as stdin:
        request = json.loads(stdin.read())
        os.dup2(2, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if request["become_nobody"]:
            become_nobody()
        send(results, {"ready": True})
        namespace: dict[str, object] = {"__name__": "__answer__"}
        try:
            exec(compile(request["code"], "<answer>", "exec"), namespace)  # noqa: S102 - it is what this is for
        except BaseException as error:  # noqa: BLE001 - whatever the code raises is its result, SystemExit included
            failed = {"error": describe(error)}
            for _ in request["tests"]:
                send(results, failed)
            return
        for kind, text in request["tests"]:
            send(results, evaluate(text, namespace) if kind == "call" else execute(text, namespace))


def become_nobody() -> None:
    """Stop being root: without a sandbox, root may write anywhere and no limit on processes applies to it."""
    if os.geteuid() != 0:
        return
    for module in COMMON_MODULES:  # the user `nobody` may not be able to read Python's folder
        __import__(module)
    with contextlib.suppress(OSError):  # some containers do not allow it; root has few rights there
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))


def evaluate(call: str, namespace: dict[str, object]) -> dict[str, object]:
    try:
        return {"value": repr(eval(call, namespace))[:SHOWN_CHARACTERS]}  # noqa: S307
    except BaseException as error:  # noqa: BLE001 - as above
        return {"error": describe(error)}


def execute(statements: str, namespace: dict[str, object]) -> dict[str, object]:
    try:
        exec(compile(statements, "<test>", "exec"), dict(namespace))  # noqa: S102
    except BaseException as error:  # noqa: BLE001 - as above
        return {"error": describe(error)}
    return {"passed": True}


def describe(error: BaseException) -> str:
    """Say what was raised, and in which line of the policy's code."""
    try:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        line, trace = 0, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "<answer>":
                line = trace.tb_lineno
            trace = trace.tb_next
        return f"{text[:200]} (line {line})" if line else text[:200]
    except BaseException:  # noqa: BLE001 - the code may raise exceptions of its own that cannot be printed
        return type(error).__name__


def send(results: TextIO, line: Mapping[str, object]) -> None:
    results.write(json.dumps(line) + "\n")
    results.flush()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # do not wait for threads or exit handlers that the code left behind
