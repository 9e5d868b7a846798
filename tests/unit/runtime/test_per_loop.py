"""One value for each event loop."""

from __future__ import annotations

import asyncio
import gc
import weakref

from turnwise.runtime.per_loop import PerLoop


def test_a_loop_always_gets_its_own_and_it_is_gone_with_the_loop() -> None:
    locks = PerLoop(asyncio.Lock)

    async def ask() -> asyncio.Lock:
        first = locks.get()
        await asyncio.sleep(0)
        assert locks.get() is first
        return first

    made = [asyncio.run(ask()) for _ in range(3)]
    assert len({id(lock) for lock in made}) == 3
    left = [weakref.ref(lock) for lock in made]
    made.clear()
    gc.collect()
    assert [lock() for lock in left] == [None] * 3
