"""Awaits one outside party: env, tool, sampler or renderer.

Whatever goes wrong in there leaves as `AttemptFailed` with the party's name on it, a passed deadline included. Nothing
else in the rollout catches errors it does not know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from turnwise.errors import AttemptFailed, Party
from turnwise.runtime.pending_calls import PENDING_CALLS

T = TypeVar("T")

CANCEL_GRACE_S = 1.0
"""How long a cancelled call may take to clean up before it is left to itself."""


class DeadlinePassed(AttemptFailed):
    """A party did not answer in time."""


async def call(
    party: Party,
    what: str,
    work: Callable[[], Awaitable[T]],
    *,
    deadline_s: float,
    on_abandoned: Callable[[], None] | None = None,
) -> T:
    """Await `work()` for at most `deadline_s`; then it is cancelled.

    The work runs in a task of its own, so that a party that swallows its cancellation is left behind (and reported by
    `on_abandoned`) instead of holding up the attempt.
    """
    task = asyncio.create_task(_blamed(party, what, work))
    with PENDING_CALLS.listed(party, what, deadline_s):
        try:
            await asyncio.wait({task}, timeout=deadline_s)
        except asyncio.CancelledError:
            await _cancel(task, on_abandoned)
            raise
        if not task.done():
            await _cancel(task, on_abandoned)
            if task.done() and not task.cancelled():
                task.exception()  # it came too late; asyncio is told that somebody looked
            raise DeadlinePassed(party, f"{what} gave no answer within {deadline_s:.3g} s")
    if task.cancelled():
        raise AttemptFailed(party, f"{what} cancelled itself")
    return task.result()


def call_now(party: Party, what: str, work: Callable[[], T]) -> T:
    """Run plain code of a party that answers at once."""
    try:
        return work()
    except AttemptFailed:
        raise  # a party further in was already blamed
    except (Exception, SystemExit) as cause:  # as in `_blamed`
        raise AttemptFailed(party, f"{what}: {cause!r}") from cause


async def _blamed(party: Party, what: str, work: Callable[[], Awaitable[T]]) -> T:
    try:
        return await work()
    except AttemptFailed:
        raise
    except (Exception, SystemExit) as cause:  # an env that calls sys.exit() ends its attempt, not the run
        raise AttemptFailed(party, f"{what}: {cause!r}") from cause


async def _cancel(task: asyncio.Task[T], on_abandoned: Callable[[], None] | None) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
    if not task.done():
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
        if on_abandoned is not None:
            on_abandoned()
