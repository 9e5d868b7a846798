"""Which requests a server gets at the same time: many side by side, or one alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Turnstile:
    """Lets many requests pass side by side, or one alone."""

    def __init__(self) -> None:
        self._is_free = asyncio.Condition()
        self._num_inside = 0
        self._num_alone = 0

    @contextlib.asynccontextmanager
    async def beside_others(self) -> AsyncIterator[None]:
        """Enter together with others. First wait until no caller is alone inside or waits for `alone`."""
        async with self._is_free:
            await self._is_free.wait_for(lambda: not self._num_alone)
            self._num_inside += 1
        try:
            yield
        finally:
            await self._leave()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Wait until nobody is inside; meanwhile nobody else enters."""
        self._num_alone += 1
        try:
            async with self._is_free:
                await self._is_free.wait_for(lambda: not self._num_inside)
                self._num_inside += 1
            try:
                yield
            finally:
                await self._leave()
        finally:
            self._num_alone -= 1
            async with self._is_free:
                self._is_free.notify_all()

    async def _leave(self) -> None:
        async with self._is_free:
            self._num_inside -= 1
            self._is_free.notify_all()
