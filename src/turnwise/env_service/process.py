"""The process of one env worker that a run started: serves a world at a socket that it inherits."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading

from turnwise.env_service.run_server import serve_env
from turnwise.env_service.server import EnvServerOptions
from turnwise.errors import TurnwiseError


def _end_with_run() -> None:
    # Not `sys.stdin`, whose lock would disturb the end of the interpreter.
    while os.read(0, 1024):  # returns nothing when the run has closed its end, or is dead
        pass
    os._exit(0)


def main() -> None:
    options = EnvServerOptions(**json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_run, daemon=True).start()
    try:
        serve_env(options, socket.socket(fileno=int(sys.argv[1])))
    except TurnwiseError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
