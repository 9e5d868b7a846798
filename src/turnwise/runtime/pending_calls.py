"""The calls that this process waits for now: whom it called, for what, on whose behalf, and for how long.

Every await that leaves our code is listed here while it lasts (`rollout.call`, tools, the calls of the training loop),
so that a run that makes no progress can say why.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

caller: ContextVar[str] = ContextVar("caller", default="")
"""The attempt that this task makes calls for, such as "sum-7, attempt 2"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCall:
    """One call that has not returned yet."""

    party: str
    """Who was called: env, tool, sampler, judge, trainer, critic or a server."""
    what: str
    who: str
    since_s: float
    """Start, on the clock of `time.monotonic`."""
    deadline_s: float
    """Seconds after `since_s` at which the call is given up."""
    is_reason: bool = False
    """Whether it is why the calls around it wait, so that it is shown before them."""

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.since_s

    def __str__(self) -> str:
        who = f" ({self.who})" if self.who else ""
        return f"{self.party}: {self.what}{who}, {self.waited_s:.1f} s of at most {self.deadline_s:g} s"


class PendingCalls:
    """All pending calls. The event loop writes; any thread may read."""

    def __init__(self) -> None:
        self._open: dict[int, PendingCall] = {}
        self._numbers = itertools.count()
        self.num_over = 0
        """Calls that have returned, with or without an error."""

    @contextmanager
    def listed(self, party: str, what: str, deadline_s: float, *, is_reason: bool = False) -> Generator[None]:
        """List a call while the block runs."""
        number = next(self._numbers)
        self._open[number] = PendingCall(
            party=party,
            what=what,
            who=caller.get(),
            since_s=time.monotonic(),
            deadline_s=deadline_s,
            is_reason=is_reason,
        )
        try:
            yield
        finally:
            del self._open[number]
            self.num_over += 1

    def __len__(self) -> int:
        return len(self._open)

    def oldest(self, count: int = 1) -> list[PendingCall]:
        """The `count` calls that have been pending longest: known reasons first, then the longest first."""
        open_now = list(self._open.values())  # copied in one go, because the event loop may change the dict meanwhile
        return sorted(open_now, key=lambda call: (not call.is_reason, call.since_s))[:count]


PENDING_CALLS = PendingCalls()
"""The pending calls of this process."""
