"""Results of other threads, brought to the event loop that waits for them with one wake-up for many results.

Waking a loop (`call_soon_threadsafe`) is a system call. The calling thread gives up Python's lock for it, and may have
to wait for as long as another thread computes before it gets the lock back. A sampler that ends two hundred replies in
one step would pay that two hundred times while the device idles.
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
    """Work for one event loop: any thread posts, the loop runs it."""

    def __init__(self) -> None:
        self._loop = weakref.ref(asyncio.get_running_loop())
        self._posted: deque[Callable[[], None]] = deque()
        self._is_woken = False

    def post(self, work: Callable[[], None]) -> None:
        self._posted.append(work)
        if self._is_woken:  # the loop has not run `_deliver` yet, and will find this work too
            return
        self._is_woken = True
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed; posted work holds references to it, and would keep it alive
            self._posted.clear()
            self._is_woken = False

    def _deliver(self) -> None:
        self._is_woken = False  # first, so that work which is posted from here on wakes the loop again
        while self._posted:
            self._posted.popleft()()


_mailboxes = PerLoop(_Mailbox)


def until_done(future: Future[Any]) -> asyncio.Future[None]:
    """An awaitable that is done when `future` is, with a value, an error or a cancellation.

    Cancelling the awaitable does not cancel `future`, as it would with `asyncio.wrap_future`.
    """
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    mailbox = _mailboxes.get()

    def settle() -> None:
        if not done.done():
            done.set_result(None)

    future.add_done_callback(lambda _: mailbox.post(settle))
    return done
