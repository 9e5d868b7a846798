"""What other threads finish, brought to the event loop that waits for it: however much at once, with one wake-up.

Waking a loop (`call_soon_threadsafe`) is a system call for which a thread lets go of Python's lock, and to get it back
it may wait for as long as another thread computes. A sampler that ends two hundred replies in one step would do that
two hundred times, while the device idles.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from turnwise.runtime.per_loop import PerLoop


class _Mailbox:
    """What one loop is to do next; anybody posts, the loop delivers."""

    def __init__(self) -> None:
        self._loop = weakref.ref(asyncio.get_running_loop())
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_woken = False

    def post(self, work: Callable[[], None]) -> None:
        self._waiting.append(work)
        if self._is_woken:  # a delivery is to come, and finds it
            return
        self._is_woken = True
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # it is closed by now, and what waits for it would keep it
            self._waiting.clear()
            self._is_woken = False

    def _deliver(self) -> None:
        self._is_woken = False  # first: whatever is posted from here on may wake the loop again
        while self._waiting:
            self._waiting.popleft()()


_mailboxes = PerLoop(_Mailbox)


def arrival(future: Future[Any]) -> asyncio.Future[None]:
    """Done when `future` is, whatever came of it. Who stops waiting cancels nothing, as `wrap_future` would."""
    arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    mailbox = _mailboxes.get()

    def settle() -> None:
        if not arrived.done():
            arrived.set_result(None)

    future.add_done_callback(lambda _: mailbox.post(settle))
    return arrived
