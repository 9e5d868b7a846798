from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from served_world import ObedientEnv
from turnwise.env_service import processes
from turnwise.env_service.processes import LocalEnvWorkers, WorkerSpec
from turnwise.envs.base import Task, assistant
from turnwise.envs.remote.client import WorkedWorld
from turnwise.envs.worlds import as_world
from turnwise.errors import AttemptFailed, ConfigError, Party
from turnwise.rollout.call import EnvCalls
from turnwise.rollout.limits import Clock, RolloutLimits

TARGET = f"{Path(__file__).parents[2] / 'served_world.py'}:ObedientEnv"


@pytest.fixture(scope="module")
def workers() -> Iterator[LocalEnvWorkers]:
    found = LocalEnvWorkers(WorkerSpec(env=TARGET, options={}, max_envs=4, deadline_s=20.0), 2)
    found.start()
    yield found
    found.close()


def _calls(workers: LocalEnvWorkers) -> EnvCalls:
    world = WorkedWorld(as_world(ObedientEnv), workers)
    limits = RolloutLimits(step_deadline_s=600.0)
    return EnvCalls(lambda: world.make_env(Task(id="x", data={"seed": 4}), 0), limits, Clock(600.0))


async def _pid(env: EnvCalls) -> int:
    return int((await env.step(assistant("pid"))).messages[0].content.split()[-1])


async def test_attempts_spread_over_processes_that_are_not_this_one(workers: LocalEnvWorkers) -> None:
    while not all(worker.num_free for worker in workers.workers):  # one that an earlier test ended is left out for long
        await asyncio.sleep(0.01)
    envs = [_calls(workers) for _ in range(4)]
    for env in envs:
        await env.start()
    pids = [await _pid(env) for env in envs]
    for env in envs:
        await env.close()
    assert sorted(pids) == sorted(2 * list(workers.pids))
    assert os.getpid() not in pids


async def test_a_worker_that_is_killed_is_blamed_on_the_env_and_comes_back(workers: LocalEnvWorkers) -> None:
    said: list[str] = []
    workers.on_restart = said.append
    for how in ("killed between calls", "dies in a call"):
        env = _calls(workers)
        await env.start()
        pid, before = await _pid(env), workers.num_restarts
        if how == "killed between calls":
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(AttemptFailed, match="env worker http") as caught:
            await env.step(assistant("die"))
        assert caught.value.party is Party.ENV
        await env.close()
        assert env.close_problem is None
        while workers.num_restarts == before:
            await asyncio.sleep(0.01)
        assert f"process {pid}" in said[-1]
    for _ in range(4):  # both workers take attempts again, at the addresses that they had
        env = _calls(workers)
        await env.start()
        assert await _pid(env) in workers.pids
        await env.close()
    assert [worker.num_taken for worker in workers.workers] == [0, 0]


async def test_a_worker_that_hangs_is_ended_and_replaced_and_its_attempt_is_blamed_on_the_env(
    workers: LocalEnvWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    workers.on_restart = said.append
    env = _calls(workers)
    await env.start()
    pid, before = await _pid(env), workers.num_restarts
    monkeypatch.setattr(processes, "CHECK_S", 0.5)
    monkeypatch.setattr(processes, "HUNG_S", 2.0)
    monkeypatch.setattr(processes, "START_S", 4.0)  # for a worker that an earlier test has just made start again
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(AttemptFailed, match="env worker http") as caught:
        await env.step(assistant("pid"))
    assert caught.value.party is Party.ENV
    monkeypatch.undo()
    await env.close()
    while workers.num_restarts == before:
        await asyncio.sleep(0.01)
    assert "has not answered for 2 s; it is ended" in said[-2]
    assert f"process {pid}) ended with signal SIGKILL; started again" in said[-1]


def test_a_world_that_cannot_be_made_stops_the_start_with_its_reason() -> None:
    broken = LocalEnvWorkers(WorkerSpec(env="guess_number", options={"hihg": 3}, max_envs=1, deadline_s=1.0), 1)
    with pytest.raises(ConfigError, match=r"worker 0 ended before it served guess_number: .*hihg.*high"):
        broken.start()
    assert not broken.pids


async def test_an_attempt_fails_at_once_with_the_reason_when_all_workers_were_given_up() -> None:
    found = LocalEnvWorkers(WorkerSpec(env=TARGET, options={}, max_envs=1, deadline_s=20.0), 1)
    found.start()
    try:
        taken, waiting = _calls(found), _calls(found)
        await taken.start()
        waits = asyncio.create_task(waiting.start())  # the only place is taken
        killed: set[int] = set()
        while not found.workers[0].is_given_up:
            for pid in set(found.pids) - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            await asyncio.sleep(0.01)
        for attempt in (waits, _calls(found).start()):
            with pytest.raises(AttemptFailed, match=r"all 1 env workers were given up.*SIGKILL, 5 times") as caught:
                await attempt
            assert caught.value.party is Party.ENV
        await taken.close()
        await waiting.close()
    finally:
        found.close()
