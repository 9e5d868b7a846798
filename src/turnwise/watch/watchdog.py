"""Deadlines for everything that the training loop awaits, so that a run never hangs silently.

The loop awaits the trainer through `call`, which has a deadline, and attempts through `any_of`. Attempts have deadlines
of their own, so `any_of` only requires that some call returns from time to time. A party that does not answer in time
raises `StalledError`, which names the party, what it was asked and for how long. `training/heartbeat.py` notices code
or a disk that blocks the event loop itself.
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
"""How often `any_of` checks for progress."""


class StalledError(TurnwiseError):
    """A party did not answer in time, and the run cannot go on without it. Saved checkpoints are safe."""

    def __init__(self, party: str, detail: str) -> None:
        super().__init__(
            f"{party}: {detail}. The run was stopped; turnwise train --resume continues from its last checkpoint"
        )
        self.party = party


class Watchdog:
    """Deadlines of one training loop."""

    def __init__(
        self, *, call_deadline_s: float = 1800.0, stall_deadline_s: float = 1800.0, calls: PendingCalls = PENDING_CALLS
    ) -> None:
        """Args:
        call_deadline_s: Most seconds of one call of the trainer, checkpoints included.
        stall_deadline_s: Most seconds without a returned call of any party while the loop waits for attempts.
        """
        self._call_deadline_s = call_deadline_s
        self._stall_deadline_s = stall_deadline_s
        self._calls = calls
        self.reason = ""
        """What the loop waits for now, in words; empty while it computes."""

    async def call(self, party: str, what: str, work: Awaitable[T]) -> T:
        """Await one answer. Raises `StalledError` when it does not come in time."""
        self.reason = f"{party}: {what}"
        limit = asyncio.timeout(self._call_deadline_s)
        try:
            with self._calls.listed(party, what, self._call_deadline_s):
                async with limit:
                    return await work
        except TimeoutError:
            if not limit.expired():
                raise
            raise StalledError(party, f"{what} gave no answer within {self._call_deadline_s:.3g} s") from None
        finally:
            self.reason = ""

    async def any_of(self, tasks: Sequence[asyncio.Task[Any]], waits_for: Callable[[], str]) -> None:
        """Wait until one of the tasks is done. Raises `StalledError` when no call of any party returns meanwhile."""
        num_over, moved_s = self._calls.num_over, time.monotonic()
        done: set[asyncio.Task[Any]] = set()
        try:
            while not done:
                self.reason = waits_for()
                done, _ = await asyncio.wait(tasks, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
                if self._calls.num_over != num_over:
                    num_over, moved_s = self._calls.num_over, time.monotonic()
                elif time.monotonic() - moved_s > self._stall_deadline_s:
                    raise StalledError(
                        "attempts", f"no call returned for {self._stall_deadline_s:.3g} s; {self.told()}"
                    )
        finally:
            self.reason = ""

    def told(self) -> str:
        """The calls that have been pending longest, in words."""
        oldest = "; ".join(str(call) for call in self._calls.oldest(3))
        return f"{self.reason or 'nothing'}; longest waits: {oldest or 'none, which is a bug in turnwise'}"
