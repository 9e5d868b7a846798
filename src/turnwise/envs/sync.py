"""Envs whose methods are plain functions: each env gets one thread, so that a slow step holds up nobody else.

One thread per env, and not a shared pool, for three reasons. All of an env's plain methods run in the same thread, so
it may hold a database connection. A hundred envs that wait do not queue behind a pool made for two cores. And the
thread is a daemon: a step that never returns costs that thread and not the end of the program.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

from turnwise.envs.base import Env, EnvStep
from turnwise.errors import ConfigError
from turnwise.trajectory import Message

ENV_METHODS = ("start", "step", "close")


def as_env(env: object) -> Env:
    """`env` itself when its three methods are coroutines, else a wrapper that runs the plain ones in a thread."""
    missing = [name for name in ENV_METHODS if not callable(getattr(env, name, None))]
    if missing:
        hint = "; a class with step(response, ground_truth) goes through turnwise.envs.adapters.base_environment"
        raise ConfigError(
            f"{type(env).__name__} has no {missing[0]}(); an env has start(), step(reply) and close()"
            + (hint if callable(getattr(env, "reset", None)) else "")
        )
    if all(inspect.iscoroutinefunction(getattr(env, name)) for name in ENV_METHODS):
        return cast(Env, env)
    return ThreadedEnv(env)


class ThreadedEnv:
    """An `Env` around an object of which at least one method is a plain function.

    `state_key` and `fork` are there exactly when the object has them.
    """

    def __init__(self, inner: object) -> None:
        self._inner = cast(Any, inner)
        self._thread: CallThread | None = None

    async def start(self) -> Sequence[Message]:
        return await self._call(self._inner.start)

    async def step(self, reply: Message) -> EnvStep:
        return await self._call(self._inner.step, reply)

    async def close(self) -> None:
        """Also ends the thread. When an earlier call is stuck in it, `close` runs in another one."""
        if self._thread is not None and self._thread.is_busy:
            self._drop_thread()
        try:
            await self._call(self._inner.close)
        finally:
            self._drop_thread()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also keeps copy and pickle from looking for `_inner` in itself
            raise AttributeError(name)
        value = getattr(self._inner, name)
        return (lambda: as_env(value())) if name == "fork" else value

    async def _call(self, method: Callable[..., Any], *args: object) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(*args)
        if self._thread is None:
            self._thread = CallThread()
        result = await self._thread.run(method, *args)
        return await result if inspect.isawaitable(result) else result

    def _drop_thread(self) -> None:
        if self._thread is not None:
            self._thread.stop()
            self._thread = None


async def call_in_thread(function: Callable[..., Any], *args: object) -> Any:
    """Run one plain function in a thread of its own."""
    thread = CallThread()
    try:
        return await thread.run(function, *args)
    finally:
        thread.stop()


@dataclass(frozen=True, slots=True)
class _Call:
    work: Callable[[], Any]
    outcome: Future[Any]


class CallThread:
    """A daemon thread that runs one call after the other, until it is stopped or forgotten."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._current: Future[Any] | None = None
        # The thread holds the queue and not this object, so an env that nobody closed is still cleaned up.
        self._ending = weakref.finalize(self, self._calls.put, None)
        self._ending.atexit = False
        threading.Thread(target=_serve, args=(self._calls,), name="turnwise-env", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """A call was begun and has not come back."""
        return self._current is not None and not self._current.done()

    async def run(self, function: Callable[..., Any], *args: object) -> Any:
        context = contextvars.copy_context()
        outcome: Future[Any] = Future()
        outcome.set_running_or_notify_cancel()  # from here on a waiter may leave, but the call goes on
        self._current = outcome
        self._calls.put(_Call(work=lambda: context.run(function, *args), outcome=outcome))
        return await asyncio.wrap_future(outcome)

    def stop(self) -> None:
        """Let the thread end after the call that it is in."""
        self._ending()


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        _perform(call)
        del call  # an env must not stay alive while its thread waits


def _perform(call: _Call) -> None:
    try:
        call.outcome.set_result(call.work())
    except StopIteration as error:  # a coroutine cannot let this one through
        call.outcome.set_exception(RuntimeError(f"StopIteration left the call: {error}"))
    except BaseException as error:  # noqa: BLE001 - it belongs to whoever awaits the call
        call.outcome.set_exception(error)
