"""Threads of the kernels spin while nothing disturbs them and sleep beside other work; their results do not change."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from turnwise.bench.busy import busy_cores
from turnwise.engine.kernels import waiting
from turnwise.engine.kernels.waiting import FIRST_PAUSE_S, LAST_PAUSE_S, LOOK_EVERY_S, ThreadTimes, Waiting

LOOK_NS = round(1e9 * LOOK_EVERY_S)


class Machine:
    """Two threads that always have work, on cores that others take a share of; time passes from look to look."""

    def __init__(self) -> None:
        self._times: ThreadTimes = {7: (0, 0), 8: (0, 0)}
        self._changes: list[bool] = []
        self.waiting = Waiting(lambda: dict(self._times), self._changes.append)
        self.now_s = 0.0

    def work(self, seconds: float, *, taken: float) -> list[bool]:
        """What was switched to (True: sleeping) while other work took a share of one thread's time."""
        before, until_s = len(self._changes), self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += LOOK_EVERY_S
            (ran, waited), (other_ran, other_waited) = self._times[7], self._times[8]
            self._times[7] = (ran + LOOK_NS, waited)
            self._times[8] = (other_ran + round((1 - taken) * LOOK_NS), other_waited + round(taken * LOOK_NS))
            self.waiting.look(self.now_s)
        return self._changes[before:]


def test_threads_spin_on_a_quiet_machine_sleep_on_a_busy_one_and_try_again_ever_more_rarely() -> None:
    machine = Machine()
    assert machine.work(10, taken=0.1) == []
    assert machine.work(2 * LOOK_EVERY_S, taken=0.7) == [True]
    # Each trial lasts one look, and the pauses between them grow from the first to the last.
    trials = machine.work(60, taken=0.7).count(False)
    assert 60 / (LAST_PAUSE_S + 4 * LOOK_EVERY_S) - 1 <= trials <= 60 / LAST_PAUSE_S + 5
    machine.work(LAST_PAUSE_S + 4 * LOOK_EVERY_S, taken=0.02)
    assert not machine.waiting.is_sleeping
    assert machine.work(10, taken=0.02) == []
    assert machine.work(2 * LOOK_EVERY_S, taken=0.9) == [True]
    machine.work(FIRST_PAUSE_S + 4 * LOOK_EVERY_S, taken=0.0)
    assert not machine.waiting.is_sleeping, "a quiet time makes the first pause short again"


def test_idle_threads_and_new_ones_are_not_judged() -> None:
    before = {7: (0, 0), 8: (0, 0)}
    assert waiting.busy_share(before, {7: (LOOK_NS // 9, LOOK_NS // 9), 8: (0, 0)}) is None
    assert waiting.busy_share(before, {7: (0, 9 * LOOK_NS), 9: (0, 9 * LOOK_NS)}) is None
    assert waiting.busy_share({}, {}) is None
    # Of two threads, one had no core for half of the time: half a second of waiting in a second of work.
    half = {7: (LOOK_NS, 0), 8: (LOOK_NS // 2, LOOK_NS // 2)}
    assert waiting.busy_share(before, half) == pytest.approx(0.5)


_SWITCHES = """
import resource, time, torch
from turnwise.engine.kernels import cpu
torch.set_num_threads(2)
kernels = cpu.load()
assert kernels is not None
weight, x = torch.randn(2048, 1024), torch.randn(8, 1024)
expected = kernels.linear_small(weight, x)
start_s, before, calls = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw, 0
while time.monotonic() < start_s + 3:
    assert torch.equal(kernels.linear_small(weight, x), expected)
    calls += 1
print((resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before) / calls)
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="the kernel of Linux tells who waits for a core")
@pytest.mark.skipif(torch.get_num_threads() < 2, reason="one thread waits for nobody")
def test_beside_other_work_waiting_threads_give_their_core_away_unless_told_to_spin() -> None:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_", "MKL_"))}
    with busy_cores(os.cpu_count() or 1):
        sleeps = [
            float(subprocess.check_output([sys.executable, "-c", _SWITCHES], env=environment, text=True))
            for environment in (plain, {**plain, "GOMP_SPINCOUNT": "300000"})
        ]
    assert sleeps[0] > 0.2, "sleeps in a call, over the switches back to spinning"
    assert sleeps[1] < 0.1, "the user's own choice is left alone"
