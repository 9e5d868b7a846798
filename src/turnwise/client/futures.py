"""What client calls return, for people who wait and for people who await.

`ApiFuture[T]` is a request under way: `.result()`, `.result_async()` and `await` all give its value.

    output = trainer.forward_backward(datums, "ppo").result()
    output = await trainer.forward_backward(datums, "ppo")

`Submission[T]` is what an `*_async` method returns when the plain method returns an `ApiFuture`. The request is under
way as soon as the method is called; awaiting it gives the `ApiFuture`, without waiting. That is Tinker's habit, and
asking the submission itself for its result is the other one:

    future = await trainer.forward_backward_async(datums, "ppo")        # an ApiFuture
    output = await future                                               # or future.result_async(), future.result()

    output = await trainer.forward_backward_async(datums, "ppo").result_async()

Methods whose plain form gives a value (`get_info`, `create_*`, ...), and `sample_async` and `compute_logprobs_async`,
are ordinary coroutines: awaiting them gives the value.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, Generic, NoReturn, TypeVar

from turnwise.errors import ServiceError
from turnwise.runtime.cross_thread_results import until_done

T = TypeVar("T")


class _Request(Generic[T]):
    """The part that `ApiFuture` and `Submission` share."""

    def __init__(
        self,
        future: Future[T],
        what: str,
        *,
        on_abandoned: Callable[[], object] | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """Wrap `future`; `what` names the request in timeouts, `on_abandoned` is called when an asyncio task that
        waits for it is cancelled. `deadline_s` bounds a wait for which the caller names no timeout."""
        self._future = future
        self._what = what
        self._on_abandoned = on_abandoned
        self._deadline_s = deadline_s

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value; the request's own error is raised here. A timeout leaves the request under way."""
        try:
            return self._future.result(self._deadline_s if timeout is None else timeout)
        except TimeoutError:
            return self._late_result(timeout)

    async def result_async(self, timeout: float | None = None) -> T:
        """`result` for a coroutine."""
        if not self._future.done():
            try:
                async with asyncio.timeout(self._deadline_s if timeout is None else timeout):
                    await until_done(self._future)  # a deadline that passes does not cancel the request
            except TimeoutError:
                return self._late_result(timeout)
            except asyncio.CancelledError:
                if self._on_abandoned is not None:
                    self._on_abandoned()
                raise
        return self._future.result()

    def done(self) -> bool:
        return self._future.done()

    def cancel(self) -> bool:
        """Withdraw the request if it was not begun; sampling stops at any time. False when it was too late."""
        return self._future.cancel()

    def future(self) -> Future[T]:
        """The `concurrent.futures.Future` underneath."""
        return self._future

    def _late_result(self, timeout: float | None) -> T:
        if self._future.done():  # it came at the last moment, or ended in a TimeoutError of its own
            return self._future.result()
        if timeout is None:
            raise ServiceError(f"{self._what}: no answer within {self._deadline_s:g} s") from None
        raise TimeoutError(f"{self._what}: not done after {timeout} s; it is still under way") from None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._what}: {'done' if self.done() else 'under way'}>"


class ApiFuture(_Request[T]):
    """A request under way; `.result()`, `.result_async()` and `await` give its value."""

    def __await__(self) -> Generator[Any, Any, T]:
        return self.result_async().__await__()


class Submission(_Request[T], Coroutine[Any, Any, ApiFuture[T]]):
    """A request under way, as an `*_async` method returns it; `await` gives its `ApiFuture`.

    It is a coroutine that ends at its first step, so `asyncio.create_task` and `asyncio.run` take it too.
    """

    def __init__(self, future: ApiFuture[T]) -> None:
        super().__init__(future._future, future._what, on_abandoned=future._on_abandoned, deadline_s=future._deadline_s)
        self._api_future = future

    def __await__(self) -> Generator[Any, Any, ApiFuture[T]]:
        yield from ()
        return self._api_future

    def send(self, _value: Any, /) -> NoReturn:
        raise StopIteration(self._api_future)

    def throw(self, typ: Any, val: Any = None, tb: Any = None, /) -> NoReturn:
        error = typ if isinstance(typ, BaseException) else typ(val) if val is not None else typ()
        raise error.with_traceback(tb)

    def close(self) -> None:
        """Nothing to close: the request goes on without it."""


def completed(value: T, what: str) -> ApiFuture[T]:
    """An `ApiFuture` that is done."""
    future: Future[T] = Future()
    future.set_result(value)
    return ApiFuture(future, what)
