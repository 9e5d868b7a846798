"""The process that `warm_start.py` forks: it imports what commands import, and waits for requests."""

from __future__ import annotations

import gc
import json
import os
import random
import runpy
import signal
import socket
import sys
import threading
import types
from typing import Any


def import_everything() -> None:
    """What `turnwise train` and `turnwise serve` import before they begin to work."""
    import transformers.models.llama.modeling_llama
    import uvicorn

    import turnwise.cli
    import turnwise.commands.serve
    import turnwise.commands.train
    import turnwise.engine.engine
    import turnwise.service.app
    import turnwise.training.run

    assert threading.active_count() == 1, "a process with several threads must not be forked"
    gc.collect()
    gc.freeze()  # collections in a fork leave these objects, and so the shared memory, alone
    del transformers, uvicorn, turnwise


def wait_for_request(control: socket.socket) -> dict[str, Any] | None:
    """The request that this process is to carry out; None in the first process when nobody asks any more."""
    while True:
        message, files, _, _ = socket.recv_fds(control, 1 << 17, 3)
        if not message:
            return None
        tells, told = os.pipe()
        middle = os.fork()
        if middle == 0:
            pid = os.fork()
            if pid != 0:
                os.write(told, str(pid).encode())
                os._exit(0)
            for number, file in enumerate(files):
                os.dup2(file, number)
            os.closerange(3, max(*files, tells, told) + 1)
            return json.loads(message)
        os.waitpid(middle, 0)  # from now on the fork is a child of whoever asked
        control.send(os.read(tells, 100))
        for file in (*files, tells, told):
            os.close(file)


def carry_out(request: dict[str, Any]) -> None:
    """Become `python -m MODULE ARGUMENTS` or `python -c CODE ARGUMENTS`."""
    if request["is_new_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    flag, what, *arguments = request["arguments"]
    if flag == "-c":
        sys.argv = ["-c", *arguments]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)  # noqa: S102 - what `-c` means
    else:
        sys.argv = [what, *arguments]
        sys.modules.pop(what, None)  # else it would be there twice
        runpy.run_module(what, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import_everything()
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        found = wait_for_request(asked)
        if found is not None:
            asked.detach()  # closed with the other files of the first process
    if found is not None:
        carry_out(found)
