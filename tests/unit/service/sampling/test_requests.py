"""Sampling requests: asked twice, cancelled, waiting in line, and reported by session."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from turnwise.engine.config import EngineConfig
from turnwise.service.wire.results import SampleReply
from turnwise.service.wire.types import ServedSample
from turnwise.types import SampleRequest
from unit.service.conftest import ENGINE, TOKENS, Serve, Wire

PROMPT = {"chunks": [{"tokens": [5, 6, 7]}]}


async def sampler_of(wire: Wire, session: str | None = None, index: int = 0) -> str:
    body = {
        "session_id": session or await wire.session(),
        "sampling_session_seq_id": index,
        "base_model": "tiny",
    }
    return (await wire.ok("/create_sampling_session", body))["sampling_session_id"]


def ask(sampler: str, seq: int, max_tokens: int = 3, **more: Any) -> dict[str, Any]:
    params = {"max_tokens": max_tokens, "seed": 1, "stop": []}
    return {"sampling_session_id": sampler, "seq_id": seq, "prompt": PROMPT, "sampling_params": params, **more}


async def test_the_same_number_is_sampled_once(serve: Serve) -> None:
    async with serve() as wire:
        sampler = await sampler_of(wire)
        one, two = await wire.ok("/asample", ask(sampler, 0)), await wire.ok("/asample", ask(sampler, 0))
        assert one == two
        assert len((await wire.result(one))["sequences"]) == 1


async def test_every_sequence_has_an_id(serve: Serve) -> None:
    async with serve() as wire:
        accepted = await wire.ok("/asample", ask(await sampler_of(wire), 0, num_samples=3))
        assert len(set(accepted["sample_sequence_ids"])) == 3
        assert len((await wire.result(accepted))["sequences"]) == 3


async def test_a_cancelled_request_ends_and_the_next_one_runs(serve: Serve) -> None:
    async with serve() as wire:
        sampler = await sampler_of(wire)
        long = await wire.ok("/asample", ask(sampler, 0, max_tokens=1000))
        await wire.ok("/cancel_future", {"request_id": long["request_id"]})
        assert (await wire.result(long)) == {"error": "cancelled", "category": "user"}
        assert (await wire.result(await wire.ok("/asample", ask(sampler, 1))))["sequences"]


async def test_sessions_take_turns_and_those_who_wait_are_told_why(serve: Serve) -> None:
    small = EngineConfig(device="cpu", kv_cache_gib=ENGINE.kv_cache_gib, max_num_seqs=1)
    async with serve(engine=small, hold_s=0.05) as wire:
        greedy, modest = await sampler_of(wire), await sampler_of(wire)
        many = [await wire.ok("/asample", ask(greedy, seq, max_tokens=200)) for seq in range(8)]
        one = await wire.ok("/asample", ask(modest, 0, max_tokens=200))
        waiting = await wire.post("/retrieve_future", {"request_id": many[-1]["request_id"]})
        assert waiting.status_code == 408
        assert waiting.json()["queue_state"] == "paused_capacity"
        assert "wait" in waiting.json()["queue_state_reason"]
        order: list[str] = []
        for accepted in (*many, one):
            promise = wire.service.promises.get(accepted["request_id"], "local")
            promise.on_done.append(lambda done: order.append(done.request_id))
        async with asyncio.timeout(120):
            while len(order) < 7:
                await wire.post("/retrieve_future", {"request_id": many[-1]["request_id"]})
    assert one["request_id"] in order[:5], "one request of the other session did not wait for all eight"


async def test_completions_are_reported_by_session_and_clone(serve: Serve) -> None:
    async with serve(hold_s=0.3) as wire:
        sampler = await sampler_of(wire)
        mine = await wire.ok("/asample", ask(sampler, 0))
        clone = await wire.ok("/asample", ask(sampler, 3 * 10**9))
        bad = await wire.ok("/asample", {**ask(sampler, 1), "prompt": {"chunks": [{"tokens": [10**6]}]}})
        for accepted in (mine, clone, bad):
            await wire.result(accepted)
        target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
        news = await wire.ok("/retrieve_futures", {"target": target, "prev_cursor": 0})
        states = {row["request_id"]: row["state"] for row in news["completions"]}
        assert states == {mine["request_id"]: "finished", bad["request_id"]: "failed"}
        later = await wire.ok("/retrieve_futures", {"target": target, "prev_cursor": news["cursor"]})
        assert later["completions"] == []


async def test_a_prompt_that_cannot_be_used_fails_with_the_reason(serve: Serve) -> None:
    async with serve() as wire:
        sampler = await sampler_of(wire)
        outcome = await wire.result(
            await wire.ok("/asample", {**ask(sampler, 0), "prompt": {"chunks": [{"tokens": [10**6]}]}})
        )
        assert "vocabulary" in outcome["error"]
        negative = await wire.post("/asample", ask(sampler, 1, prompt_alt_tokens_k=-1))
        assert negative.status_code in (400, 422)


async def test_alternatives_to_prompt_tokens_come_with_the_answer_that_asked_for_them(serve: Serve) -> None:
    async with serve() as wire:
        sampler = await sampler_of(wire)
        plain = await wire.result(await wire.ok("/asample", ask(sampler, 0)))
        asked = {**ask(sampler, 1, prompt_alt_tokens_k=3), "prompt": {"chunks": [{"tokens": TOKENS}]}}
        drawn = await wire.result(await wire.ok("/asample", asked))
    assert "prompt_alt_tokens" not in plain
    tokens, logprobs = drawn["prompt_alt_tokens"]["tokens"], drawn["prompt_alt_tokens"]["logprobs"]
    assert (tokens["shape"], tokens["dtype"]) == ([len(TOKENS) - 1, 3], "int64")
    assert (logprobs["shape"], logprobs["dtype"]) == ([len(TOKENS) - 1, 3], "float32")
    assert max(logprobs["data"]) < 0


async def test_chosen_ids_are_scored_as_the_prompts_own_are(serve: Serve) -> None:
    """`target_prompt_logprobs` asks for other ids at each position; asking for the prompt's own gives its logprobs."""
    async with serve() as wire:
        sampler = await sampler_of(wire)
        served = wire.service.sampling.get(sampler, wire.service.access.caller(None).owner)
        own = np.asarray(TOKENS[1:], dtype=np.int64)[:, None]
        request = ServedSample(sample=SampleRequest.scoring(TOKENS), targets=own)
        promise = wire.service.sampling.enqueue(served, request, seq=1, num_bytes=0)
        await wire.service.promises.wait(promise, 30)
    reply = promise.outcome
    assert isinstance(reply, SampleReply)
    assert reply.target_logprobs is not None
    known = list(reply.response.prompt_logprobs or [])[1:]
    np.testing.assert_allclose(reply.target_logprobs.to_numpy()[:, 0], np.asarray(known, dtype=np.float32), atol=1e-5)
