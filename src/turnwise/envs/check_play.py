"""Plays an env for `check_env`: every call has a deadline, and every outcome is recorded.

Calls run in an event loop in a separate thread. A call that awaits for too long is cancelled. A call that blocks the
loop cannot be cancelled, so its loop is abandoned and a new one is started.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

from turnwise.envs.base import Env, EnvStep, Task, World, assistant
from turnwise.envs.sync import as_env, call_in_thread
from turnwise.errors import ConfigError
from turnwise.runtime.raised_at import raised_at
from turnwise.trajectory import Message

_PING_S = 0.5


class CallFailedError(Exception):
    """A call of the checked object raised an exception."""

    def __init__(self, call: str, cause: BaseException) -> None:
        place = raised_at(cause)
        super().__init__(f"{call} failed with {type(cause).__name__}: {cause}{f' at {place}' if place else ''}")
        self.call = call
        self.cause = cause


class CallLateError(Exception):
    """A call of the checked object did not come back in time."""

    def __init__(self, call: str, deadline_s: float, is_blocking: bool) -> None:
        why = " and held up the event loop; await instead of blocking, or make it a plain `def`" if is_blocking else ""
        super().__init__(f"{call} did not come back within {deadline_s:g} s{why}")
        self.call = call


class CheckCaller:
    """Makes calls, one at a time, each under the same deadline."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._loop = _start_loop()

    def run(self, call: str, function: Callable[..., Awaitable[Any]], *args: object) -> Any:
        """Call a coroutine function and return its result."""

        async def work() -> Any:
            return await function(*args)

        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result(self._deadline_s)
        except Exception as cause:
            if future.done():
                raise CallFailedError(call, cause) from cause
            future.cancel()
            raise CallLateError(call, self._deadline_s, self._replace_if_blocked()) from cause

    def run_plain(self, call: str, function: Callable[..., Any], *args: object) -> Any:
        """Call a plain function in a thread and return its result."""
        return self.run(call, call_in_thread, function, *args)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _replace_if_blocked(self) -> bool:
        ping: Future[None] = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        try:
            ping.result(_PING_S)
        except TimeoutError:
            self._loop.call_soon_threadsafe(self._loop.stop)  # the loop stops when the call returns, if it ever does
            self._loop = _start_loop()
            return True
        return False


def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def serve() -> None:
        try:
            loop.run_forever()
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    threading.Thread(target=serve, name="turnwise-check", daemon=True).start()
    return loop


@dataclass(kw_only=True)
class Play:
    """The record of one attempt with one style of replies, as far as it got."""

    task: Task
    style: str
    replies: list[str] = field(default_factory=list[str])
    start: object = None
    steps: list[Any] = field(default_factory=list[Any])
    state_keys: list[Any] = field(default_factory=list[Any])
    """The key before each reply. Empty when the env has no `state_key`."""
    failure: CallFailedError | CallLateError | None = None
    close_failure: CallFailedError | CallLateError | None = None

    @property
    def where(self) -> str:
        return f"task {self.task.id}, {self.style} replies, turn {len(self.replies)}"

    @property
    def is_late(self) -> bool:
        return any(isinstance(failure, CallLateError) for failure in (self.failure, self.close_failure))

    def start_messages(self) -> list[object]:
        """What `start()` returned if it was a list, else nothing."""
        return _to_list(self.start)

    def env_steps(self) -> list[EnvStep]:
        return [step for step in self.steps if isinstance(step, EnvStep)]

    def transcript(self) -> list[object]:
        """Everything that a second play must repeat: the start, then each step with the state before it."""
        keys = self.state_keys or [None] * len(self.steps)
        return [_comparable(self.start), *((_comparable(s), k) for s, k in zip(self.steps, keys, strict=False))]


def _to_list(value: object) -> list[object]:
    return list(cast(Sequence[object], value)) if isinstance(value, list | tuple) else []


def _comparable(value: object) -> object:
    if not isinstance(value, EnvStep):
        return _to_list(value) or value
    flags = (value.terminated, value.truncated, value.is_success, value.is_unparsable, value.is_action)
    return (list(value.messages), dict(value.reward_parts), flags)


ReplyStyle = Callable[[random.Random, Sequence[Message]], str]


def _random_number(rng: random.Random, _: Sequence[Message]) -> str:
    return str(rng.randint(-5, 120))


def _heard_words(rng: random.Random, messages: Sequence[Message]) -> str:
    """Words of the conversation, because the env is most likely to understand its own words."""
    words = " ".join(message.content for message in messages).split() or ["yes"]
    return " ".join(rng.choice(words) for _ in range(rng.randint(1, 4)))


