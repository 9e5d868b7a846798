"""What the process waits for at this moment: which party, for what, on whose behalf, since when, and how long at most.

Every await that leaves our code is listed here while it lasts (`rollout.call`, tools, the calls of `train`), so that
a run that stands still can say why.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

caller: ContextVar[str] = ContextVar("caller", default="")
"""On whose behalf calls are made in this task, such as "sum-7, attempt 2"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One call that has not come back yet."""

    party: str
    """env, tool, sampler, judge, trainer, critic."""
    what: str
    who: str
    since_s: float
    """On the clock of `time.monotonic`."""
    deadline_s: float
    """Seconds after `since_s` at which it is given up."""

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.since_s

    def __str__(self) -> str:
        who = f" ({self.who})" if self.who else ""
        return f"{self.party}: {self.what}{who}, {self.waited_s:.1f} s of at most {self.deadline_s:.3g} s"


class Waits:
    """All of them. Written by the event loop; any thread may look."""

    def __init__(self) -> None:
        self._open: dict[int, Wait] = {}
        self._numbers = itertools.count()
        self.num_over = 0
        """Calls that came back, well or not."""

    @contextmanager
    def listed(self, party: str, what: str, deadline_s: float) -> Iterator[None]:
        number = next(self._numbers)
        self._open[number] = Wait(
            party=party, what=what, who=caller.get(), since_s=time.monotonic(), deadline_s=deadline_s
        )
        try:
            yield
        finally:
            del self._open[number]
            self.num_over += 1

    def __len__(self) -> int:
        return len(self._open)

    def oldest(self, count: int = 1) -> list[Wait]:
        """The longest waits first."""
        open_now = list(self._open.values())  # copied in one go: the event loop may be changing it
        return sorted(open_now, key=lambda wait: wait.since_s)[:count]


WAITS = Waits()
"""Of this process."""
