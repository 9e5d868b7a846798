"""Run a coroutine to its end from plain code, whether an event loop runs in this thread or not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

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
