"""Threads of the kernels spin while nothing disturbs them and sleep beside other work; their results do not change."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys

import pytest
import torch

from turnwise.bench.busy import busy_cores
from turnwise.engine.ops import cpu, cpu_attention, cpu_low_rank, cpu_products
from turnwise.engine.ops.interface import AttentionRule, Saved
from turnwise.engine.ops.waiting import (
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    LOOK_EVERY_S,
    Manner,
    ThreadTimes,
    Waiting,
    busy_share,
)

LOOK_NS = round(1e9 * LOOK_EVERY_S)


class Machine:
    """Two threads that always have work, on cores that others take a share of; time passes from look to look."""

    def __init__(self) -> None:
        self._times: ThreadTimes = {7: (0, 0), 8: (0, 0)}
        self._used: list[Manner] = []
        self.waiting = Waiting(lambda: dict(self._times), self._used.append)
        self.now_s = 0.0

    def work(self, seconds: float, *, taken: float, taken_alone: float = 0.0) -> list[Manner]:
        """The manners that were used one after the other while other work took a share of each thread's time.

        A thread that works alone loses `taken_alone`; its sibling sleeps.
        """
        before, until_s = len(self._used), self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += LOOK_EVERY_S
            is_alone = self.waiting.manner is Manner.ALONE
            for thread in [7] if is_alone else [7, 8]:
                (ran, waited), lost = self._times[thread], taken_alone if is_alone else taken
                self._times[thread] = (ran + round((1 - lost) * LOOK_NS), waited + round(lost * LOOK_NS))
            self.waiting.look(self.now_s, self.now_s)
        return self._used[before:]


def test_threads_spin_on_a_quiet_machine_sleep_on_a_busy_one_and_try_again_ever_more_rarely() -> None:
    machine = Machine()
    assert machine.work(10, taken=0.05) == []
    assert machine.work(2 * LOOK_EVERY_S, taken=0.4) == [Manner.SLEEP]
    # Each trial lasts one look, and the pauses between them grow from the first to the last.
    used = machine.work(60, taken=0.4)
    assert set(used) == {Manner.SPIN, Manner.SLEEP}
    assert 60 / (LAST_PAUSE_S + 4 * LOOK_EVERY_S) - 1 <= used.count(Manner.SPIN) <= 60 / LAST_PAUSE_S + 5
    machine.work(LAST_PAUSE_S + 4 * LOOK_EVERY_S, taken=0.01)
    assert machine.waiting.manner is Manner.SPIN
    assert machine.work(10, taken=0.01) == []
    assert machine.work(2 * LOOK_EVERY_S, taken=0.4) == [Manner.SLEEP]
    machine.work(FIRST_PAUSE_S + 4 * LOOK_EVERY_S, taken=0.0)
    assert machine.waiting.manner is Manner.SPIN, "a quiet time makes the first pause short again"


def test_one_thread_works_alone_where_it_gets_nearly_as_much_as_all_together() -> None:
    machine = Machine()
    assert machine.work(FIRST_PAUSE_S, taken=0.7, taken_alone=0.45) == [Manner.SLEEP, Manner.ALONE]
    used = machine.work(4 * LAST_PAUSE_S, taken=0.7, taken_alone=0.45)
    assert used[:3] == [Manner.SPIN, Manner.SLEEP, Manner.ALONE]
    machine.work(LAST_PAUSE_S + 4 * LOOK_EVERY_S, taken=0.0)
    assert machine.waiting.manner is Manner.SPIN
    # Here two threads get 0.7 of a core and one alone 0.4 of it: that is tried once in each pause.
    used = machine.work(4 * LAST_PAUSE_S, taken=0.65, taken_alone=0.6)
    assert used[:4] == [Manner.SLEEP, Manner.ALONE, Manner.SLEEP, Manner.SPIN]
    assert used.count(Manner.ALONE) <= used.count(Manner.SPIN) + 1


def test_idle_threads_and_new_ones_are_not_judged() -> None:
    before = {7: (0, 0), 8: (0, 0)}
    assert busy_share(before, {7: (LOOK_NS // 9, LOOK_NS // 9), 8: (0, 0)}) is None
    assert busy_share({}, {}) is None
    # Of two threads, one had no core for half of the time: half a second of waiting in a second of work.
    half = {7: (LOOK_NS, 0), 8: (LOOK_NS // 2, LOOK_NS // 2)}
    assert busy_share(before, half) == pytest.approx(0.5)
    teams = [{7: (0, 0), 8: (0, 9 * LOOK_NS)}, {7: (0, 0), 9: (0, 99 * LOOK_NS)}]
    used: list[Manner] = []
    waiting = Waiting(lambda: teams.pop(0), used.append)
    waiting.look(1.0, 1.0)
    waiting.look(2.0, 2.0)
    assert used == []


def test_results_are_bit_for_bit_equal_however_threads_wait(library: ctypes.CDLL) -> None:
    x, weight, more = torch.randn(300, 400), torch.randn(500, 400), torch.randn(300, 24)
    query, key, value = torch.randn(1, 6, 200, 64), torch.randn(1, 2, 200, 64), torch.randn(1, 2, 200, 64)

    def compute() -> list[torch.Tensor]:
        product = cpu_products.product(x, weight.T, torch.empty(300, 500))
        gradient, low = torch.zeros(400, 24), torch.empty(300, 24)
        cpu_low_rank.gradients(x, more, gradient, weight[:24].T, low, 0.5)
        out, logsumexp = torch.empty_like(query), torch.empty(1, 6, 200)
        sides = Saved(query, key, value, out, logsumexp)
        cpu_attention.attend(sides, AttentionRule(0.1), is_causal=True)
        grads = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
        cpu_attention.attend_backward(out, sides, grads, AttentionRule(0.1), is_causal=True)
        decoded = cpu.CpuKernels(library).linear_small(weight, x[:9])
        return [product, gradient, low, out, logsumexp, *grads, decoded]

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        spinning = compute()
        for is_alone in (False, True):
            library.tw_set_waiting(True, is_alone, 2)
            assert all(torch.equal(*pair) for pair in zip(spinning, compute(), strict=True)), is_alone
    finally:
        library.tw_set_waiting(False, False, 2)
        torch.set_num_threads(before)


_SWITCHES = """
import resource, time, torch
from turnwise.engine.ops import cpu
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
    assert sleeps[0] > 0.05, "sleeps in a call; in some of the time they spin, or one thread works alone"
    assert sleeps[1] < sleeps[0] / 2, "the user's own choice is left alone"
