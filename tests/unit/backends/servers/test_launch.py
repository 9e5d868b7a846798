"""A server of our own: it is ready or an error with its words, it ends with us, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from turnwise.backends.servers.launch import OwnServer, ServerCommand
from turnwise.errors import ServiceError

SERVER = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # as vLLM's engine: a child of the server
print("it listens", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "2"); self.end_headers(); self.wfile.write(b"{}")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
STARTER = """
import asyncio, os, sys, time
from pathlib import Path
from turnwise.backends.servers.launch import OwnServer, ServerCommand
code, log = sys.argv[1:]
command = ServerCommand(name="toy", arguments=lambda port: [sys.executable, "-c", code, str(port)])
server = OwnServer(command, Path(log), start_s=30)
asyncio.run(server.start())
print(server.group_id, flush=True)
time.sleep(600)
"""


def own_server(tmp_path: Path, code: str, start_s: float = 30.0) -> OwnServer:
    command = ServerCommand(name="toy", arguments=lambda port: [sys.executable, "-c", code, str(port)])
    return OwnServer(command, tmp_path / "run" / "toy.log", start_s=start_s)


def group_is_gone(group: int) -> bool:
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


async def test_a_server_is_started_revived_at_the_same_address_and_stopped_with_its_children(tmp_path: Path) -> None:
    server = own_server(tmp_path, SERVER)
    url, port = server.url, int(server.url.rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))  # the port is ours before the server has it
    await server.start()
    group = server.group_id
    assert server.url == url
    assert group is not None
    assert "it listens" in server.log.read_text()
    assert not await server.revive()
    assert server.group_id == group, "one that answers is left alone"
    assert await server.revive(is_stuck=True)
    assert group_is_gone(group), "unless it is known to be stuck"
    group = server.group_id
    assert group is not None
    os.killpg(group, signal.SIGKILL)
    while server.is_alive:
        await asyncio.sleep(0.05)
    assert group_is_gone(group)
    assert await server.revive()
    assert (server.url, server.is_alive) == (url, True)
    second = server.group_id
    assert second is not None
    await server.stop()
    assert group_is_gone(second)
    await server.stop()


def test_a_server_dies_with_a_process_that_is_killed(tmp_path: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, SERVER, str(tmp_path / "toy.log")], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    group = int(starter.stdout.readline())
    starter.kill()
    starter.wait()
    starter.stdout.close()
    assert group_is_gone(group)


async def test_a_server_that_ends_or_never_gets_ready_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    dying = own_server(tmp_path, "raise SystemExit('there is no such model')")
    with pytest.raises(ServiceError, match=r"ended before it was ready; its log .*toy.log(.|\n)*\n  there is no"):
        await dying.start()
    silent = own_server(tmp_path, "import time; print('I load', flush=True); time.sleep(600)", start_s=1.5)
    with pytest.raises(ServiceError, match=r"not ready after 1.5 s \(rollout.server_start_s\)(.|\n)*\n  I load"):
        await silent.start()
    assert not silent.is_alive
