"""Envs whose methods are plain functions: each env gets one thread, so that a slow step holds up nobody else.

One thread per env, and not a shared pool, for three reasons. All of an env's plain methods run in the same thread, so
it may hold a database connection. A hundred envs that wait do not queue behind a pool made for two cores. And the
thread is a daemon: a step that never returns costs that thread and not the end of the program.

A thread is not cheap beside a sampler that needs Python's lock all the time: whoever starts one, or waits for one, may
wait for the lock each time. So a thread that nobody needs any more is kept for the next env, and envs that are made of
coroutines need one only while they are made, which many share.
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
"""How long a thread waits for another owner before it ends."""
LOOK_S, QUICK = 0.02, 4
"""Envs wait to be made, and in this time a thread made fewer than so many: as many threads again are started."""


def as_env(env: object) -> Env:
    """`env` itself when its three methods are coroutines, else a wrapper that runs the plain ones in a thread."""
    missing = [name for name in ENV_METHODS if not callable(getattr(env, name, None))]
    if missing:
        hint = "; a class with step(response, ground_truth) goes through turnwise.envs.adapters.base_environment"
        raise ConfigError(
            f"{type(env).__name__} has no {missing[0]}(); an env has start(), step(reply) and close()"
            + (hint if callable(getattr(env, "reset", None)) else "")
        )
    return cast(Env, env) if has_coroutines(env) else ThreadedEnv(env)


def has_coroutines(env: object) -> bool:
    """Whether all three methods are coroutines: such an env needs no thread."""
    return all(inspect.iscoroutinefunction(getattr(env, name, None)) for name in ENV_METHODS)


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


_Calls = queue.SimpleQueue[_Call | None]
"""Of one thread; None: its owner lets it go."""


class CallThread:
    """A daemon thread that runs one call after the other, until it is stopped or forgotten."""

    def __init__(self) -> None:
        self._calls = _take_thread()
        self._current: Future[Any] | None = None
        # The thread holds the queue and not this object, so an env that nobody closed is still cleaned up.
        self._ending = weakref.finalize(self, self._calls.put, None)
        self._ending.atexit = False

    @property
    def is_busy(self) -> bool:
        """A call was begun and has not come back."""
        return self._current is not None and not self._current.done()

    async def run(self, function: Callable[..., Any], *args: object) -> Any:
        context = contextvars.copy_context()
        outcome: Future[Any] = Future()
        outcome.set_running_or_notify_cancel()  # a waiter may leave, but the call goes on
        self._current = outcome
        self._calls.put(_Call(work=lambda: context.run(function, *args), outcome=outcome))
        try:
            await until_done(outcome)
            if self._current is outcome:
                self._current = None
            return outcome.result()
        finally:  # an error holds the frames that it went through: held by one, it would keep a forgotten env alive
            del outcome

    def stop(self) -> None:
        """Let the thread go after the call that it is in."""
        self._ending()

    def post(self, work: Callable[[], Any]) -> None:
        """Run something that nobody waits for."""
        self._calls.put(_Call(work=work, outcome=Future()))


_idle: list[_Calls] = []
"""The queues of threads that serve no env. They wait a moment for the next one, because starting a thread is slow."""
_lock = threading.Lock()
os.register_at_fork(after_in_child=_idle.clear)  # their threads are the parent's


def num_idle_threads() -> int:
    """How many threads serve no env and wait a moment for the next one."""
    return len(_idle)


def _take_thread() -> _Calls:
    """The calls of a thread that serves nobody else."""
    with _lock:
        if _idle:
            return _idle.pop()
    calls: _Calls = queue.SimpleQueue()
    threading.Thread(target=_live, args=(calls,), name="turnwise-env", daemon=True).start()
    return calls


def _live(calls: _Calls) -> None:
    """Serve one owner after the other, until none comes for a while."""
    is_owned = True
    while True:
        try:
            call = calls.get(timeout=None if is_owned else IDLE_S)
        except queue.Empty:
            with _lock:
                if calls in _idle:
                    _idle.remove(calls)
                    return
            continue  # it was taken just now
        is_owned = call is not None
        if call is None:
            with _lock:
                _idle.append(calls)
        else:
            _perform(call)
        del call  # an env must not stay alive while its thread waits


class Making:
    """An env that is being made. An env with plain methods keeps the thread that made it."""

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
        """Belongs to the env that was made; None: it needs none, or there is none yet."""
        is_made = self._outcome.done() and self._outcome.exception() is None
        return self._outcome.result() if is_made else None

    async def finish(self) -> None:
        """Wait until it is made; what went wrong is raised here."""
        _makers.get().add(self)
        await until_done(self._outcome)
        self._outcome.result()

    def run(self, thread: CallThread) -> bool:
        """Whether the thread stays with what was made."""
        try:
            needs_thread = not has_coroutines(self._make())
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever awaits the env
            self.fail(error)
            return False
        self._outcome.set_result(thread if needs_thread else None)
        return needs_thread

    def fail(self, error: BaseException) -> None:
        self._outcome.set_exception(error)


class _Makers:
    """The threads that make one loop's envs, one after the other: most take less time than starting a thread.

    Where they take long, the threads become more until nobody waits.
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
            except RuntimeError as error:  # the system has no more
                self._give_up(error)
                return
            with self._lock:
                self._num_threads += 1
            thread.post(functools.partial(self._make_all, thread))

    def _give_up(self, error: RuntimeError) -> None:
        """Those who wait are told, unless a thread is there that will come to them."""
        while self._waiting and not self._num_threads:
            self._waiting.popleft().fail(error)

    def _make_all(self, thread: CallThread) -> None:
        """Until nothing is to be made, or an env takes the thread for itself."""
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
    except StopIteration as error:  # a coroutine cannot let this one through
        call.outcome.set_exception(RuntimeError(f"StopIteration left the call: {error}"))
    except BaseException as error:  # noqa: BLE001 - it belongs to whoever awaits the call
        call.outcome.set_exception(error)
    finally:
        del call  # the error holds this frame; see `CallThread.run`
