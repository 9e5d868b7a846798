"""Both habits of waiting, deadlines, errors and cancellation."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, Future

import pytest

from turnwise.client.futures import ApiFuture, Submission, completed
from turnwise.errors import DataError


def settle_later(future: Future[int], value: int | BaseException, after_s: float = 0.02) -> None:
    def settle() -> None:
        if isinstance(value, BaseException):
            future.set_exception(value)
        else:
            future.set_result(value)

    timer = threading.Timer(after_s, settle)
    timer.daemon = True
    timer.start()


def pending(value: int | BaseException | None = None) -> ApiFuture[int]:
    future: Future[int] = Future()
    if value is not None:
        settle_later(future, value)
    return ApiFuture(future, "forward_backward of 3 datums")


async def test_a_future_gives_its_value_however_it_is_asked() -> None:
    assert pending(7).result() == 7
    assert await pending(7).result_async() == 7
    assert await pending(7) == 7


async def test_a_future_gives_its_value_again_and_again() -> None:
    future = pending(7)
    assert [await future, await future, future.result(), await future.result_async()] == [7, 7, 7, 7]
    assert await asyncio.gather(future, asyncio.wait_for(future, 5)) == [7, 7]


async def test_awaiting_a_submission_gives_a_future_without_waiting() -> None:
    future = await Submission(pending())
    assert isinstance(future, ApiFuture)
    assert not future.done()


async def test_both_habits_of_an_async_submit_call() -> None:
    assert await Submission(pending(7)).result_async() == 7
    assert Submission(pending(7)).result() == 7
    future = await Submission(pending(7))
    assert await future.result_async() == 7
    assert await future == 7
    assert future.result() == 7


async def test_a_submission_is_a_coroutine_to_asyncio() -> None:
    future = await asyncio.create_task(Submission(pending(7)))
    assert await future == 7
    one, other = await asyncio.gather(Submission(pending(1)), Submission(pending(2)))
    assert (await one, await other) == (1, 2)
    assert await (await asyncio.wait_for(Submission(pending(7)), 5)) == 7


def test_asyncio_run_takes_a_submission() -> None:
    assert asyncio.run(Submission(pending(7))).result() == 7


async def test_waiting_inside_a_running_loop_blocks_but_ends() -> None:
    assert pending(7).result(timeout=120) == 7


def test_a_deadline_names_what_was_waited_for_and_leaves_it_under_way() -> None:
    future = pending()
    with pytest.raises(TimeoutError, match=r"forward_backward of 3 datums: not done after 0\.01 s"):
        future.result(timeout=0.01)
    future.future().set_result(7)
    assert future.result() == 7


async def test_a_deadline_in_a_coroutine_leaves_the_request_under_way() -> None:
    future = ApiFuture(Future[int](), "sample", on_abandoned=lambda: pytest.fail("a deadline abandons nothing"))
    with pytest.raises(TimeoutError, match="sample: not done after"):
        await future.result_async(timeout=0.01)
    assert not future.future().cancelled()
    future.future().set_result(7)
    assert await future == 7


@pytest.mark.parametrize("error", [DataError("wrong"), TimeoutError("its own"), KeyError("k")])
async def test_an_error_is_raised_with_its_own_type(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised:
        pending(error).result(timeout=120)
    assert raised.value is error
    with pytest.raises(type(error)) as raised:
        await pending(error)
    assert raised.value is error


async def test_cancelling_the_task_that_waits_abandons_the_request() -> None:
    future: Future[int] = Future()
    task = asyncio.create_task(ApiFuture(future, "sample", on_abandoned=future.cancel).result_async())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert future.cancelled()


async def test_cancelling_the_task_leaves_a_training_request_alone() -> None:
    future = pending()
    task = asyncio.create_task(future.result_async())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    future.future().set_result(7)
    assert await future == 7


async def test_a_request_that_was_withdrawn_raises_cancelled() -> None:
    future = pending()
    assert future.cancel()
    with pytest.raises(CancelledError):
        await future


def test_a_request_may_outlive_the_loop_that_waited_for_it() -> None:
    future = pending()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await future.result_async(timeout=0.01)

    asyncio.run(give_up())
    future.future().set_result(7)
    assert future.result() == 7


def test_a_completed_future_is_done_at_once() -> None:
    assert completed(7, "nothing").result(timeout=120) == 7
