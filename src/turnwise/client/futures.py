"""What client calls return, for plain code that waits and for coroutines that await.

`ApiFuture[T]` is a request under way: `.result()`, `.result_async()` and `await` all give its value.

    output = trainer.forward_backward(datums, "ppo").result()
    output = await trainer.forward_backward(datums, "ppo")

`Submission[T]` is what an `*_async` method returns when the plain method returns an `ApiFuture`. The request is under
way as soon as the method is called; awaiting it gives the `ApiFuture`, without waiting. Tinker's recipes do that. You
can also ask the submission itself for its result:

    future = await trainer.forward_backward_async(datums, "ppo")        # an ApiFuture
    output = await future                                               # or future.result_async(), future.result()

    output = await trainer.forward_backward_async(datums, "ppo").result_async()

Methods whose plain form gives a value (`get_info`, `create_*`, ...), and `sample_async` and `compute_logprobs_async`,
are ordinary coroutines: awaiting them gives the value.

No client writes its `*_async` methods: `submitted`, `awaited` and `in_thread` make the twin of a plain method, with its
signature, and call the plain method of whatever class the client is. `waited` makes the plain form of one that submits.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar

from turnwise.errors import ServiceError
from turnwise.runtime.cross_thread_results import until_done

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class _Request(Generic[T_co]):
    """What `ApiFuture` and `Submission` have in common."""

    def __init__(
        self,
        future: Future[T_co],
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

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for the value; raise the request's error if it has one. After a timeout the request goes on."""
        try:
            return self._future.result(self._deadline_s if timeout is None else timeout)
        except TimeoutError:
            return self._late_result(timeout)

    async def result_async(self, timeout: float | None = None) -> T_co:
        """Like `result`, for a coroutine."""
        if not self._future.done():
            try:
                async with asyncio.timeout(self._deadline_s if timeout is None else timeout):
                    await until_done(self._future)  # a missed deadline does not cancel the request
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
        """Withdraw the request if it has not begun; sampling can be stopped at any time. False if it is too late."""
        return self._future.cancel()

    def future(self) -> Future[T_co]:
        """The `concurrent.futures.Future` underneath."""
        return self._future

    def _late_result(self, timeout: float | None) -> T_co:
        if self._future.done():  # the result came at the last moment, or the request itself raised a TimeoutError
            return self._future.result()
        if timeout is None:
            raise ServiceError(f"{self._what}: no answer within {self._deadline_s:g} s") from None
        raise TimeoutError(f"{self._what}: not done after {timeout} s; it is still under way") from None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._what}: {'done' if self.done() else 'under way'}>"


class ApiFuture(_Request[T_co]):
    """A request under way; `.result()`, `.result_async()` and `await` give its value."""

    def __await__(self) -> Generator[Any, Any, T_co]:
        return self.result_async().__await__()

    def then(self, change: Callable[[T_co], T]) -> ApiFuture[T]:
        """The same request with a function applied to its value. Cancelling either future cancels both."""
        source, changed = self._future, Future[T]()

        def arrive(done: Future[T_co]) -> None:
            if done.cancelled():
                changed.cancel()
            if not changed.set_running_or_notify_cancel():
                return
            try:
                changed.set_result(change(done.result()))
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the future
                changed.set_exception(error)

        def withdraw(done: Future[T]) -> None:
            if done.cancelled():
                source.cancel()

        changed.add_done_callback(withdraw)
        source.add_done_callback(arrive)
        return ApiFuture(changed, self._what, on_abandoned=self._on_abandoned, deadline_s=self._deadline_s)


class Submission(_Request[T_co], Coroutine[Any, Any, ApiFuture[T_co]]):
    """A request under way, as an `*_async` method returns it; `await` gives its `ApiFuture`.

    It is a coroutine that ends at its first step, so `asyncio.create_task` and `asyncio.run` accept it too.
    """

    def __init__(self, future: ApiFuture[T_co]) -> None:
        super().__init__(future._future, future._what, on_abandoned=future._on_abandoned, deadline_s=future._deadline_s)
        self._api_future = future

    def __await__(self) -> Generator[Any, Any, ApiFuture[T_co]]:
        yield from ()
        return self._api_future

    def send(self, _value: Any, /) -> NoReturn:
        raise StopIteration(self._api_future)

    def throw(self, typ: Any, val: Any = None, tb: Any = None, /) -> NoReturn:
        error = typ if isinstance(typ, BaseException) else typ(val) if val is not None else typ()
        raise error.with_traceback(tb)

    def close(self) -> None:
        """Do nothing: the request goes on without this object."""


def completed(value: T, what: str) -> ApiFuture[T]:
    """Make an `ApiFuture` that is done."""
    future: Future[T] = Future()
    future.set_result(value)
    return ApiFuture(future, what)


def submitted(
    method: Callable[Concatenate[S, P], ApiFuture[T]],
) -> Callable[Concatenate[S, P], Submission[T]]:
    """Make the `*_async` twin of a method that returns an `ApiFuture`: the request is under way when it returns."""
    name = method.__name__

    def twin(self: S, *args: P.args, **kwargs: P.kwargs) -> Submission[T]:
        return Submission(getattr(self, name)(*args, **kwargs))

    return _as_twin(twin, method, f"{name}_async", lambda returned: returned.replace("ApiFuture", "Submission", 1))


def awaited(
    method: Callable[Concatenate[S, P], ApiFuture[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Make the `*_async` twin of a method that returns an `ApiFuture`: a coroutine that gives the future's value.

    Cancelling the task that awaits it abandons the request; sampling stops then.
    """
    name = method.__name__

    async def twin(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return await getattr(self, name)(*args, **kwargs)

    return _as_twin(twin, method, f"{name.removesuffix('_submit')}_async", _inside)


def waited(method: Callable[Concatenate[S, P], ApiFuture[T]]) -> Callable[Concatenate[S, P], T]:
    """Make the blocking form of a `*_submit` method: it waits for the future and returns its value."""
    name = method.__name__

    def twin(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return getattr(self, name)(*args, **kwargs).result()

    return _as_twin(twin, method, name.removesuffix("_submit"), _inside)


def in_thread(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Make the `*_async` twin of a method that blocks: a coroutine that runs it in a thread."""
    name = method.__name__

    async def twin(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(getattr(self, name), *args, **kwargs)

    return _as_twin(twin, method, f"{name}_async", str)


def _as_twin(twin: Any, method: Callable[..., Any], name: str, returns: Callable[[str], str]) -> Any:
    """Give a twin its name, and the plain method's text and signature, for `help()` and editors."""
    signature = inspect.signature(method)
    twin.__module__ = method.__module__
    twin.__name__, twin.__qualname__ = name, method.__qualname__.replace(method.__name__, name)
    how = "for a coroutine" if name.endswith("_async") else "waited for"
    twin.__doc__ = f"`{method.__name__}`, {how}: {method.__doc__ or ''}"
    twin.__signature__ = signature.replace(return_annotation=returns(str(signature.return_annotation)))
    return twin


def _inside(returned: str) -> str:
    """`ApiFuture[T]` -> `T`"""
    return returned.removeprefix("ApiFuture[").removesuffix("]")
