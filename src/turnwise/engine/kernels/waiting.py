"""How the threads of the CPU kernels wait for each other: they spin on a quiet machine and sleep on a busy one.

Spinning is quickest while every thread has a core for itself. Where other work takes one of the cores, a thread that
spins takes the time of the very thread that it waits for, and a call of microseconds lasts whole time slices. So a
look every few dozen milliseconds asks the kernel how long the threads wanted a core and did not get one, and chooses.

Only the waiting changes, not the number of threads: sums are split the same way, and results stay bit for bit equal.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable

import torch

from turnwise.engine.kernels import build

LOOK_EVERY_S = 0.03
BUSY_SHARE = 0.3
"""Seconds that threads wait for a core, all of them together, in a second of work; from here on they sleep. Measured:
0.01 to 0.15 without other work, 0.7 to 1.0 where other processes keep one or two of two cores busy."""
FIRST_PAUSE_S = 0.25
LAST_PAUSE_S = 4.0
"""After a pause the threads spin again for one look: sleeping, they wait a little for a core at every waking, so only
threads that spin tell a quiet machine for sure. The pause doubles as long as the machine is found busy."""
USERS_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")

ThreadTimes = dict[int, tuple[int, int]]
"""By thread: nanoseconds that it has run, and that it has waited for a core."""


class Waiting:
    """Decides for one set of threads whether they spin or sleep while they wait."""

    def __init__(self, read_times: Callable[[], ThreadTimes], set_sleeping: Callable[[bool], None]) -> None:
        self._read_times = read_times
        self._set_sleeping = set_sleeping
        self.is_sleeping = False
        self._times: ThreadTimes = {}
        self._pause_s = FIRST_PAUSE_S
        self._spins_at_s = 0.0

    def look(self, now_s: float) -> None:
        """Judge what happened since the last look; too little work since then is left for the next one."""
        times = self._read_times()
        share = busy_share(self._times, times)
        if share is None and self._times.keys() == times.keys():
            return
        self._times = times
        if share is None:  # other threads than before
            return
        if self.is_sleeping:
            if now_s >= self._spins_at_s:
                self._change(is_sleeping=False)
        elif share >= BUSY_SHARE:
            self._spins_at_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
            self._change(is_sleeping=True)
        else:
            self._pause_s = FIRST_PAUSE_S

    def _change(self, *, is_sleeping: bool) -> None:
        self.is_sleeping = is_sleeping
        self._set_sleeping(is_sleeping)


def busy_share(before: ThreadTimes, after: ThreadTimes) -> float | None:
    """Seconds of waiting for a core, of all threads together, in a second of their work side by side.

    None where the threads are not the same, or have worked for less than half the time between two looks: a process
    that is idle most of the time says little about the others.
    """
    if not after or before.keys() != after.keys():
        return None
    ran_ns = sum(after[one][0] - before[one][0] for one in after)
    waited_ns = sum(after[one][1] - before[one][1] for one in after)
    worked_ns = (ran_ns + waited_ns) / len(after)
    return waited_ns / worked_ns if worked_ns >= 0.5e9 * LOOK_EVERY_S else None


class _Watch:
    """The process's one look at its threads; they are those of the thread that asks."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._lock = threading.Lock()
        self._next_s = 0.0
        self._thread_times = library.tw_thread_times
        self._thread_times.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self._thread_times.restype = ctypes.c_int
        self._sleep_in_waits = library.tw_sleep_in_waits
        self._sleep_in_waits.argtypes = [ctypes.c_int, ctypes.c_int]
        self._sleep_in_waits.restype = None
        self.waiting = Waiting(self._read_times, self._set_sleeping)

    def look(self, threads: int) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s or threads == 1 or not self._lock.acquire(blocking=False):
            return
        try:
            self._next_s = now_s + LOOK_EVERY_S
            self.waiting.look(now_s)
        finally:
            self._lock.release()

    def _read_times(self) -> ThreadTimes:
        threads = torch.get_num_threads()
        numbers = (ctypes.c_int64 * (3 * threads))()
        count = self._thread_times(numbers, threads)
        return {numbers[3 * i]: (numbers[3 * i + 1], numbers[3 * i + 2]) for i in range(count)}

    def _set_sleeping(self, is_sleeping: bool) -> None:
        self._sleep_in_waits(is_sleeping, torch.get_num_threads())


@functools.cache
def _watch() -> _Watch | None:
    """None where there is nothing to choose: no kernels, the user's own choice, or a runtime other than libgomp."""
    library = build.library()
    is_chosen = any(os.environ.get(name) for name in USERS_CHOICES)
    if library is None or is_chosen or hasattr(ctypes.CDLL(None), "kmp_set_blocktime"):
        return None
    return _Watch(library)


def num_threads() -> int:
    """How many threads the next call of a kernel is to use; now and then it looks at how they wait."""
    threads = torch.get_num_threads()
    watch = _watch()
    if watch is not None:
        watch.look(threads)
    return threads
