"""Ctrl-C that loses nothing: the first one ends the run at the next safe place, a second one ends it at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from turnwise.errors import TurnwiseError

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(TurnwiseError):  # noqa: N818 - an outcome, not a mistake
    """The user asked the run to stop."""


class Interrupt:
    """Whether somebody asked to stop. Playing attempts is cut short; a step that has begun to train is finished."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()

    def ask(self) -> None:
        self._asked.set()

    def stop_now(self) -> None:
        """What a second Ctrl-C does; called on the event loop, in the main thread."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)
        signal.raise_signal(signal.SIGINT)

    def check(self) -> None:
        if self._asked.is_set():
            raise Interrupted("stopped")

    async def unless(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, or cancel it, let it clean up, and raise when somebody asks to stop."""
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
    def on_signals(self, say: Callable[[str], None]) -> Iterator[None]:
        """Ask when Ctrl-C is pressed or the process is told to end; the next signal does what it always did."""
        loop = asyncio.get_running_loop()

        def heard() -> None:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
            say("stopping after this step; once more to stop at once")
            self.ask()

        for number in SIGNALS:
            loop.add_signal_handler(number, heard)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
