"""Whole weights of a trainer in this process, which another process reads on the same device.

A publisher holds a `SharedWeights` for as long as a server may ask for that version again. Everything that touches the
device runs on the engine's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from turnwise.engine.worker import EngineWorker
from turnwise.errors import ServiceError

if TYPE_CHECKING:
    from turnwise.engine.engine import Engine
    from turnwise.engine.shared_weights import ExportedBuffer, SharedChunk, WeightShare, WholeWeights

T = TypeVar("T")
MakeBuffer = Callable[[int], "ExportedBuffer"]


class SharedWeights:
    """One published version, until it is released."""

    def __init__(
        self, worker: EngineWorker, queue_id: str, weights: WholeWeights, make_buffer: MakeBuffer | None = None
    ) -> None:
        """Do not call this; use `LocalTrainingClient.share_weights`.

        Args:
            make_buffer: Makes a buffer of a given size that the other process can open; None: on the engine's GPU.
        """
        self._worker = worker
        self._queue_id = f"{queue_id} shares its weights"  # a queue of its own: a server waits for it
        self._weights: WholeWeights | None = weights
        self._make_buffer = make_buffer

    def release(self) -> None:
        """Let the weights go; nobody can read them after this."""
        self._weights = None

    @asynccontextmanager
    async def reading(self) -> AsyncGenerator[AsyncGenerator[SharedChunk]]:
        """The weights in chunks. Each one is valid until the next is asked for; the last one until the context ends."""
        weights = self._weights
        if weights is None:
            raise ServiceError("these weights were released: newer ones were published")
        share = await self._run(lambda engine: engine.share(weights, self._make_buffer))
        try:
            yield self._chunks(share)
        finally:
            await asyncio.shield(self._run(lambda _: share.close()))

    async def _chunks(self, share: WeightShare) -> AsyncGenerator[SharedChunk]:
        while True:
            chunk = await self._run(lambda _: share.next_chunk())
            if chunk is None:
                return
            yield chunk

    def _run(self, work: Callable[[Engine], T]) -> asyncio.Future[T]:
        return asyncio.wrap_future(self._worker.run(self._queue_id, work))
