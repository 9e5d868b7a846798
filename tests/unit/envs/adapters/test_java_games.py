"""The Java process that simulators share: who holds it, when it ends, and what happens when it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("textworld_express", reason="run by tests/contract/test_java_packages.py")

from turnwise.envs.adapters import java_games
from turnwise.envs.adapters.java_games import JavaDiedError, JavaHost
from turnwise.envs.adapters.textworld_express import TextWorldExpressWorld, open_host
from turnwise.envs.base import assistant

WAIT_S = 120.0


def _is_running(number: int) -> bool:
    state = Path(f"/proc/{number}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def _wait_until_gone(number: int) -> bool:
    deadline = time.monotonic() + WAIT_S
    while _is_running(number) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _is_running(number)


def test_all_attempts_share_one_process_which_ends_some_time_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    JavaHost.close_all()
    monkeypatch.setattr(java_games, "IDLE_S", 0.2)
    first, second = open_host(), open_host()
    assert first is second
    number = first.process.pid
    first.release()
    time.sleep(0.5)
    assert _is_running(number)
    second.release()
    assert _wait_until_gone(number)


async def test_a_killed_process_fails_its_attempts_and_the_next_attempt_starts_a_new_one() -> None:
    world = TextWorldExpressWorld("coin")
    (task,) = world.tasks("train", 1, 0)
    env = world.make_env(task, 0)
    await env.start()
    host = open_host()
    os.kill(host.process.pid, signal.SIGKILL)
    host.release()
    with pytest.raises(JavaDiedError, match="the Java process"):
        await env.step(assistant("look around"))
    await env.close()
    again = world.make_env(task, 0)
    await again.start()
    step = await again.step(assistant("look around"))
    await again.close()
    assert step.messages
    assert open_host().process.pid != host.process.pid
    JavaHost.close_all()


def test_no_process_outlives_one_that_is_killed() -> None:
    program = "from turnwise.envs.adapters.textworld_express import open_host\n"
    program += "import time; print(open_host().process.pid, flush=True); time.sleep(600)\n"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    number = int(child.stdout.readline())
    assert _is_running(number)
    child.kill()
    child.wait()
    child.stdout.close()
    assert _wait_until_gone(number)
