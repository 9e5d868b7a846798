"""The process that starts the runs of a comparison: it loads the libraries once and forks for every run.

It reads one JSON object per line, and answers with one for every run that ended:

    {"start": NAME, "config": FILE, "log": FILE}                     {"name": NAME, "code": 0}
    {"start": NAME, "resume": RUN, "log": FILE}
    {"stop": "gently"} or {"stop": "now"}: to all runs that go on

A crash of one run does not affect the others. When the input ends, the runs are stopped as by Ctrl-C, which saves them.
Nothing here may start a thread or use a GPU: a forked process would break.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import sys
import traceback
from typing import Any

LIBRARIES = ("torch", "transformers", "turnwise.engine.engine", "turnwise.training.run", "turnwise.training.loop")
POLL_S = 0.1
SIGNALS = {"gently": signal.SIGINT, "now": signal.SIGKILL}


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.freeze()  # forked runs share the loaded memory as long as nobody writes to it
    running: dict[int, str] = {}
    unread, is_open = b"", True
    while is_open or running:
        if is_open and select.select([sys.stdin.fileno()], [], [], POLL_S)[0]:
            data = os.read(sys.stdin.fileno(), 1 << 16)
            if not data:
                is_open = False
                _stop(running, "gently")
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                _obey(json.loads(line), running)
        _reap(running, is_waiting=not is_open)
    return 0


def _obey(order: dict[str, Any], running: dict[int, str]) -> None:
    if "stop" in order:
        _stop(running, order["stop"])
        return
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _be_the_run(order)
    running[pid] = order["start"]


def _stop(running: dict[int, str], how: str) -> None:
    for pid in running:
        os.kill(pid, SIGNALS[how])


def _reap(running: dict[int, str], *, is_waiting: bool) -> None:
    while running:
        pid, status = os.waitpid(-1, 0 if is_waiting else os.WNOHANG)
        if pid == 0:
            return
        if pid in running:
            answer = {"name": running.pop(pid), "code": os.waitstatus_to_exitcode(status)}
            try:
                print(json.dumps(answer), flush=True)
            except BrokenPipeError:  # the reader is gone; the runs are saved anyway
                is_waiting = True


def _be_the_run(order: dict[str, Any]) -> None:
    """Train in the forked process; never returns."""
    code = 1  # a bug
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for number, place in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(place, number)
        code = _train(order)
    except BaseException:  # noqa: BLE001 - a bug, and its traceback belongs into the run's log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train(order: dict[str, Any]) -> int:
    """Train with the exit codes of `turnwise train`; output goes to the log."""
    from turnwise.errors import TurnwiseError
    from turnwise.runtime.exit_codes import ExitCode
    from turnwise.training.run import Run, train
    from turnwise.watch.terminal import LineView

    try:
        if "resume" in order:
            run = Run.resume(order["resume"], observer=LineView())
        else:
            run = train(order["config"], observer=LineView())
    except TurnwiseError as error:
        print(f"turnwise: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    if run.state == "stopped":
        return ExitCode.INTERRUPTED
    print(run.report())
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
