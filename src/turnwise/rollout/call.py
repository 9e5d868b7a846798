"""Calls that leave our code: to an env, a tool, a sampler or a renderer, each with a deadline.

If such a call fails or misses its deadline, it raises `AttemptFailed` with the name of the party to blame. No other
code in the rollout catches unknown errors.

`EnvCalls` is one env, from making it to closing it, and checks every answer. Plain methods run in one thread that
belongs to this env. Where `start`, `step` and `close` are coroutines, the small methods beside them run in the event
loop. A call that misses its deadline keeps its thread busy. That thread is counted and abandoned; it ends when the call
ends. `close` then runs in another thread.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar, cast, get_args

import numpy as np

from turnwise.envs.base import Env, EnvStep
from turnwise.envs.sync import ENV_METHODS, CallThread, Making, has_coroutines
from turnwise.errors import AttemptFailed, Party
from turnwise.rollout.limits import Clock, RolloutLimits
from turnwise.runtime.pending_calls import PENDING_CALLS
from turnwise.runtime.raised_at import describe_error
from turnwise.trajectory import Message, Role

T = TypeVar("T")

CANCEL_GRACE_S = 1.0
"""How long a cancelled call may take to clean up before we stop waiting for it."""
_ROLES = frozenset(get_args(Role))
_SMALL_METHODS = frozenset({"state_key", "potential", "reseed"})
OPTIONAL_METHODS = (*sorted(_SMALL_METHODS), "fork")
_POLL_S = 0.01


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
    """Await `work()` for at most `deadline_s`, then cancel it.

    The work runs in its own task. A party that ignores its cancellation is therefore left behind (`on_abandoned` is
    called) and does not hold up the attempt.
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
                task.exception()  # the result came after the deadline; read the exception so that asyncio does not warn
            raise DeadlinePassed(party, f"{what} gave no answer within {deadline_s:.3g} s")
    if task.cancelled():
        raise AttemptFailed(party, f"{what} cancelled itself")
    return task.result()


def call_now(party: Party, what: str, work: Callable[[], T]) -> T:
    """Run a party's plain function that answers at once."""
    try:
        return work()
    except AttemptFailed:
        raise  # a party further in was already blamed
    except (Exception, SystemExit) as cause:  # as in `_blamed`
        raise AttemptFailed(party, f"{what}: {describe_error(cause)}") from cause


async def _blamed(party: Party, what: str, work: Callable[[], Awaitable[T]]) -> T:
    try:
        return await work()
    except AttemptFailed:
        raise
    except (Exception, SystemExit) as cause:  # an env that calls sys.exit() ends its attempt, not the run
        raise AttemptFailed(party, f"{what}: {describe_error(cause)}") from cause


async def _cancel(task: asyncio.Task[T], on_abandoned: Callable[[], None] | None) -> None:
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
    if not task.done():
        task.add_done_callback(lambda late: late.cancelled() or late.exception())
        if on_abandoned is not None:
            on_abandoned()


