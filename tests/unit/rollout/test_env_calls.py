"""Envs of plain functions: one thread each, no hang that holds up anybody else, nothing left behind."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from turnwise.envs.base import EnvStep, user
from turnwise.envs.sync import as_env
from turnwise.errors import Party
from turnwise.renderers.base import Renderer
from turnwise.rollout.play import Attempt, play
from turnwise.rollout.stats import RolloutStats
from turnwise.trajectory import EndReason, Message
from unit.rollout.worlds import QUESTION, CountingEnv, play_env, quick, saying, wait_for_threads

pytestmark = pytest.mark.usefixtures("no_leaks")


class PlainEnv:
    """Plain methods, and a database connection that only the thread that opened it may use."""

    def __init__(self, on_step: Callable[[], None] | None = None) -> None:
        self.database = sqlite3.connect(":memory:")
        self.on_step = on_step
        self.threads = [threading.get_ident()]
        self.num_steps = 0
        self.is_closed = False

    def start(self) -> Sequence[Message]:
        self.database.execute("create table guesses (text)")
        self.threads.append(threading.get_ident())
        return [QUESTION]

    def step(self, reply: Message) -> EnvStep:
        self.threads.append(threading.get_ident())
        if self.on_step is not None:
            self.on_step()
        if self.is_closed:
            self.database.close()
            raise RuntimeError("closed while it was stepping")
        self.database.execute("insert into guesses values (?)", (reply.content,))
        self.num_steps += 1
        return EnvStep(messages=[user("Again.")], reward=1.0, terminated=self.num_steps == 2)

    def close(self) -> None:
        self.is_closed = True
        self.threads.append(threading.get_ident())
        if self.threads[-1] == self.threads[0]:
            self.database.close()


def attempt(make_env: Callable[[], Any]) -> Attempt:
    return Attempt(task_id="t", index=0, seed=0, make_env=make_env)


async def test_a_plain_env_is_made_played_and_closed_in_one_thread(renderer: Renderer) -> None:
    made: list[PlainEnv] = []

    def make() -> Any:
        made.append(PlainEnv())
        return made[-1]

    trajectory = await play(attempt(make), saying(renderer), renderer, quick(), RolloutStats())
    assert trajectory.failure is None
    assert (trajectory.end_reason, trajectory.total_reward) == (EndReason.TERMINATED, 2.0)
    assert made[0].is_closed
    assert len(made[0].threads) == 5  # made, started, stepped twice, closed
    assert len(set(made[0].threads)) == 1
    assert made[0].threads[0] != threading.get_ident()


async def test_a_step_that_hangs_fails_its_attempt_and_holds_up_nobody(renderer: Renderer) -> None:
    release = threading.Event()
    envs: list[PlainEnv] = []

    def make() -> Any:
        envs.append(PlainEnv(on_step=lambda: void(release.wait(60))))
        return envs[-1]

    stats = RolloutStats()
    config = quick(step_deadline_s=1.5)
    started_s = time.monotonic()
    hung, fine = await asyncio.gather(
        play(attempt(make), saying(renderer), renderer, config, stats),
        play_env(CountingEnv(), renderer),
    )
    assert time.monotonic() - started_s < 45
    assert fine.end_reason is EndReason.TERMINATED
    assert hung.failure is not None
    assert hung.failure.party is Party.ENV
    assert "step gave no answer" in hung.failure.detail
    assert envs[0].is_closed  # from another thread, while the step still hangs
    assert (stats.num_abandoned, stats.metrics()["rollout/abandoned_calls"]) == (1, 1.0)
    release.set()
    assert wait_for_threads() == 0  # the abandoned thread ended by itself


async def test_an_env_that_takes_too_long_to_make_is_closed_when_it_comes(renderer: Renderer) -> None:
    envs: list[PlainEnv] = []
    making, release = threading.Event(), threading.Event()

    def make() -> Any:
        making.set()
        release.wait(60)
        envs.append(PlainEnv())
        return envs[-1]

    num_plays = 0
    while not making.is_set() and num_plays < 50:  # a busy machine may miss the deadline before it calls make()
        stats, num_plays = RolloutStats(), num_plays + 1
        trajectory = await play(attempt(make), saying(renderer), renderer, quick(step_deadline_s=0.05), stats)
        assert trajectory.failure is not None
        assert "make_env" in trajectory.failure.detail
        assert stats.num_abandoned == 1
    release.set()
    assert await asyncio.to_thread(wait_for_threads) == 0
    assert {env.is_closed for env in envs} == {True}


async def test_cancelling_waits_a_moment_for_a_step_that_is_not_late(renderer: Renderer) -> None:
    envs: list[PlainEnv] = []
    stepping = threading.Event()

    def slow() -> None:
        stepping.set()
        time.sleep(0.2)

    def make() -> Any:
        envs.append(PlainEnv(on_step=slow))
        return envs[-1]

    stats = RolloutStats()
    task = asyncio.create_task(play(attempt(make), saying(renderer), renderer, quick(), stats))
    await asyncio.to_thread(stepping.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (envs[0].is_closed, envs[0].num_steps, stats.num_abandoned) == (True, 1, 0)


async def test_an_env_of_coroutines_that_comes_too_late_is_closed_too(renderer: Renderer) -> None:
    env, release = CountingEnv(), threading.Event()

    def make() -> Any:
        release.wait(60)
        return env

    await play(attempt(make), saying(renderer), renderer, quick(step_deadline_s=0.05), RolloutStats())
    release.set()
    async with asyncio.timeout(60):
        while env.num_closed == 0:  # its close is a coroutine of this loop
            await asyncio.sleep(0.01)
    assert await asyncio.to_thread(wait_for_threads) == 0
    assert env.num_closed == 1


async def test_cancelling_while_the_env_is_made_closes_it(renderer: Renderer) -> None:
    env, making = CountingEnv(), threading.Event()

    def make() -> Any:
        making.set()
        time.sleep(0.1)
        return env

    task = asyncio.create_task(play(attempt(make), saying(renderer), renderer, quick(), RolloutStats()))
    await asyncio.to_thread(making.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert env.num_closed == 1


async def test_cancelling_twice_still_lets_the_env_close(renderer: Renderer) -> None:
    stepping, closing = asyncio.Event(), asyncio.Event()
    is_closed = False

    async def hang(_: Message) -> None:
        stepping.set()
        await asyncio.sleep(60)

    async def close_slowly() -> None:
        nonlocal is_closed
        closing.set()
        await asyncio.sleep(0.05)
        is_closed = True

    env = CountingEnv(on_step=hang, on_close=close_slowly)
    task = asyncio.create_task(play_env(env, renderer))
    await stepping.wait()
    task.cancel()
    await closing.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert is_closed


@pytest.mark.parametrize("error", [StopIteration("next"), SystemExit(1), RuntimeError("x")])
async def test_whatever_a_plain_step_raises_is_the_envs_failure(renderer: Renderer, error: BaseException) -> None:
    def raise_it() -> None:
        raise error

    trajectory = await play(
        attempt(lambda: PlainEnv(on_step=raise_it)), saying(renderer), renderer, quick(), RolloutStats()
    )
    assert trajectory.failure is not None
    assert trajectory.failure.party is Party.ENV


async def test_plain_and_async_methods_may_be_mixed(renderer: Renderer) -> None:
    class Mixed(CountingEnv):
        def start(self) -> Any:  # type: ignore[override]
            return [QUESTION]

        def close(self) -> Any:  # a plain function that returns an awaitable
            return super().close()

    env = Mixed()
    assert (await play_env(env, renderer)).end_reason is EndReason.TERMINATED
    assert env.num_closed == 1


def void(_: object) -> None:
    return None


class RatedEnv(PlainEnv):
    """Says how good its state is."""

    def __init__(self, rating: object = 0.5) -> None:
        super().__init__()
        self.rating = rating

    def potential(self) -> Any:
        return self.rating


async def test_the_potential_of_a_state_is_recorded_before_and_after_a_turn(renderer: Renderer) -> None:
    played = await play(attempt(RatedEnv), saying(renderer), renderer, quick(), RolloutStats())
    assert [(turn.potential, turn.next_potential) for turn in played.turns] == [(0.5, 0.5), (0.5, 0.0)]
    plain = await play(attempt(PlainEnv), saying(renderer), renderer, quick(), RolloutStats())
    assert [(turn.potential, turn.next_potential) for turn in plain.turns] == [(None, None)] * 2


@pytest.mark.parametrize("rating", ["good", float("nan"), None])
async def test_a_potential_that_is_no_number_is_the_envs_fault(renderer: Renderer, rating: object) -> None:
    played = await play(attempt(lambda: RatedEnv(rating)), saying(renderer), renderer, quick(), RolloutStats())
    assert played.failure is not None
    assert played.failure.party is Party.ENV
    assert "potential" in played.failure.detail


class SmallMethods:
    """Coroutines, with a plain method beside them."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer
        self.num_steps = 0
        self.threads: list[int] = []

    async def start(self) -> Sequence[Message]:
        return [QUESTION]

    async def step(self, _: Message) -> EnvStep:
        self.num_steps += 1
        return EnvStep(messages=[user("Again.")], reward=1.0, terminated=self.num_steps == 2)

    async def close(self) -> None:
        pass

    def state_key(self) -> Any:
        self.threads.append(threading.get_ident())
        return self.answer()


