"""`/v1/completions`: raw text or ids in, the continuation out. With `echo`, also the logprobs of the prompt."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response

from turnwise.envs.chat_api.bodies import refused
from turnwise.service.access import Caller
from turnwise.service.failures import HttpFailure
from turnwise.service.futures import Promise
from turnwise.service.openai.chat import DONE, EventStream, event, stream_error, usage
from turnwise.service.openai.errors import AsciiJson
from turnwise.service.openai.gateway import (
    DEADLINE_S,
    Gateway,
    Talker,
    TokenFeed,
    cancel,
    outcome_of,
    sampling_params,
)
from turnwise.service.openai.logprobs import check_top_logprobs, plain_logprobs
from turnwise.service.openai.schemas import CompletionBody
from turnwise.service.openai.text import ReplyStream
from turnwise.service.wire.results import SampleReply
from turnwise.types import SampleRequest

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _CompletionPrompt:
    """One prompt of a request."""

    talker: Talker
    body: CompletionBody
    prompt: list[int]

    @property
    def num_top(self) -> int:
        return self.body.logprobs or 0

    def draw(self, gateway: Gateway, *, on_token: Any = None) -> Promise:
        body = self.body
        wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        params = sampling_params(body, self.talker.stop_ids, max(wanted, 1))
        scores_prompt = bool(body.echo) and body.logprobs is not None
        sample = SampleRequest(
            self.prompt,
            params,
            num_samples=body.n or 1,
            include_prompt_logprobs=scores_prompt,
            topk_prompt_logprobs=self.num_top if scores_prompt else 0,
        )
        num_top = self.num_top if body.max_tokens != 0 else 0
        return gateway.draw(self.talker, sample, topk_sample_logprobs=num_top, on_token=on_token)

    def stream(self) -> ReplyStream:
        return ReplyStream(self.talker.text_of, self.talker.stop_ids, self.body.stops(), has_tools=False)

    def head(self) -> dict[str, Any]:
        name = f"cmpl-{uuid.uuid4().hex}"
        return {"id": name, "object": "text_completion", "created": int(time.time()), "model": self.talker.model}


async def answer_completion(gateway: Gateway, caller: Caller, request: Request, body: CompletionBody) -> Response:
    body.check()
    check_top_logprobs(body.logprobs or 0, body.temperature, is_streamed=bool(body.stream))
    talker = await gateway.find(body.model, caller)
    prompts = body.prompts()
    if not 0 < len(prompts) <= MAX_PROMPTS:
        raise HttpFailure(400, f"{len(prompts)} prompts; expected 1 to {MAX_PROMPTS}")
    jobs = [_CompletionPrompt(talker=talker, body=body, prompt=await _ids(talker, prompt)) for prompt in prompts]
    if body.stream:
        if len(jobs) > 1:
            raise refused("stream with several prompts", "send one prompt per request")
        return await _answer_stream(gateway, jobs[0])
    outcomes = await _all(gateway, jobs, request)
    choices = [
        _choice(job, at, outcome, first + at)
        for first, job, outcome in zip(range(0, len(jobs) * (body.n or 1), body.n or 1), jobs, outcomes, strict=True)
        for at in range(body.n or 1)
    ]
    counted = [usage(job.prompt, outcome) for job, outcome in zip(jobs, outcomes, strict=True)]
    totals = {
        name: sum(one[name] for one in counted) for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    return AsciiJson({**jobs[0].head(), "choices": choices, "usage": totals})


async def _ids(talker: Talker, prompt: str | list[int]) -> list[int]:
    ids = await asyncio.to_thread(talker.ids_of, prompt) if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise HttpFailure(400, "prompt is empty; send at least one token")
    return ids


async def _all(gateway: Gateway, jobs: Sequence[_CompletionPrompt], request: Request) -> list[SampleReply]:
    """The outcomes of all prompts. The first failure cancels the other prompts."""
    promises: list[Promise] = []
    try:
        promises.extend(job.draw(gateway) for job in jobs)
        return [await gateway.result(promise, request) for promise in promises]
    finally:
        for promise in promises:
            cancel(promise)


def _choice(job: _CompletionPrompt, at: int, outcome: SampleReply, index: int) -> dict[str, Any]:
    response, body = outcome.response, job.body
    sequence = response.sequences[at]
    is_scored_only = body.max_tokens == 0
    stream = job.stream()
    for token in () if is_scored_only else sequence.tokens:
        stream.add(token)
    _, reply = stream.finish()
    kept = stream.num_told_tokens
    tokens = list(sequence.tokens[:kept])
    assert sequence.logprobs is not None
    logprobs: list[float | None] = list(sequence.logprobs[:kept])
    rows: list[Any] | None = None
    if job.num_top:
        rows = list(outcome.topk_sampled[at][:kept]) if outcome.topk_sampled is not None else []
    text = reply.content
    if body.echo:
        text = job.talker.text_of(job.prompt) + text
        tokens = [*job.prompt, *tokens]
        logprobs = [*(response.prompt_logprobs or ()), *logprobs]
        rows = None if rows is None else [*(response.topk_prompt_logprobs or ()), *rows]
    choice: dict[str, Any] = {
        "index": index,
        "text": text,
        "logprobs": None if body.logprobs is None else plain_logprobs(job.talker, tokens, logprobs, rows),
        "finish_reason": "length" if is_scored_only else sequence.stop_reason,
    }
    if body.return_token_ids:
        choice |= {"prompt_token_ids": job.prompt, "token_ids": list(sequence.tokens)}
    return choice


async def _answer_stream(gateway: Gateway, job: _CompletionPrompt) -> Response:
    feed = TokenFeed()
    promise = job.draw(gateway, on_token=feed.on_token)
    await feed.follow(promise)
    return EventStream(_events(job, feed, promise), promise)


async def _events(job: _CompletionPrompt, feed: TokenFeed, promise: Promise) -> AsyncIterator[str]:
    head = job.head()
    streams = [job.stream() for _ in range(job.body.n or 1)]
    drawn: list[list[tuple[int, float]]] = [[] for _ in streams]
    num_told = [0] * len(streams)
    with_usage = job.body.stream_options is not None and job.body.stream_options.include_usage

    def chunk(index: int, text: str, reason: str | None = None) -> str:
        upto, logprobs = streams[index].num_told_tokens, None
        if job.body.logprobs is not None:
            new = drawn[index][num_told[index] : upto]
            logprobs = plain_logprobs(job.talker, [token for token, _ in new], [value for _, value in new], None)
        num_told[index] = upto
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return event({**head, "choices": [choice], **({"usage": None} if with_usage else {})})

    try:
        async with asyncio.timeout(DEADLINE_S):
            async for index, token, logprob in feed.tokens():
                shown = streams[index].add(token)
                drawn[index].append((token, logprob))
                if shown:
                    yield chunk(index, shown)
        outcome = outcome_of(promise)
    except (TimeoutError, HttpFailure) as error:
        yield stream_error(error, "the text")
        return
    for index, sequence in enumerate(outcome.response.sequences):
        rest, _ = streams[index].finish()
        yield chunk(index, rest, sequence.stop_reason)
    if with_usage:
        yield event({**head, "choices": [], "usage": usage(job.prompt, outcome)})
    yield DONE