class EnvCalls:
    """The only way in which a rollout talks to an env."""

    def __init__(self, make_env: Callable[[], Env], limits: RolloutLimits, clock: Clock) -> None:
        self._make_env = make_env
        self._limits = limits
        self._clock = clock
        self._env: Any = None
        self._making: Making | None = None
        self._thread: CallThread | None = None
        self._forks: list[Any] = []
        """Forks that nobody has taken over yet. They are closed together with the env."""
        self._is_left = False
        self._is_late = False
        self.num_abandoned = 0
        """Number of calls that were left behind."""
        self.close_problem: str | None = None
        """Why `close` failed; the attempt still counts."""

    async def start(self) -> tuple[Message, ...]:
        await self._call("make_env")
        messages = await self._call("start")
        return _blame_env("start", lambda: _checked_messages(messages, "it returned"))

    async def step(self, reply: Message) -> EnvStep:
        step = await self._call("step", reply)
        return _blame_env("step", lambda: _checked_step(step))

    async def state_key(self) -> str | None:
        """The env's key for its current state, or None if it has no `state_key()`."""
        if not hasattr(self._env, "state_key"):
            return None
        key = await self._call("state_key")
        if not isinstance(key, str):
            raise AttemptFailed(Party.ENV, f"state_key() returned {key!r:.80}; expected a string")
        return key

    async def potential(self) -> float | None:
        """The env's potential of its current state, or None if it has no `potential()`."""
        if not hasattr(self._env, "potential"):
            return None
        potential = await self._call("potential")
        _blame_env("potential", lambda: _check_numbers("potential", {"of the state": potential}))
        return float(potential)

    @property
    def can_fork(self) -> bool:
        return hasattr(self._env, "fork")

    @property
    def optional_methods(self) -> tuple[str, ...]:
        """Names of the optional methods that the env has."""
        return tuple(name for name in OPTIONAL_METHODS if hasattr(self._env, name))

    async def fork(self) -> EnvCalls:
        """An independent copy of the env in its current state."""
        copy = EnvCalls(self._make_env, self._limits, self._clock)
        await copy.start_as_fork(self)
        return copy

    async def start_as_fork(self, original: EnvCalls) -> None:
        """Start as a copy of another env, which does not change."""
        await original._call("fork")
        self._env = original._forks.pop()

    async def reseed(self, seed: int) -> None:
        """Give the env a new seed, if it has a `reseed()`."""
        if hasattr(self._env, "reseed"):
            await self._call("reseed", seed)

    async def close(self) -> None:
        """Close the env whatever happened. A problem is noted in `close_problem` and not raised."""
        if not self._is_late:
            await self._wait_for_thread()  # the attempt was cancelled in the middle of a call that is not late
        self._leave_busy_thread()
        try:
            for env in [*self._forks, self._env]:
                if env is not None:
                    self._env = env
                    await self._call("close")
        except AttemptFailed as error:
            self.close_problem = error.detail
        finally:
            self._env = None
            self._forks.clear()
            self._leave_busy_thread()
            if self._thread is not None:
                self._thread.stop()
                self._thread = None

    async def _call(self, what: str, *args: object) -> Any:
        work: Callable[[], Awaitable[Any]] = functools.partial(self._run, what, args)
        method = getattr(self._env, what) if what in _SMALL_METHODS else None
        if method is not None and _answers_at_once(method):
            answer = call_now(Party.ENV, what, lambda: method(*args))
            if not inspect.isawaitable(answer):
                return answer
            work = functools.partial(_awaited, answer)
        limits = self._limits
        deadline_s = self._clock.at_most(limits.step_deadline_s)
        if what == "close":
            deadline_s = limits.close_deadline_s
        elif what == "fork":  # other attempts call this, and they have their own clocks
            deadline_s = limits.step_deadline_s
        try:
            return await call(Party.ENV, what, work, deadline_s=deadline_s, on_abandoned=self._count_abandoned)
        except DeadlinePassed as late:
            self._is_late = True
            party = getattr(self._env, "waits_for", None)
            if isinstance(party, Party):
                detail = f"{what} still waited for the {party} when its time was over, {deadline_s:.3g} s"
                raise AttemptFailed(party, detail) from late
            raise

    async def _run(self, what: str, args: tuple[object, ...]) -> Any:
        own = {"make_env": self._make, "fork": self._fork}
        method: Callable[..., Any] = own[what] if what in own else getattr(self._env, what)
        if inspect.iscoroutinefunction(method):
            return await method(*args)
        if what == "make_env":
            self._making = Making(method)
            await self._making.finish()
            self._thread = self._making.thread
            return None
        if self._thread is None:
            self._thread = CallThread()
        result = await self._thread.run(method, *args)
        return await result if inspect.isawaitable(result) else result

    def _make(self) -> Any:
        """Runs in a thread. Keeps the env here, because the caller may have stopped waiting."""
        if self._is_left:
            raise RuntimeError("the attempt was given up before its env was made")
        self._env = env = self._make_env()
        if self._is_left:  # the attempt was given up meanwhile, so nobody else will close the env
            closing: Any = self._env.close()
            if inspect.iscoroutine(closing):
                asyncio.run(closing)
        return env

    def _fork(self) -> None:
        """Runs in the env's thread. Keeps the fork here, because the caller may have stopped waiting."""
        fork = self._env.fork()
        missing = [name for name in ENV_METHODS if not callable(getattr(fork, name, None))]
        if missing:
            raise TypeError(f"it returned {fork!r:.80}, which has no {missing[0]}(); expected an env")
        self._forks.append(fork)

    @property
    def _is_busy(self) -> bool:
        """Whether a call is still running in a thread."""
        return any(work is not None and work.is_busy for work in (self._making, self._thread))

    async def _wait_for_thread(self) -> None:
        for _ in range(round(CANCEL_GRACE_S / _POLL_S)):
            if not self._is_busy:
                return
            await asyncio.sleep(_POLL_S)

    def _leave_busy_thread(self) -> None:
        if self._is_busy:
            self._is_left = True
            self._count_abandoned()
            if self._thread is not None:
                self._thread.stop()  # it stops when the call returns, if it ever does
            self._thread = self._making = None
        elif self._making is not None and self._thread is None:
            self._thread = self._making.thread  # the caller was cancelled before it could take the thread

    def _count_abandoned(self) -> None:
        self.num_abandoned += 1


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def _answers_at_once(method: Callable[..., Any]) -> bool:
    """Whether this is a plain method of an env whose main methods are coroutines (also behind a wrapper)."""
    return not inspect.iscoroutinefunction(method) and has_coroutines(getattr(method, "__self__", None))


def _blame_env(what: str, check: Callable[[], T]) -> T:
    """Run a check of an env's answer, and blame the env for what it finds."""
    try:
        return check()
    except (TypeError, ValueError, AttributeError) as cause:
        raise AttemptFailed(Party.ENV, f"{what}: {cause}") from cause


def _checked_step(step: object) -> EnvStep:
    """Check what `EnvStep` itself does not check."""
    if not isinstance(step, EnvStep):
        raise TypeError(f"returned {step!r:.80}; expected an EnvStep")
    for name in ("terminated", "truncated", "is_unparsable", "is_action"):
        _check_flag(name, getattr(step, name))
    if step.is_success is not None:
        _check_flag("is_success", step.is_success)
    _check_numbers("reward", step.reward_parts)
    _check_numbers("info", step.info)
    if not step.is_over or len(step.messages):
        _checked_messages(step.messages, "messages is")
    return step


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is {value!r:.80}; expected True or False")


def _check_numbers(what: str, values: Mapping[str, object]) -> None:
    for key, value in values.items():
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise ValueError(f"{what} {key!r} is {value!r:.80}; expected a finite number")


def _checked_messages(messages: object, said: str) -> tuple[Message, ...]:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise TypeError(f"{said} {messages!r:.80}; expected a list of messages")
    if not messages:
        raise ValueError(f"{said} empty; expected at least one message")
    return tuple(_checked_message(message, said) for message in cast(Sequence[object], messages))


def _checked_message(message: object, said: str) -> Message:
    if not isinstance(message, Message):
        raise TypeError(f"{said} a list with {message!r:.80}; expected messages")
    if message.role not in _ROLES or not isinstance(cast(object, message.content), str):
        raise TypeError(f"{said} a list with {message!r:.80}; role or content is not usable")
    return message
