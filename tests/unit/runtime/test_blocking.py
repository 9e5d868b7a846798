"""Coroutines from plain code, and plain code from coroutines."""

from __future__ import annotations

import asyncio
import threading

import pytest

from turnwise.runtime.blocking import in_thread, run_to_end


async def test_a_coroutine_can_be_run_from_plain_code_inside_a_loop() -> None:
    assert run_to_end(asyncio.sleep(0, result=7)) == 7


def test_its_exceptions_come_back() -> None:
    async def fail() -> None:
        raise LookupError("nope")

    with pytest.raises(LookupError, match="nope"):
        run_to_end(fail())


async def test_plain_code_in_a_thread_leaves_the_loop_free_and_its_exceptions_come_back() -> None:
    may_end = threading.Event()

    def wait() -> int:
        assert may_end.wait(120), "the loop was blocked"
        return 7

    waits = asyncio.create_task(in_thread(wait))
    await asyncio.sleep(0)
    may_end.set()  # reached only if the loop is free
    assert await waits == 7

    def fail() -> None:
        raise LookupError("nope")

    with pytest.raises(LookupError, match="nope"):
        await in_thread(fail)


async def test_whoever_stops_waiting_leaves_the_thread() -> None:
    may_end = threading.Event()
    waits = asyncio.create_task(in_thread(lambda: may_end.wait(120)))
    await asyncio.sleep(0)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    may_end.set()
