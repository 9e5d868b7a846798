"""Captures survive a restart of the service: no turn is lost, and none counts twice."""

from __future__ import annotations

from typing import Any

import pytest

from turnwise.service.openai.capture import Capture
from turnwise.trajectory import Trajectory
from unit.service.conftest import Serve, Wire
from unit.service.openai.test_capture import TOOL, create, read, reply, reward

FIRST = [{"role": "user", "content": "First?"}]
RETRY = {"x-stainless-retry-count": "1"}


def said(trajectory: Trajectory) -> Any:
    """What was said and earned."""
    return [(turn.prompt_ids, turn.sampled_ids, turn.reply, turn.reward_parts) for turn in trajectory.turns]


async def two_turns(serve: Serve, *, restarts: bool) -> tuple[Trajectory, Any]:
    async with serve() as wire:
        capture = await create(wire, model="tiny", task_id="find")
        messages = [*FIRST, await reply(wire, capture, FIRST, seed=1, tools=[TOOL])]
        await reward(wire, capture, reward=0.5)
        if not restarts:
            return await go_on(wire, capture, messages), capture
    async with serve() as wire:
        return await go_on(wire, capture, messages), capture


async def go_on(wire: Wire, capture: Any, messages: list[Any]) -> Trajectory:
    await reply(wire, capture, [*messages, {"role": "user", "content": "Second?"}], seed=2, tools=[TOOL])
    await reward(wire, capture, reward=1.0, is_success=True)
    return await read(wire, capture)


async def test_an_attempt_in_progress_goes_on_as_if_nothing_had_happened(serve: Serve) -> None:
    expected, _ = await two_turns(serve, restarts=False)
    found, capture = await two_turns(serve, restarts=True)
    assert said(found) == said(expected)
    for turn, same in zip(found.turns, expected.turns, strict=True):
        assert turn.sampler_logprobs == pytest.approx(same.sampler_logprobs, abs=1e-4)  # other batches, other rounding
    assert (found.task_id, found.is_success) == ("find", True)
    async with serve() as wire:
        assert await read(wire, capture) == found
        assert (await wire.http.delete(f"/v1/captures/{capture['id']}")).status_code == 200
    async with serve() as wire:
        assert (await wire.http.get(f"/v1/captures/{capture['id']}")).status_code == 404


async def call(wire: Wire, capture: Any, messages: Any = FIRST, **headers: str) -> str:
    body = {"model": "any", "messages": messages, "max_tokens": 8}
    answer = await wire.http.post(f"{capture['base_url']}/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


async def test_a_reply_that_never_arrived_is_given_again_and_counts_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as wire:
        capture = await create(wire, model="tiny")
        with monkeypatch.context() as patch:
            patch.setattr(Capture, "told", lambda *_: None)  # the server ends before the reply is out
            recorded = await call(wire, capture)
    async with serve() as wire:
        assert await call(wire, capture, **RETRY) == recorded
        assert len((await read(wire, capture)).turns) == 1
        await call(wire, capture)
        assert len((await read(wire, capture)).turns) == 2, "the same question once more is a turn of its own"


async def test_replies_of_several_conversations_are_given_again_once_each(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = [{"role": "user", "content": "Something else?"}]
    async with serve() as wire:
        capture = await create(wire, model="tiny")
        with monkeypatch.context() as patch:
            patch.setattr(Capture, "told", lambda *_: None)  # the server ends before the replies are out
            recorded = [await call(wire, capture, messages) for messages in (FIRST, other)]
    async with serve() as wire:
        assert [await call(wire, capture, messages, **RETRY) for messages in (FIRST, other)] == recorded
        assert len((await read(wire, capture)).turns) == 2
    async with serve() as wire:
        await call(wire, capture, **RETRY)
        assert len((await read(wire, capture)).turns) == 3, "a reply that was given again has been heard"


async def test_a_retry_of_a_call_that_was_not_recorded_is_sampled(serve: Serve) -> None:
    async with serve() as wire:
        capture = await create(wire, model="tiny")
        await call(wire, capture)
    async with serve() as wire:
        await call(wire, capture, **RETRY)
        assert len((await read(wire, capture)).turns) == 2


async def test_a_reward_with_a_key_counts_once(serve: Serve) -> None:
    async with serve() as wire:
        capture = await create(wire, model="tiny")
        await call(wire, capture)
        path, headers = f"/v1/captures/{capture['id']}/reward", {"Idempotency-Key": "one"}
        await wire.http.post(path, json={"reward": 1.0}, headers=headers)
    async with serve() as wire:
        await wire.http.post(path, json={"reward": 1.0}, headers=headers)
        await wire.http.post(path, json={"reward": 0.25})
        assert (await read(wire, capture)).total_reward == 1.25
