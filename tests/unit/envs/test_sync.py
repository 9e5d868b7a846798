from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import threading
import time
from typing import Any

import pytest

from turnwise.envs import sync
from turnwise.envs.base import Env, EnvStep, assistant, user
from turnwise.envs.sync import CallThread, Making, ThreadedEnv, as_env, call_in_thread
from turnwise.errors import ConfigError
from turnwise.trajectory import Message

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="unset")


class Plain:
    """Writes down the thread that each method ran in."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def start(self) -> list[Message]:
        self.threads.append(threading.get_ident())
        return [user(VARIABLE.get())]

    def step(self, reply: Message) -> EnvStep:
        self.threads.append(threading.get_ident())
        if reply.content == "crash":
            raise ZeroDivisionError("division by zero")
        return EnvStep(messages=[user(reply.content)])

    def close(self) -> None:
        self.threads.append(threading.get_ident())


class Mixed(Plain):
    async def step(self, reply: Message) -> EnvStep:
        await asyncio.sleep(0)
        return super().step(reply)


class Asynchronous:
    async def start(self) -> list[Message]:
        return [user("hi")]

    async def step(self, reply: Message) -> EnvStep:
        return EnvStep(messages=[reply])

    async def close(self) -> None:
        pass


def env_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "turnwise-env"}


async def wait_for_end_of(threads: set[threading.Thread]) -> None:
    async with asyncio.timeout(30):
        while threads & env_threads():
            await asyncio.sleep(0.01)


def test_an_async_env_is_left_as_it_is() -> None:
    env = Asynchronous()
    assert as_env(env) is env


def test_wrapping_twice_wraps_once() -> None:
    env = as_env(Plain())
    assert isinstance(env, ThreadedEnv)
    assert as_env(env) is env
    assert isinstance(env, Env)


async def test_plain_methods_share_one_thread_that_is_not_the_loops() -> None:
    plain = Plain()
    env = as_env(plain)
    await env.start()
    step = await env.step(assistant("echo"))
    await env.close()
    assert step.messages == [user("echo")]
    assert len(plain.threads) == 3
    assert set(plain.threads) != {threading.get_ident()}
    assert len(set(plain.threads)) == 1


async def test_async_methods_of_a_mixed_env_run_in_the_loop() -> None:
    mixed = Mixed()
    env = as_env(mixed)
    await env.start()
    await env.step(assistant("echo"))
    await env.close()
    assert [thread == threading.get_ident() for thread in mixed.threads] == [False, True, False]


async def test_context_variables_reach_the_thread() -> None:
    VARIABLE.set("from the caller")
    env = as_env(Plain())
    assert list(await env.start()) == [user("from the caller")]
    await env.close()


async def test_an_exception_comes_back_to_the_caller_and_the_env_goes_on() -> None:
    env = as_env(Plain())
    with pytest.raises(ZeroDivisionError):
        await env.step(assistant("crash"))
    assert (await env.step(assistant("still here"))).messages == [user("still here")]
    await env.close()


async def test_stop_iteration_cannot_hang_the_caller() -> None:
    def stop() -> None:
        raise StopIteration("end")

    with pytest.raises(RuntimeError, match="StopIteration left the call"):
        await call_in_thread(stop)


async def test_a_plain_method_may_return_something_to_await() -> None:
    class Lazy(Plain):
        def start(self) -> Any:
            return asyncio.sleep(0, result=[user("later")])

    env = as_env(Lazy())
    assert list(await env.start()) == [user("later")]
    await env.close()


async def test_close_ends_the_thread() -> None:
    await wait_for_end_of(env_threads())
    env = as_env(Plain())
    await env.start()
    started = env_threads()
    assert len(started) == 1
    await env.close()
    await env.close()  # twice does no harm
    await wait_for_end_of(env_threads() | started)


async def test_a_thread_that_is_let_go_serves_the_next_env() -> None:
    await wait_for_end_of(env_threads())
    plain = [Plain() for _ in range(3)]
    for env in plain:
        await as_env(env).start()
        gc.collect()  # forgotten, not closed
        async with asyncio.timeout(10):
            while not sync.num_idle_threads() and env_threads():
                await asyncio.sleep(0.001)
    assert len(env_threads()) <= 1


async def test_an_env_that_is_forgotten_ends_its_thread() -> None:
    await wait_for_end_of(env_threads())
    env = as_env(Plain())
    await env.start()
    started = env_threads()
    assert len(started) == 1
    del env
    gc.collect()
    await wait_for_end_of(started)


async def test_an_env_that_is_forgotten_after_an_error_ends_its_thread_without_a_garbage_collection() -> None:
    await wait_for_end_of(env_threads())
    gc.disable()
    try:
        env = as_env(Plain())
        with contextlib.suppress(ZeroDivisionError):
            await env.step(assistant("crash"))
        started = env_threads()
        assert len(started) == 1
        del env
        await wait_for_end_of(started)
    finally:
        gc.enable()


async def test_close_does_not_wait_for_a_stuck_step() -> None:
    release = threading.Event()

    class Stuck(Plain):
        def step(self, reply: Message) -> EnvStep:
            release.wait(30)
            return super().step(reply)

    before = env_threads()
    stuck = Stuck()
    env = as_env(stuck)
    await env.start()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(env.step(assistant("hm")), timeout=0.05)
    await asyncio.wait_for(env.close(), timeout=120)
    assert len(set(stuck.threads)) == 2  # close ran in a thread of its own
    release.set()
    await wait_for_end_of(env_threads() - before)  # and the stuck one ends when its call does


async def test_many_slow_envs_do_not_queue() -> None:
    all_there = threading.Barrier(40)

    class Slow(Plain):
        def step(self, reply: Message) -> EnvStep:
            all_there.wait(30)  # nobody comes back before everybody is in a step
            return super().step(reply)

    envs = [as_env(Slow()) for _ in range(40)]
    await asyncio.gather(*(env.step(assistant("x")) for env in envs))
    await asyncio.gather(*(env.close() for env in envs))


async def test_envs_of_coroutines_are_made_in_one_thread_and_need_no_other() -> None:
    made_in: list[int] = []

    def make() -> Asynchronous:
        made_in.append(threading.get_ident())
        return Asynchronous()

    makings = [Making(make) for _ in range(100)]
    await asyncio.gather(*(making.finish() for making in makings))
    assert len(made_in) == 100
    assert len(set(made_in)) < 50, "a busy machine may take more than one, but not one for each"
    assert threading.get_ident() not in made_in
    assert not any(making.thread or making.is_busy for making in makings)


async def test_a_plain_env_keeps_the_thread_that_made_it() -> None:
    made_in: dict[int, int] = {}
    all_there = asyncio.Event()

    async def play(number: int) -> None:
        plain = Plain()

        def make() -> Plain:
            made_in[number] = threading.get_ident()
            return plain

        making = Making(make)
        await making.finish()
        assert making.thread is not None
        await making.thread.run(plain.start)
        if len(made_in) == 20:
            all_there.set()
        await all_there.wait()  # no thread is let go before all are taken
        assert plain.threads == [made_in[number]]
        making.thread.stop()

    async with asyncio.timeout(30):
        await asyncio.gather(*(play(number) for number in range(20)))
    assert len(set(made_in.values())) == 20


async def test_envs_that_take_long_to_make_do_not_queue() -> None:
    all_there = threading.Barrier(40)

    def make() -> Asynchronous:
        all_there.wait(30)  # no env is made before all are being made
        return Asynchronous()

    await asyncio.gather(*(Making(make).finish() for _ in range(40)))


async def test_what_goes_wrong_in_making_an_env_is_raised_to_its_own_attempt() -> None:
    makings = [Making(lambda: 1 // 0), Making(Asynchronous)]
    came = await asyncio.gather(*(making.finish() for making in makings), return_exceptions=True)
    assert isinstance(came[0], ZeroDivisionError)
    assert came[1] is None


async def test_a_system_without_threads_is_reported_to_everybody_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    await wait_for_end_of(env_threads())

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        makings = [Making(Asynchronous) for _ in range(6)]
        came = await asyncio.gather(*(making.finish() for making in makings), return_exceptions=True)
    assert [str(error) for error in came] == ["can't start new thread"] * 6
    async with asyncio.timeout(10):
        await Making(Asynchronous).finish()  # and it is forgotten when there are some again


async def test_an_env_that_cannot_be_looked_at_is_an_error_and_no_hang() -> None:
    class Odd(Asynchronous):
        def __getattribute__(self, name: str) -> Any:
            if name == "step":
                raise KeyError(name)
            return super().__getattribute__(name)

    async with asyncio.timeout(10):
        with pytest.raises(KeyError):
            await Making(Odd).finish()
        await Making(Asynchronous).finish()


def test_a_loop_that_ended_while_envs_were_made_does_not_keep_the_next_from_making_them() -> None:
    async def leave() -> None:
        tasks = [asyncio.create_task(Making(lambda: time.sleep(0.2)).finish()) for _ in range(3)]
        await asyncio.wait(tasks, timeout=0.001)

    asyncio.run(leave())
    asyncio.run(test_envs_that_take_long_to_make_do_not_queue())


async def test_a_thread_knows_whether_it_is_busy() -> None:
    thread, release = CallThread(), threading.Event()
    waiting = asyncio.ensure_future(thread.run(release.wait, 30))
    await asyncio.sleep(0)
    assert thread.is_busy
    release.set()
    assert await waiting
    assert not thread.is_busy
    thread.stop()


def test_optional_methods_are_there_exactly_when_the_env_has_them() -> None:
    class Forkable(Plain):
        def state_key(self) -> str:
            return "here"

        def fork(self) -> Forkable:
            return Forkable()

    plain: Any = as_env(Plain())
    assert not hasattr(plain, "state_key")
    assert not hasattr(plain, "fork")
    forkable: Any = as_env(Forkable())
    assert forkable.state_key() == "here"
    assert isinstance(forkable.fork(), ThreadedEnv)


def test_what_is_no_env_is_refused_with_what_is_missing() -> None:
    class HalfAnEnv:
        def start(self) -> None: ...

    with pytest.raises(ConfigError, match=r"HalfAnEnv has no step\(reply\)"):
        as_env(HalfAnEnv())


def test_a_seed_style_class_is_told_where_to_go() -> None:
    class SeedStyle:
        def step(self, response: str, ground_truth: dict[str, str]) -> None: ...
        def reset(self) -> None: ...

    with pytest.raises(ConfigError, match=r"turnwise\.envs\.adapters\.base_environment"):
        as_env(SeedStyle())
