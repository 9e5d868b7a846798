"""Coroutines from plain code, and plain code from coroutines: neither blocks an event loop that runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar, cast

T = TypeVar("T")


def has_event_loop() -> bool:
    """Whether an event loop runs in this thread, as in a notebook's cell."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which gets an event loop of its own; in a thread of its own where one runs already."""
    if not has_event_loop():
        return asyncio.run(work)
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is waited for
            result.set_exception(error)

    threading.Thread(target=run, name="turnwise", daemon=True).start()
    return result.result()


async def in_thread(work: Callable[[], T]) -> T:
    """The result of plain code that takes long; the event loop stays free.

    The thread is the work's own, and nothing waits for it when the process ends. A caller that stops waiting leaves it.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return  # nobody waits any more
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(cast(T, value))

    def tell(value: T | None, error: BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, value, error)

    def run() -> None:
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is waited for
            tell(None, error)
        else:
            tell(value, None)

    threading.Thread(target=run, name="turnwise-plain", daemon=True).start()
    return await result
