"""Whoever fails is named; nobody is waited for longer than agreed."""

from __future__ import annotations

import asyncio
import time

import pytest

from turnwise.errors import AttemptFailed, Party
from turnwise.rollout import call as call_module
from turnwise.rollout.call import DeadlinePassed, call, call_now

pytestmark = pytest.mark.usefixtures("no_leaks")


async def test_an_answer_comes_through() -> None:
    async def work() -> int:
        return 5

    assert await call(Party.ENV, "step", work, deadline_s=1.0) == 5


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("x"), SystemExit(3), TimeoutError("own")])
async def test_an_error_leaves_with_the_partys_name(error: BaseException) -> None:
    async def work() -> None:
        raise error

    with pytest.raises(AttemptFailed, match="sampler: sample") as failed:
        await call(Party.SAMPLER, "sample", work, deadline_s=1.0)
    assert failed.value.party is Party.SAMPLER
    assert not isinstance(failed.value, DeadlinePassed)
    assert failed.value.__cause__ is error


async def test_a_party_further_in_stays_to_blame() -> None:
    async def work() -> None:
        raise AttemptFailed(Party.TOOL, "no disk")

    with pytest.raises(AttemptFailed) as failed:
        await call(Party.ENV, "step", work, deadline_s=1.0)
    assert failed.value.party is Party.TOOL


async def test_a_party_that_is_late_is_cancelled_and_named() -> None:
    was_cancelled = False

    async def work() -> None:
        nonlocal was_cancelled
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            was_cancelled = True
            raise

    with pytest.raises(DeadlinePassed, match="step gave no answer within"):
        await call(Party.ENV, "step", work, deadline_s=0.02)
    assert was_cancelled


async def test_a_party_that_ignores_its_cancellation_is_left_behind_and_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_module, "CANCEL_GRACE_S", 0.02)
    abandoned: list[int] = []
    released = asyncio.Event()

    async def work() -> None:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue

    started_s = time.monotonic()
    with pytest.raises(DeadlinePassed):
        await call(Party.ENV, "step", work, deadline_s=0.02, on_abandoned=lambda: abandoned.append(1))
    assert time.monotonic() - started_s < 10
    assert abandoned == [1]
    released.set()
    await asyncio.sleep(0.01)


async def test_a_party_that_cancels_itself_has_failed() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(AttemptFailed, match="cancelled itself"):
        await call(Party.ENV, "step", work, deadline_s=1.0)


async def test_cancelling_the_caller_cancels_the_party() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    task = asyncio.create_task(call(Party.ENV, "step", work, deadline_s=60))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


def test_plain_code_is_blamed_too() -> None:
    def work() -> None:
        raise ValueError("no template")

    with pytest.raises(AttemptFailed, match=r"renderer: start: .*no template"):
        call_now(Party.RENDERER, "start", work)