def _empty(_: random.Random, __: Sequence[Message]) -> str:
    return ""


def _very_long(rng: random.Random, _: Sequence[Message]) -> str:
    piece = rng.choice(["9", "word ", "(", "calc(", "<tool_call>", "1 2 3\n", "[" * 50])
    return piece * (20_000 // len(piece))


def _garbage(rng: random.Random, _: Sequence[Message]) -> str:
    pieces = [
        "\x00",
        "\x1b[0m",
        "🙂",
        "\u202e",
        "\ufffd",
        "{",
        "}",
        "%s",
        "\\",
        "'",
        '"',
        "\n\n",
        "ß",
        "٣",
        "NaN",
        "-0",
    ]
    return "".join(rng.choice(pieces) for _ in range(rng.randint(1, 30)))


def _tool_calls(rng: random.Random, _: Sequence[Message]) -> str:
    blocks = ['{"name": "no_such_tool", "arguments": {}}', '{"name": 3}', "{bad json", "[" * 3000, '{"name": "calc"}']
    return f"<tool_call>{rng.choice(blocks)}</tool_call>"


REPLY_STYLES: dict[str, ReplyStyle] = {
    "number": _random_number,
    "heard-word": _heard_words,
    "empty": _empty,
    "very long": _very_long,
    "garbage": _garbage,
    "tool-call": _tool_calls,
}

DEMONSTRATED = "demonstrated"
"""The style that follows the world's demonstrations. It reaches states that random replies do not reach."""


@dataclass(frozen=True, kw_only=True)
class CheckPlayer:
    """Plays envs of one world."""

    world: World
    caller: CheckCaller
    seed: int
    scripts: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """Demonstrated replies by task id, for the style `DEMONSTRATED`."""

    def styles(self, task: Task) -> list[str]:
        return [*REPLY_STYLES, *([DEMONSTRATED] if task.id in self.scripts else [])]

    def make_env(self, task: Task) -> Env:
        env = self.caller.run_plain("make_env", self.world.make_env, task, self.seed)
        try:
            return as_env(env)
        except ConfigError as error:
            raise CallFailedError("make_env", error) from error

    def play(self, task: Task, style: str) -> Play:
        """Play one attempt from start to end, for at most `max_turns` turns."""
        play = Play(task=task, style=style)
        try:
            env = self.make_env(task)
        except (CallFailedError, CallLateError) as failure:
            play.failure = failure
            return play
        try:
            self._run(env, play)
        except (CallFailedError, CallLateError) as failure:
            play.failure = failure
        finally:
            play.close_failure = self.close(env)
        return play

    def begin(self, task: Task, style: str) -> tuple[Env, Play]:
        """Start an env. The caller then plays it turn by turn with `turn`."""
        play = Play(task=task, style=style)
        env = self.make_env(task)
        play.start = self.caller.run("start", env.start)
        return env, play

    def turn(self, env: Env, play: Play) -> bool:
        """Play one turn. Return False when the attempt is over or the answer is not an `EnvStep`."""
        play.replies.append(self._next_reply(play))
        state_key = getattr(env, "state_key", None)
        if callable(state_key):
            play.state_keys.append(self.caller.run_plain("state_key", state_key))
        play.steps.append(self.caller.run("step", env.step, assistant(play.replies[-1])))
        return isinstance(play.steps[-1], EnvStep) and not play.steps[-1].is_over

    def close(self, env: Env) -> CallFailedError | CallLateError | None:
        try:
            self.caller.run("close", env.close)
        except (CallFailedError, CallLateError) as failure:
            return failure
        return None

    def _next_reply(self, play: Play) -> str:
        if play.style == DEMONSTRATED:
            script = self.scripts[play.task.id]
            return script[len(play.steps)] if len(play.steps) < len(script) else ""
        rng = random.Random(f"{self.seed}:{play.task.id}:{play.style}:{len(play.steps)}")
        return REPLY_STYLES[play.style](rng, _last_messages(play))

    def _run(self, env: Env, play: Play) -> None:
        play.start = self.caller.run("start", env.start)
        for _ in range(self.world.max_turns):
            if not self.turn(env, play):
                break


def _last_messages(play: Play) -> Sequence[Message]:
    last: Sequence[object] = play.steps[-1].messages if play.steps else play.start_messages()
    return [item for item in last if isinstance(item, Message)]
