"""Real OpenEnv servers in processes of their own, for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SERVE = """
import sys, uvicorn
sys.path.insert(0, {folder!r})
{make_app}
uvicorn.run(app, fd={fd}, log_level="critical")
"""

ECHO = """
import contextlib, os
from pathlib import Path
from openenv.cli.commands.init import init
with contextlib.redirect_stdout(open(os.devnull, "w")):
    init("echo_env", str(Path({folder!r})))
app_file = Path({folder!r}) / "echo_env" / "server" / "app.py"
text = app_file.read_text()
assert "max_concurrent_envs=1," in text
app_file.write_text(text.replace("max_concurrent_envs=1,", "max_concurrent_envs=16,"))
from echo_env.server.app import app
"""
"""The env that `openenv init` makes: it echoes, pays a tenth for every character, and is never done."""


@contextmanager
def openenv_server(make_app: str, folder: Path) -> Iterator[str]:
    """The address of a server of `app`, which the code `make_app` makes; requests wait until it is up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code = SERVE.format(
            folder=str(folder), make_app=make_app.replace("{folder!r}", repr(str(folder))), fd=listener.fileno()
        )
        with subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=folder,
            env={**os.environ, "ENABLE_WEB_INTERFACE": "false"},
            pass_fds=[listener.fileno()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                process.kill()
