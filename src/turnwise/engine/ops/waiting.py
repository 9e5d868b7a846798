"""How the threads of the CPU kernels wait for each other: they spin on a quiet machine and sleep on a busy one.

Spinning is quickest while every thread has a core for itself. Where other work takes one of the cores, a thread that
spins takes the time of the very thread that it waits for, and a call of microseconds lasts whole time slices. So a
look every few dozen milliseconds asks the kernel how long the threads wanted a core and did not get one, and chooses.
Where all of them together get less than one core, sharing the work only costs, and one thread does it.

The work is always split in the same way, so results stay equal bit for bit.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import os
import threading
import time
from collections.abc import Callable

import torch

from turnwise.engine.ops import build

LOOK_EVERY_S = 0.03
BUSY_SHARE = 0.3
"""Seconds that threads wait for a core, all of them together, in a second of work; from here on they sleep. Measured:
0.01 to 0.15 without other work, 0.7 to 1.0 where other processes keep one or two of two cores busy."""
ALONE_CORES = 0.8
"""Cores' worth of time that sleeping threads get, all of them together; below, one tries to work alone. Measured on two
cores: 1.0 beside one busy process; beside two 0.7 to 1.0 if they are of our session, 0.5 to 0.6 if they are not."""
ALONE_WORTH = 0.85
"""The share of that time that one thread needs for the same work: alone, it waits for no other. Of one session the
scheduler is fair to threads, and one thread gets half of what two get; else it is fair to sessions."""
TRIAL_S = 0.1
"""How long threads wait in one way before the result is judged."""
FIRST_PAUSE_S = 0.25
LAST_PAUSE_S = 4.0
"""After a pause the threads spin again for one look: sleeping, they wait a little for a core at every waking, so only
threads that spin tell a quiet machine for sure. The pause doubles as long as the machine is found busy."""
MAX_GAP_S = 0.25
"""The longest pause between two calls of a thread that is at work."""
USERS_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")

ThreadTimes = dict[int, tuple[int, int]]
"""By thread: nanoseconds that it has run, and that it has waited for a core."""


class Manner(enum.Enum):
    """What threads do while they have no work."""

    SPIN = enum.auto()
    SLEEP = enum.auto()
    ALONE = enum.auto()
    """One thread works, the others sleep."""


class Waiting:
    """Decides how one set of threads waits."""

    def __init__(self, read_times: Callable[[], ThreadTimes], use: Callable[[Manner], None]) -> None:
        self._read_times = read_times
        self._use = use
        self.manner = Manner.SPIN
        self._times: ThreadTimes = {}
        self._active_s = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._spins_at_s = 0.0
        self._is_settled = False
        self._slept_cores = 0.0

    def look(self, now_s: float, active_s: float) -> None:
        """Judge what happened since the last look; too little work since then is left for the next one.

        Args:
            active_s: seconds so far in which one call followed the other.
        """
        times = self._read_times()
        if self._times.keys() != times.keys():  # other threads than before
            self._times, self._active_s = times, active_s
        elif self.manner is Manner.SPIN:
            self._judge_spinning(times, now_s, active_s)
        elif now_s >= self._spins_at_s:
            self._change(Manner.SPIN, times, active_s)
        elif not self._is_settled and active_s - self._active_s >= TRIAL_S:
            self._judge_sleeping(times, active_s)

    def _judge_sleeping(self, times: ThreadTimes, active_s: float) -> None:
        """Whether all threads or one alone get more done until they spin again."""
        got_cores = _ran_ns(self._times, times) / 1e9 / (active_s - self._active_s)
        if self.manner is Manner.SLEEP and got_cores < ALONE_CORES:
            self._slept_cores = got_cores
            self._change(Manner.ALONE, times, active_s)
            return
        is_worse = self.manner is Manner.ALONE and got_cores < ALONE_WORTH * self._slept_cores
        self._change(Manner.SLEEP if is_worse else self.manner, times, active_s)
        self._is_settled = self.manner is Manner.ALONE or is_worse

    def _judge_spinning(self, times: ThreadTimes, now_s: float, active_s: float) -> None:
        share = busy_share(self._times, times)
        if share is None:
            return
        if share < BUSY_SHARE:
            self._pause_s = FIRST_PAUSE_S
            self._times = times
            return
        self._spins_at_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)
        self._is_settled = False
        self._change(Manner.SLEEP, times, active_s)

    def _change(self, manner: Manner, times: ThreadTimes, active_s: float) -> None:
        self._times, self._active_s = times, active_s
        if manner is not self.manner:
            self.manner = manner
            self._use(manner)


def busy_share(before: ThreadTimes, after: ThreadTimes) -> float | None:
    """Seconds of waiting for a core, of all threads together, in a second of their work side by side.

    None where the threads have worked for less than half the time between two looks: a process that is idle most of
    the time says little about the others.
    """
    waited_ns = sum(after[one][1] - before[one][1] for one in after)
    worked_ns = (_ran_ns(before, after) + waited_ns) / max(1, len(after))
    return waited_ns / worked_ns if worked_ns >= 0.5e9 * LOOK_EVERY_S else None


def _ran_ns(before: ThreadTimes, after: ThreadTimes) -> int:
    return sum(after[one][0] - before[one][0] for one in after)


class _Watch:
    """The one watcher of this process. It watches the OpenMP threads of the thread that calls the kernels."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._lock = threading.Lock()
        self._last_s = self._next_s = self._active_s = 0.0
        self._thread_times = library.tw_thread_times
        self._thread_times.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self._thread_times.restype = ctypes.c_int
        self._set_waiting = library.tw_set_waiting
        self._set_waiting.argtypes = [ctypes.c_int] * 3
        self._set_waiting.restype = None
        self._waiting = Waiting(self._read_times, self._use)

    def look(self, threads: int) -> None:
        """Called before every call of a kernel; most of the time it only notes that there is one."""
        now_s = time.monotonic()
        gap_s, self._last_s = now_s - self._last_s, now_s
        if gap_s < MAX_GAP_S:
            self._active_s += gap_s
        if now_s < self._next_s or threads == 1 or not self._lock.acquire(blocking=False):
            return
        try:
            self._next_s = now_s + LOOK_EVERY_S
            self._waiting.look(now_s, self._active_s)
        finally:
            self._lock.release()

    def _read_times(self) -> ThreadTimes:
        threads = torch.get_num_threads()
        numbers = (ctypes.c_int64 * (3 * threads))()
        count = self._thread_times(numbers, threads)
        return {numbers[3 * i]: (numbers[3 * i + 1], numbers[3 * i + 2]) for i in range(count)}

    def _use(self, manner: Manner) -> None:
        self._set_waiting(manner is not Manner.SPIN, manner is Manner.ALONE, torch.get_num_threads())


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
