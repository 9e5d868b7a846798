"""Nothing stands still in silence.

Every await of the loop goes through here: on the trainer with a deadline (`call`), on the attempts that are played
(`any_of`), which have deadlines of their own and are expected to end one after the other. What does not come back in
time raises `StalledError` with the name of the party, what it was asked, and since when. What blocks the event loop
itself, such as a disk, is seen by `pulse.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from turnwise.errors import TurnwiseError
from turnwise.runtime.pending_calls import PENDING_CALLS, PendingCalls

T = TypeVar("T")

TICK_S = 0.5
"""How often the loop looks whether anything moves."""


class StalledError(TurnwiseError):
    """Somebody did not answer in time, and the run cannot go on without it; what was saved is safe."""

    def __init__(self, party: str, detail: str) -> None:
        super().__init__(
            f"{party}: {detail}. The run was stopped; go on with it with turnwise train --resume, from its last "
            "checkpoint"
        )
        self.party = party


class Watchdog:
    """Keeps time for one loop."""

    def __init__(
        self, *, call_deadline_s: float = 1800.0, stall_deadline_s: float = 1800.0, waits: PendingCalls = PENDING_CALLS
    ) -> None:
        """Args:
        call_deadline_s: for one call of the trainer, checkpoints included.
        stall_deadline_s: how long no call of any party may come back while the loop waits for attempts.
        """
        self._call_deadline_s = call_deadline_s
        self._stall_deadline_s = stall_deadline_s
        self._waits = waits
        self.reason = ""
        """What the loop waits for, in words; empty while it computes."""

    async def call(self, party: str, what: str, work: Awaitable[T]) -> T:
        """Await one answer; `StalledError` when it does not come."""
        self.reason = f"{party}: {what}"
        limit = asyncio.timeout(self._call_deadline_s)
        try:
            with self._waits.listed(party, what, self._call_deadline_s):
                async with limit:
                    return await work
        except TimeoutError:
            if not limit.expired():
                raise
            raise StalledError(party, f"{what} gave no answer within {self._call_deadline_s:.3g} s") from None
        finally:
            self.reason = ""

    async def any_of(self, tasks: Sequence[asyncio.Task[Any]], waits_for: Callable[[], str]) -> None:
        """Wait until one of the tasks is done, as long as calls of any party come back meanwhile."""
        num_over, moved_s = self._waits.num_over, time.monotonic()
        done: set[asyncio.Task[Any]] = set()
        try:
            while not done:
                self.reason = waits_for()
                done, _ = await asyncio.wait(tasks, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
                if self._waits.num_over != num_over:
                    num_over, moved_s = self._waits.num_over, time.monotonic()
                elif time.monotonic() - moved_s > self._stall_deadline_s:
                    raise StalledError(
                        "attempts", f"nothing came back for {self._stall_deadline_s:.3g} s; {self.told()}"
                    )
        finally:
            self.reason = ""

    def told(self) -> str:
        """The longest waits of the process, in words."""
        oldest = "; ".join(str(wait) for wait in self._waits.oldest(3))
        return f"{self.reason or 'nothing'}; longest waits: {oldest or 'none, which is a bug of ours'}"
