"""Starts `python -m MODULE` or `python -c CODE` as a fork of a process that has imported everything already.

A command of ours imports for four seconds of processor time before it does anything, and tests start more than a
hundred. The fork runs the same code as `__main__`, with arguments, environment, directory and pipes of its own, and
it is a child of the caller like any other. It computes with one thread.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import inspect
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

START_S = 120.0
SET_CHILD_SUBREAPER = 36  # of prctl(2)
_EXECUTE: Any = getattr(subprocess.Popen, "_execute_child")  # noqa: B009 - it has no public name
_PARAMETERS = [*inspect.signature(_EXECUTE).parameters][1:]


class WarmPopen(subprocess.Popen[Any]):
    """`subprocess.Popen([sys.executable, "-m", MODULE, ...])`, or with `-c`, without the imports."""

    def _execute_child(self, *values: Any) -> None:
        given = dict(zip(_PARAMETERS, values, strict=True))
        executable, *arguments = map(str, given["args"])
        assert (executable, arguments[0] in ("-m", "-c")) == (sys.executable, True), given["args"]
        request = {
            "arguments": arguments,
            "env": dict(os.environ if given["env"] is None else given["env"]),
            "cwd": str(given["cwd"] or Path.cwd()),
            "is_new_session": bool(given["start_new_session"]),
        }
        ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        standard = [own if end == -1 else end for own, end in enumerate(ends)]
        self.pid = _starter().start(request, standard)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))  # pyright: ignore[reportAttributeAccessIssue]


class Starter:
    """The process that is forked (`warm_zygote.py`), and the way to ask it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_S)
        script = Path(__file__).with_name("warm_zygote.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd="/",
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        atexit.register(self.close)

    def start(self, request: dict[str, Any], standard: list[int]) -> int:
        """The process number of a new child of this process, which has these three files as its standard ones."""
        message = json.dumps(request).encode()
        assert len(message) < 1 << 17, "the arguments and the environment are too long"
        # The fork's own parent ends at once. Whoever collects orphans below this process then becomes the parent.
        _collect_orphans(True)
        try:
            socket.send_fds(self._control, [message], standard)
            answer = self._control.recv(100)
        finally:
            _collect_orphans(False)
        assert answer, "the process that starts others has ended"
        return int(answer)

    def close(self) -> None:
        self._control.close()
        self._process.wait(START_S)


@functools.cache
def _starter() -> Starter:
    return Starter()


def _collect_orphans(is_on: bool) -> None:
    assert ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0) == 0
