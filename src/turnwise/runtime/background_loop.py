"""An event loop in a thread of its own, for work that goes on whether or not the caller has a loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

STOP_S = 10.0
"""How long the tasks that are left may take to end when the loop is closed."""


class BackgroundLoop:
    """Runs coroutines in its own thread. Any thread may submit; cancelling the future cancels the coroutine."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin to run `work`."""
        with self._lock:
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise RuntimeError("the background loop is closed")

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` from another loop; cancelling the caller cancels `work`."""
        return await asyncio.wrap_future(self.submit(work))

    def post(self, call: Callable[[], object]) -> bool:
        """Call a plain function in the loop's thread, soon. Returns False if the loop is closed."""
        if self._is_closed:  # no lock: a finalizer may call this while this thread holds it
            return False
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        """Cancel what is left, and end the thread."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left, timeout=STOP_S))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(asyncio.sleep(0))  # a connection that is being closed needs one more turn
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()
