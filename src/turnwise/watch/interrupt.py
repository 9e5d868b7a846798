"""Ctrl-C without loss: the first one ends the run at the next safe place, a second one ends it at once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from turnwise.errors import TurnwiseError

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(TurnwiseError):  # noqa: N818 - an outcome, not a mistake
    """The user asked the run to stop."""


class Interrupt:
    """Remembers that somebody asked to stop. Attempts are cut short; a step that has begun to train is finished.

    `ask`, `stop_with` and `stop_now` may be called from any thread, also before the run's event loop is there.
    """

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._is_asked = False
        self._error: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._has_signals = False
        self.is_by_signal = False
        """Whether Ctrl-C or SIGTERM asked, and not a call."""

    def ask(self) -> None:
        """Stop the run at the next safe place."""
        self._is_asked = True
        if self._loop is None:
            self._asked.set()
        else:
            self._loop.call_soon_threadsafe(self._asked.set)

    def stop_with(self, error: Exception) -> None:
        """Stop the run at the next safe place, which then raises `error`."""
        self._error = self._error or error
        self.ask()

    def stop_now(self) -> None:
        """Stop at once and save nothing, like a second Ctrl-C."""
        self._is_asked = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._raise_now)

    def check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._is_asked:
            raise Interrupted("stopped")

    async def unless(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`. If somebody asks to stop, cancel it, let it clean up, and raise."""
        task = asyncio.create_task(work)
        asked = asyncio.create_task(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.check()
            return await task
        finally:
            for pending in (task, asked):
                pending.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)

    @contextmanager
    def attached(self, say: Callable[[str], None]) -> Generator[None]:
        """While this context is open, `ask`, Ctrl-C and SIGTERM stop the current task's run.

        Only the main thread receives signals. A run in another thread is stopped by calls.
        """
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._has_signals = threading.current_thread() is threading.main_thread()
        if self._is_asked:
            self._asked.set()

        def heard() -> None:
            self._drop_signals()
            say("stopping after this step; once more to stop at once")
            self.is_by_signal = True
            self.ask()

        if self._has_signals:
            for number in SIGNALS:
                self._loop.add_signal_handler(number, heard)
        try:
            yield
        finally:
            self._drop_signals()
            self._loop = self._task = None

    def _drop_signals(self) -> None:
        if self._has_signals and self._loop is not None:
            for number in SIGNALS:
                self._loop.remove_signal_handler(number)

    def _raise_now(self) -> None:
        """Raise the stop in the run. Runs on the event loop."""
        self._drop_signals()
        if self._has_signals:
            signal.raise_signal(signal.SIGINT)
        elif self._task is not None:
            self._task.cancel()
