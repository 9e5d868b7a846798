"""A thousand executions of every kind leave no process, mount, file or descriptor."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from processes import marked_processes, processes_below
from turnwise.envs.sandbox import Limits, Sandbox
from turnwise.envs.sandbox.pool import SandboxPool

NUM_RUNS = 1000


@pytest.mark.slow
async def test_a_thousand_executions_leave_nothing_behind(tmp_path: Path) -> None:
    await asyncio.get_running_loop().run_in_executor(None, time.monotonic)  # the loop's own thread is no leak of ours
    before = (processes_below(os.getpid()), num_descriptors(), mounts())
    pool = SandboxPool(tmp_path / "pool")
    sandbox = Sandbox(limits=Limits(wall_s=10), pool=pool)
    mark = f"61.{os.getpid()}"  # seconds to sleep, and to be found by
    for number in range(NUM_RUNS):
        if number % 5 == 0:
            session = sandbox.open(files={"a.txt": "x"})
            await session.run(f"sleep {mark} & cat a.txt")
            await session.close()
        elif number % 7 == 0:
            await sandbox.run(["bash", "-c", f"setsid sleep {mark} & sleep {mark} & exit 1"])
        else:
            assert (await sandbox.run(["cat", "f"], files={"f": str(number)})).stdout == str(number)
    assert pool.ids == ()
    pool.close()
    assert list((tmp_path / "pool").iterdir()) == []
    processes, descriptors, mounted = before
    assert processes_below(os.getpid()) <= processes
    assert num_descriptors() <= descriptors
    assert mounts() == mounted
    assert not marked_processes(mark)


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mounts() -> str:
    return Path("/proc/self/mountinfo").read_text(encoding="utf-8")
