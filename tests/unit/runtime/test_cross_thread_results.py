"""Results of other threads, brought to an event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import Future
from typing import Any

import pytest

from turnwise.runtime.cross_thread_results import until_done


async def test_many_results_of_a_thread_come_with_few_wake_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    futures: list[Future[int]] = [Future() for _ in range(200)]
    waiting = [asyncio.ensure_future(wait_for(future)) for future in futures]
    await asyncio.sleep(0)
    loop, wake_ups = asyncio.get_running_loop(), 0
    wake = loop.call_soon_threadsafe

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal wake_ups
        wake_ups += 1
        return wake(*args, **kwargs)

    monkeypatch.setattr(loop, "call_soon_threadsafe", count)

    def settle() -> None:
        for index, future in enumerate(futures):
            future.set_result(index)

    thread = threading.Thread(target=settle)
    thread.start()
    thread.join()  # the loop is held up meanwhile: all of them are there when it goes on
    assert await asyncio.gather(*waiting) == list(range(200))
    assert wake_ups == 1


async def wait_for(future: Future[int]) -> int:
    await until_done(future)
    return future.result()


async def test_no_result_is_lost_between_a_thread_and_a_busy_loop() -> None:
    futures: list[Future[int]] = [Future() for _ in range(2000)]

    def settle(start: int) -> None:
        for index in range(start, len(futures), 4):
            futures[index].set_result(index)

    waiting = [asyncio.ensure_future(wait_for(future)) for future in futures]
    threads = [threading.Thread(target=settle, args=(start,)) for start in range(4)]
    for thread in threads:
        await asyncio.sleep(0)
        thread.start()
    async with asyncio.timeout(10):
        assert await asyncio.gather(*waiting) == list(range(2000))


async def test_an_error_and_a_cancelled_request_arrive_too() -> None:
    failed: Future[int] = Future()
    cancelled: Future[int] = Future()
    waiting = [until_done(failed), until_done(cancelled)]
    failed.set_exception(ValueError("no"))
    cancelled.cancel()
    async with asyncio.timeout(10):
        await asyncio.gather(*waiting)


async def test_to_stop_waiting_cancels_nothing() -> None:
    future: Future[int] = Future()
    waiting = asyncio.ensure_future(wait_for(future))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not future.cancelled()
    future.set_result(1)  # nobody is there any more, and nothing complains
    await asyncio.sleep(0.01)


def test_a_result_for_a_loop_that_is_closed_hurts_nobody() -> None:
    loops = []
    for _ in range(3):
        future: Future[int] = Future()

        async def leave(future: Future[int] = future) -> None:
            loops.append(weakref.ref(asyncio.get_running_loop()))
            until_done(future)

        asyncio.run(leave())
        future.set_result(1)
        del future, leave
    gc.collect()
    assert [loop() for loop in loops] == [None] * 3, "nothing keeps it"