async def test_a_small_plain_method_beside_coroutines_runs_in_the_loop(renderer: Renderer) -> None:
    env = SmallMethods(lambda: "here")
    trajectory = await play_env(env, renderer)
    assert [turn.env_state for turn in trajectory.turns] == ["here", "here"]
    assert set(env.threads) == {threading.get_ident()}


async def test_a_small_method_that_returns_something_to_await_is_awaited(renderer: Renderer) -> None:
    trajectory = await play_env(SmallMethods(lambda: asyncio.sleep(0, result="later")), renderer)
    assert [turn.env_state for turn in trajectory.turns] == ["later", "later"]
    late = await play_env(SmallMethods(lambda: asyncio.sleep(60, result="never")), renderer, step_deadline_s=1.0)
    assert late.failure is not None
    assert "state_key gave no answer within 1 s" in late.failure.detail


async def test_a_small_method_that_leaves_the_program_ends_its_attempt_alone(renderer: Renderer) -> None:
    trajectory = await play_env(SmallMethods(lambda: sys.exit(3)), renderer)
    assert trajectory.failure is not None
    assert trajectory.failure.party == Party.ENV
    assert "SystemExit(3)" in trajectory.failure.detail


@pytest.mark.parametrize("is_wrapped", [True, False])
async def test_a_small_method_of_a_plain_env_may_block_until_its_deadline(renderer: Renderer, is_wrapped: bool) -> None:
    release = threading.Event()

    class Blocking:
        def start(self) -> Sequence[Message]:
            return [QUESTION]

        def step(self, reply: Message) -> EnvStep:
            raise AssertionError(reply)

        def close(self) -> None:
            pass

        def state_key(self) -> str:
            release.wait(60)
            return "late"

    def make_env() -> Any:
        return as_env(Blocking()) if is_wrapped else Blocking()

    async def tick() -> int:
        count = 0
        while not playing.done():
            await asyncio.sleep(0.01)
            count += 1
        return count

    config = quick(step_deadline_s=1.5)
    playing = asyncio.ensure_future(play(attempt(make_env), saying(renderer), renderer, config, RolloutStats()))
    assert await tick() >= 3, "the loop goes on meanwhile"
    failure = playing.result().failure
    release.set()
    assert failure is not None
    assert "state_key gave no answer within 1.5 s" in failure.detail
    assert await asyncio.to_thread(wait_for_threads) == 0
