"""The watchdog: at every moment somebody can say what is waited for, and nothing is waited for without end."""

from __future__ import annotations

import asyncio

import pytest

from turnwise.errors import Party
from turnwise.rollout.call import DeadlinePassed, call
from turnwise.runtime.pending_calls import PENDING_CALLS, PendingCalls, caller
from turnwise.watch.watchdog import StalledError, Watchdog


async def test_a_call_is_listed_with_party_question_caller_and_deadline_while_it_lasts() -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def work() -> str:
        asked.set()
        await answer.wait()
        return "done"

    async def attempt() -> str:
        caller.set("sum-7, attempt 2")
        return await call(Party.ENV, "step", work, deadline_s=30)

    before = len(PENDING_CALLS)
    task = asyncio.create_task(attempt())
    await asked.wait()
    (wait,) = [wait for wait in PENDING_CALLS.oldest(100) if wait.who == "sum-7, attempt 2"]
    assert (wait.party, wait.what, wait.deadline_s) == ("env", "step", 30)
    assert str(wait).startswith("env: step (sum-7, attempt 2), 0.0 s of at most 30 s")
    answer.set()
    assert await task == "done"
    assert len(PENDING_CALLS) == before


@pytest.mark.parametrize("end", ["late", "error", "cancelled"])
async def test_a_call_leaves_the_list_however_it_ends(end: str) -> None:
    before = len(PENDING_CALLS)

    async def work() -> None:
        if end == "error":
            raise ValueError("no")
        await asyncio.Event().wait()

    task = asyncio.create_task(call(Party.TOOL, "add", work, deadline_s=0.01 if end == "late" else 30))
    if end == "cancelled":
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(outcome, asyncio.CancelledError if end == "cancelled" else Exception)
    assert isinstance(outcome, DeadlinePassed) == (end == "late")
    assert len(PENDING_CALLS) == before


async def test_a_trainer_that_does_not_answer_is_named_at_its_deadline() -> None:
    watchdog = Watchdog(call_deadline_s=0.05, calls=PendingCalls())
    with pytest.raises(StalledError, match=r"trainer: forward_backward gave no answer within 0\.05 s") as caught:
        await watchdog.call("trainer", "forward_backward", asyncio.Event().wait())
    assert caught.value.party == "trainer"
    assert watchdog.reason == ""


async def test_a_timeout_of_the_party_itself_is_not_taken_for_ours() -> None:
    async def work() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await Watchdog(calls=PendingCalls()).call("trainer", "optim_step", work())


async def test_attempts_of_which_nothing_comes_back_are_named_with_what_they_wait_for() -> None:
    waits = PendingCalls()
    watchdog = Watchdog(stall_deadline_s=0.01, calls=waits)
    with waits.listed("env", "step", 600):
        never = asyncio.create_task(asyncio.Event().wait())
        with pytest.raises(StalledError, match=r"attempts: no call returned .* longest waits: env: step"):
            await watchdog.any_of([never], lambda: "a batch")
        never.cancel()


async def test_attempts_are_waited_for_as_long_as_calls_come_back() -> None:
    waits = PendingCalls()
    watchdog = Watchdog(stall_deadline_s=1.5, calls=waits)

    async def many_short_calls() -> None:
        for _ in range(20):
            with waits.listed("env", "step", 1):
                await asyncio.sleep(0.1)

    await watchdog.any_of([asyncio.create_task(many_short_calls())], lambda: "a batch")
