"""The process that runs one response's code; `code_runner.py` starts it as a script, isolated and without site.

It reads `{"code", "calls", "limits"}` from stdin, puts the limits on itself before it looks at the code, and answers
in JSON lines on what was its stdout: `ready`, then one line for each call. Limits are set here and not between fork
and exec: Python code at that point can deadlock when the parent has threads, and the engine has.

Nothing of turnwise is imported.
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
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        become_nobody()
        set_limits(request["limits"])
        send(results, {"ready": True})
        namespace: dict[str, object] = {"__name__": "__answer__"}
        try:
            exec(compile(request["code"], "<answer>", "exec"), namespace)  # noqa: S102 - it is what this process is for
        except BaseException as error:  # noqa: BLE001 - SystemExit too: whatever the code raises is its result
            failed = {"error": describe(error)}
            for _ in request["calls"]:
                send(results, failed)
            return
        for call in request["calls"]:
            send(results, evaluate(call, namespace))


def become_nobody() -> None:
    """Root is exempt from the limit on processes and may write anywhere, so it stops being root."""
    if os.geteuid() != 0:
        return
    for module in COMMON_MODULES:  # nobody may not be able to read where Python is installed
        __import__(module)
    with contextlib.suppress(OSError):  # not allowed in some containers, where root has few rights anyway
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def set_limits(limits: dict[str, int]) -> None:
    """Hard limits; the soft CPU limit is a second lower, so that its own signal says what happened."""
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NPROC, 1),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def evaluate(call: str, namespace: dict[str, object]) -> dict[str, str]:
    try:
        return {"value": repr(eval(call, namespace))[:SHOWN_CHARACTERS]}  # noqa: S307
    except BaseException as error:  # noqa: BLE001 - as above
        return {"error": describe(error)}


def describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:200]
    except BaseException:  # noqa: BLE001 - the code may raise exceptions of its own that cannot be printed
        return type(error).__name__


def send(results: TextIO, line: Mapping[str, object]) -> None:
    results.write(json.dumps(line) + "\n")
    results.flush()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads or exit handlers that the code left behind do not keep the process
