"""Accepted requests: their promises, long polls, and results that are kept in case the client asks again.

Everything here belongs to the event loop's thread. A request id starts with an id of the process that made it. After a
restart, this tells a lost promise from one that never existed.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from turnwise.service.failures import HttpFailure, not_found
from turnwise.service.wire.results import RequestOutcome

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]

KEEP_S = 3600.0
"""Results are kept this long. If memory for results runs out, the oldest that were read go first."""


@dataclass(slots=True, eq=False)
class Promise:
    """One accepted request."""

    request_id: str
    owner: str
    kind: str
    num_bytes: int
    """Size of the request while it waits; size of the result once there is one."""
    outcome: RequestOutcome | None = None
    was_read: bool = False
    finished_at: float = 0.0
    why_waiting: Callable[[], tuple[QueueState, str | None]] = lambda: ("active", None)
    on_cancel: Callable[[], None] | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    on_done: list[Callable[[Promise], None]] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.outcome is not None


class Promises:
    """All promises of the process, with bounds on what waits and on what is kept."""

    def __init__(self, *, max_queued_bytes: int, max_queued_requests: int, max_kept_bytes: int) -> None:
        self._max_queued_bytes = max_queued_bytes
        self._max_queued_requests = max_queued_requests
        self._max_kept_bytes = max_kept_bytes
        self._life = uuid.uuid4().hex[:12]
        self._ids = itertools.count(1)
        self._promises: dict[str, Promise] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._queued_bytes = 0
        self._kept_bytes = 0
        self._num_waiting: dict[str, int] = {}
        self._closing = asyncio.Event()
        self.on_settled: Callable[[Promise], None] | None = None
        """Called for every promise that is settled; for counting."""

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    @property
    def num_waiting(self) -> int:
        return sum(self._num_waiting.values())

    def check_room(self, owner: str, num_bytes: int) -> None:
        """Refuse a submission for now, before memory runs out; SDKs try again by themselves."""
        if self._num_waiting.get(owner, 0) >= self._max_queued_requests:
            reason = f"{self._max_queued_requests} requests of this key are waiting already"
        elif self._queued_bytes + num_bytes > self._max_queued_bytes:
            reason = "the server's queue is full"
        else:
            return
        raise HttpFailure(429, f"{reason}; try again in a moment", headers={"retry-after": "1"})

    def create(self, owner: str, kind: str, num_bytes: int, *, request_id: str | None = None) -> Promise:
        promise = Promise(request_id or self.new_id(), owner, kind, num_bytes)
        self._promises[promise.request_id] = promise
        self._queued_bytes += num_bytes
        self._num_waiting[owner] = self._num_waiting.get(owner, 0) + 1
        return promise

    def new_id(self) -> str:
        return f"req-{self._life}-{next(self._ids)}"

    def restore(self, owner: str, kind: str, request_id: str, outcome: RequestOutcome) -> Promise:
        """Create a promise that an earlier process had settled."""
        promise = self.create(owner, kind, 0, request_id=request_id)
        self.settle(promise, outcome)
        return promise

    def settle(self, promise: Promise, outcome: RequestOutcome) -> None:
        """Give a promise its result, once."""
        if promise.is_done:
            return
        self._queued_bytes -= promise.num_bytes
        self._num_waiting[promise.owner] -= 1
        if not self._num_waiting[promise.owner]:
            del self._num_waiting[promise.owner]
        promise.outcome, promise.num_bytes = outcome, outcome.num_bytes
        promise.finished_at = time.monotonic()
        promise.on_cancel = None
        promise.done.set()
        self._finished[promise.request_id] = None
        self._kept_bytes += promise.num_bytes
        for callback in promise.on_done:
            callback(promise)
        promise.on_done.clear()
        if self.on_settled is not None:
            self.on_settled(promise)
        self._make_room()

    def get(self, request_id: str, owner: str) -> Promise:
        """Return the promise; raise 404 for an unknown one, 410 for one of an earlier process (SDKs sample again)."""
        promise = self._promises.get(request_id)
        if promise is not None and promise.owner == owner:
            return promise
        if request_id.startswith("req-") and not request_id.startswith(f"req-{self._life}-"):
            raise HttpFailure(
                410,
                "this request was lost when the server restarted, or its result was kept long enough; send it again",
            )
        raise not_found("request")

    async def wait(self, promise: Promise, hold_s: float) -> bool:
        """Wait until the promise is settled; False if the client has to ask again."""
        if promise.is_done:
            return True
        if self._closing.is_set():
            return False
        waits = [asyncio.ensure_future(promise.done.wait()), asyncio.ensure_future(self._closing.wait())]
        try:
            await asyncio.wait(waits, timeout=hold_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return promise.is_done

    def close(self) -> None:
        """Answer every poll that is waiting."""
        self._closing.set()

    def _make_room(self) -> None:
        if self._kept_bytes <= self._max_kept_bytes:
            return
        for wants_read in (True, False):
            for request_id in list(self._finished):
                if self._promises[request_id].was_read or not wants_read:
                    self._forget(request_id)
                    if self._kept_bytes <= self._max_kept_bytes:
                        return

    def sweep(self) -> None:
        """Forget results that were kept long enough."""
        before = time.monotonic() - KEEP_S
        for request_id in list(self._finished):
            if self._promises[request_id].finished_at > before:
                return
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._finished[request_id]
        self._kept_bytes -= self._promises.pop(request_id).num_bytes
