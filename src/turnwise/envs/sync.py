"""Runs envs whose methods are plain functions: each env gets one thread, so that a slow step blocks no other env.

There are three reasons for one thread per env instead of a shared pool. All plain methods of an env run in the same
thread, so it may hold a database connection. A hundred waiting envs do not queue behind a pool made for two cores. The
thread is a daemon: a step that never returns keeps its thread, but does not keep the program from ending.

Threads are expensive beside a sampler that holds Python's lock most of the time: starting a thread or waiting for one
may wait for that lock. So an unused thread is kept for the next env. An env made of coroutines needs a thread only
while it is constructed, and many such envs share one.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

from turnwise.envs.base import Env, EnvStep
from turnwise.errors import ConfigError
from turnwise.runtime.cross_thread_results import until_done
from turnwise.runtime.per_loop import PerLoop
from turnwise.trajectory import Message

ENV_METHODS = ("start", "step", "close")
IDLE_S = 1.0
"""An unused thread ends when no new owner took it for this long."""
LOOK_S, QUICK = 0.02, 4
"""If envs wait to be made and a thread made fewer than `QUICK` envs in `LOOK_S` seconds, double the threads."""


def as_env(env: object) -> Env:
    """Return `env` itself if its three methods are coroutines, else a wrapper that runs the plain ones in a thread."""
    check_env_methods(env)
    return cast(Env, env) if has_coroutines(env) else ThreadedEnv(env)


def missing_methods(env: object) -> list[str]:
    """The methods of an env that an object or a class does not have; one inherited from `Env` is only declared."""
    found = {name: getattr(env, name, None) for name in ENV_METHODS}
    declared = {name: getattr(Env, name) for name in ENV_METHODS}
    return [
        name
        for name, method in found.items()
        if not callable(method) or getattr(method, "__func__", method) is declared[name]
    ]


def check_env_methods(env: object) -> None:
    """Refuse an object, or a class, that lacks a method of an env."""
    missing = missing_methods(env)
    if not missing:
        return
    name = env.__name__ if isinstance(env, type) else type(env).__name__
    first = "step(reply)" if missing[0] == "step" else f"{missing[0]}()"
    hint = "; a class with step(response, ground_truth) goes through turnwise.envs.adapters.base_environment"
    raise ConfigError(
        f"{name} has no {first}; an env has start(), step(reply) and close()"
        + (hint if callable(getattr(env, "reset", None)) else "")
    )


def has_coroutines(env: object) -> bool:
    """Whether all three methods are coroutines, so that the env needs no thread."""
    return all(inspect.iscoroutinefunction(getattr(env, name, None)) for name in ENV_METHODS)


class ThreadedEnv:
    """An `Env` around an object that has at least one method that is a plain function.

    It has optional methods such as `state_key` and `fork` exactly when the object has them.
    """

    def __init__(self, inner: object) -> None:
        self._inner = cast(Any, inner)
        self._thread: CallThread | None = None

    async def start(self) -> Sequence[Message]:
        return await self._call(self._inner.start)

    async def step(self, reply: Message) -> EnvStep:
        return await self._call(self._inner.step, reply)

    async def close(self) -> None:
        """Close the env and end its thread. If an earlier call is stuck in that thread, `close` runs in another one."""
        if self._thread is not None and self._thread.is_busy:
            self._drop_thread()
        try:
            await self._call(self._inner.close)
        finally:
            self._drop_thread()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle ask for private names before `_inner` is set; do not recurse
            raise AttributeError(name)
        value = getattr(self._inner, name)
        if name == "demonstrate":  # it may use what the env's thread owns
            return lambda: self._call(value)
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
    """Run one plain function in a separate thread."""
    thread = CallThread()
    try:
        return await thread.run(function, *args)
    finally:
        thread.stop()


@dataclass(frozen=True, slots=True)
class _Call:
    work: Callable[[], Any]
    outcome: Future[Any]


_Calls = queue.SimpleQueue[_Call | None]
"""The calls that one thread has to make. None tells it that its owner no longer needs it."""


class CallThread:
    """A daemon thread that runs one call after the other, until it is stopped or garbage-collected."""

    def __init__(self) -> None:
        self._calls = _take_thread()
        self._current: Future[Any] | None = None
        # The thread refers to the queue, not to this object, so an env that nobody closed can still be collected.
        self._ending = weakref.finalize(self, self._calls.put, None)
        self._ending.atexit = False

    @property
    def is_busy(self) -> bool:
        """Whether a call has begun and not yet returned."""
        return self._current is not None and not self._current.done()

    async def run(self, function: Callable[..., Any], *args: object) -> Any:
        context = contextvars.copy_context()
        outcome: Future[Any] = Future()
        outcome.set_running_or_notify_cancel()  # if the waiter is cancelled, the call goes on
        self._current = outcome
        self._calls.put(_Call(work=lambda: context.run(function, *args), outcome=outcome))
        try:
            await until_done(outcome)
            if self._current is outcome:
                self._current = None
            return outcome.result()
        finally:  # an exception refers to this frame; if this frame kept it, an unused env would stay alive
            del outcome

    def stop(self) -> None:
        """Release the thread when its current call has returned."""
        self._ending()

    def post(self, work: Callable[[], Any]) -> None:
        """Run something without waiting for its result."""
        self._calls.put(_Call(work=work, outcome=Future()))


_idle: list[_Calls] = []
"""The queues of unused threads. They wait a moment for the next env, because starting a thread is slow."""
_lock = threading.Lock()
os.register_at_fork(after_in_child=_idle.clear)  # a forked child has none of its parent's threads


def num_idle_threads() -> int:
    """Return the number of unused threads, which wait a moment for the next env and are no leak."""
    return len(_idle)


def _take_thread() -> _Calls:
    """Return the queue of a thread that has no other owner."""
    with _lock:
        if _idle:
            return _idle.pop()
    calls: _Calls = queue.SimpleQueue()
    threading.Thread(target=_live, args=(calls,), name="turnwise-env", daemon=True).start()
    return calls


def _live(calls: _Calls) -> None:
    """Work for one owner after the other, until no new one comes for `IDLE_S`."""
    is_owned = True
    while True:
        try:
            call = calls.get(timeout=None if is_owned else IDLE_S)
        except queue.Empty:
            with _lock:
                if calls in _idle:
                    _idle.remove(calls)
                    return
            continue  # a new owner took it just now
        is_owned = call is not None
        if call is None:
            with _lock:
                _idle.append(calls)
        else:
            _perform(call)
        del call  # do not keep the env alive while its thread waits


class Making:
    """An env that is being constructed. An env with plain methods keeps the thread that constructed it."""

    def __init__(self, make: Callable[[], object]) -> None:
        context = contextvars.copy_context()
        self._make = lambda: context.run(make)
        self._outcome: Future[CallThread | None] = Future()
        self._outcome.set_running_or_notify_cancel()

    @property
    def is_busy(self) -> bool:
        return not self._outcome.done()

    @property
    def thread(self) -> CallThread | None:
        """The thread of the constructed env. None if it needs no thread, or is not constructed yet."""
        is_made = self._outcome.done() and self._outcome.exception() is None
        return self._outcome.result() if is_made else None

    async def finish(self) -> None:
        """Wait until the env is constructed. Raises what its constructor raised."""
        _makers.get().add(self)
        await until_done(self._outcome)
        self._outcome.result()

    def run(self, thread: CallThread) -> bool:
        """Construct the env. Return whether it keeps the thread."""
        try:
            needs_thread = not has_coroutines(self._make())
        except BaseException as error:  # noqa: BLE001 - whoever awaits the env gets it
            self.fail(error)
            return False
        self._outcome.set_result(thread if needs_thread else None)
        return needs_thread

    def fail(self, error: BaseException) -> None:
        self._outcome.set_exception(error)


class _Makers:
    """The threads that construct the envs of one event loop. Most envs are constructed faster than a thread starts.

    If construction is slow, more threads are started until no env waits.
    """

    def __init__(self) -> None:
        self._waiting: deque[Making] = deque()
        self._num_threads = 0
        self._num_made = 0
        self._is_watched = False
        self._lock = threading.Lock()

    def add(self, making: Making) -> None:
        self._waiting.append(making)
        if not self._num_threads:
            self._start(1)
        if not self._is_watched:
            self._watch()

    def _watch(self) -> None:
        self._is_watched = True
        asyncio.get_running_loop().call_later(LOOK_S, self._look, self._num_made)

    def _look(self, num_made_before: int) -> None:
        self._is_watched = False
        if self._waiting:
            self._watch()
            if self._num_made - num_made_before < QUICK * self._num_threads or not self._num_threads:
                self._start(max(1, self._num_threads))

    def _start(self, count: int) -> None:
        for _ in range(min(count, len(self._waiting))):
            try:
                thread = CallThread()
            except RuntimeError as error:  # the system refuses another thread
                self._give_up(error)
                return
            with self._lock:
                self._num_threads += 1
            thread.post(functools.partial(self._make_all, thread))

    def _give_up(self, error: RuntimeError) -> None:
        """Fail the envs that wait, unless another thread is left that will construct them."""
        while self._waiting and not self._num_threads:
            self._waiting.popleft().fail(error)

    def _make_all(self, thread: CallThread) -> None:
        """Construct envs until none waits, or until an env keeps this thread."""
        is_kept = False
        while not is_kept and self._waiting:
            try:
                making = self._waiting.popleft()
            except IndexError:  # another thread took it
                break
            is_kept = making.run(thread)
            self._num_made += 1
        with self._lock:
            self._num_threads -= 1
        if is_kept:
            self._start(1)
        else:
            thread.stop()


_makers = PerLoop(_Makers)


def _perform(call: _Call) -> None:
    try:
        call.outcome.set_result(call.work())
    except StopIteration as error:  # a coroutine cannot raise StopIteration
        call.outcome.set_exception(RuntimeError(f"StopIteration left the call: {error}"))
    except BaseException as error:  # noqa: BLE001 - whoever awaits the call gets it
        call.outcome.set_exception(error)
    finally:
        del call  # the exception refers to this frame; see `CallThread.run`
