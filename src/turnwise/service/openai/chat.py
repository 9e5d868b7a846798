"""`/v1/chat/completions`: messages in, a reply out, at once or as a stream. With a capture, the call is recorded."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.background import BackgroundTask
from starlette.types import Receive, Scope, Send

from turnwise.envs.chat_api.bodies import ChatBody, refused
from turnwise.envs.chat_api.messages import Reply, call_to_json, read_messages, with_call_text, with_tools
from turnwise.service.access import Caller
from turnwise.service.failures import HttpFailure
from turnwise.service.futures import Promise
from turnwise.service.openai.capture import Capture
from turnwise.service.openai.errors import AsciiJson, error_json
from turnwise.service.openai.gateway import (
    DEADLINE_S,
    Gateway,
    Talker,
    TokenFeed,
    cancel,
    outcome_of,
    sampling_params,
)
from turnwise.service.openai.logprobs import chat_logprob, check_top_logprobs
from turnwise.service.openai.text import ReplyStream
from turnwise.service.wire.results import SampleReply
from turnwise.trajectory import Message, Turn
from turnwise.types import SampledSequence, SampleRequest, SampleResponse, SamplingParams

RETRY_HEADER = "x-stainless-retry-count"
"""How often the openai package has sent this very call before, without an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One chat request, ready to be sampled."""

    talker: Talker
    body: ChatBody
    asked: Sequence[Message]
    prompt: list[int]
    params: SamplingParams
    capture: Capture | None
    recorded: list[int] = field(default_factory=list[int])
    """The numbers of its turns in the capture, once they are there."""

    @property
    def num_choices(self) -> int:
        return self.body.n or 1

    @property
    def sample(self) -> SampleRequest:
        return SampleRequest(self.prompt, self.params, num_samples=self.num_choices)

    def stream(self) -> ReplyStream:
        talker = self.talker
        return ReplyStream(talker.text_of, talker.stop_ids, self.body.stops(), has_tools=self.body.wants_tools)

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.talker.model,
            "system_fingerprint": None,
        }

    def record(self, sequence: SampledSequence, reply: Reply, outcome: SampleReply) -> None:
        """Add the turn to the capture, if there is one."""
        if self.capture is None:
            return
        assert sequence.logprobs is not None, "the engine always gives logprobs"
        turn = Turn(
            prompt_ids=tuple(self.prompt),
            sampled_ids=tuple(sequence.tokens),
            sampler_logprobs=tuple(sequence.logprobs),
            policy_version=outcome.response.policy_version,
            temperature=self.params.temperature or 1.0,  # the logprobs of a greedy draw are those at temperature 1
            reply=self.talker.renderer.parse(sequence.tokens),
            is_cut=sequence.stop_reason == "length",
        )
        self.recorded.append(self.capture.add(self.asked, reply, turn))

    async def told(self) -> None:
        """The reply has been sent."""
        if self.capture is not None:
            for number in self.recorded:
                self.capture.told(number)


async def answer_chat(
    gateway: Gateway, caller: Caller, request: Request, body: ChatBody, capture: Capture | None = None
) -> Response:
    """The answer to one call."""
    body.check()
    check_top_logprobs(body.top_logprobs or 0, body.temperature, is_streamed=bool(body.stream))
    if capture is not None:
        body = _as_captured(body, capture)
    talker = await gateway.find(body.model, caller)
    asked = read_messages(body.messages)
    if body.wants_tools:
        asked = with_tools(asked, body.tools or ())
    prompt = await asyncio.to_thread(_render, talker, asked, capture)
    max_tokens = body.max_completion_tokens or body.max_tokens
    params = sampling_params(body, talker.stop_ids, max_tokens, talker.stops)
    call = Call(talker=talker, body=body, asked=asked, prompt=prompt, params=params, capture=capture)
    if body.stream:
        return await _answer_stream(gateway, call)
    if capture is not None and request.headers.get(RETRY_HEADER, "0") != "0":
        unheard = capture.take_unheard(asked)
        if unheard is not None:
            call.recorded.append(unheard)
            again = _whole(replace(call, capture=None), _sampled_before(capture.turns[unheard].turn))
            return AsciiJson(again, background=BackgroundTask(call.told))
    promise = gateway.draw(talker, call.sample, topk_sample_logprobs=body.top_logprobs or 0)
    return AsciiJson(_whole(call, await gateway.result(promise, request)), background=BackgroundTask(call.told))


def _sampled_before(turn: Turn) -> SampleReply:
    """A recorded reply as the sampler gave it."""
    sequence = SampledSequence(
        tokens=list(turn.sampled_ids),
        logprobs=list(turn.sampler_logprobs),
        stop_reason="length" if turn.is_cut else "stop",
    )
    return SampleReply(response=SampleResponse(sequences=[sequence], policy_version=turn.policy_version))


def _as_captured(body: ChatBody, capture: Capture) -> ChatBody:
    """The call with the capture's settings: its model and temperature, one reply, no top_p, top_k or min_p."""
    settings = capture.settings
    if (body.n or 1) > 1:
        raise refused("n", "a capture records one reply per call")
    changes: dict[str, Any] = {} if settings.model is None else {"model": settings.model}
    if settings.temperature is not None:
        changes |= {"temperature": settings.temperature, "top_p": None, "top_k": None, "min_p": None}
    elif body.top_p not in (None, 1) or body.top_k not in (None, -1, 0) or body.min_p:
        raise HttpFailure(
            400,
            "top_p, top_k and min_p cut the distribution, and a captured reply could not be trained exactly; create "
            "the capture with a temperature, which takes the place of the agent's own settings",
        )
    return body.model_copy(update=changes)


def _render(talker: Talker, asked: Sequence[Message], capture: Capture | None) -> list[int]:
    if capture is not None:
        return capture.prompt(talker.renderer, asked)
    return talker.renderer.start([with_call_text(message) for message in asked])


def _whole(call: Call, outcome: SampleReply) -> dict[str, Any]:
    choices = [_choice(call, index, outcome) for index in range(call.num_choices)]
    answer = {**call.head("chat.completion"), "choices": choices, "usage": usage(call.prompt, outcome)}
    return {**answer, "prompt_token_ids": call.prompt} if call.body.return_token_ids else answer


def _choice(call: Call, index: int, outcome: SampleReply) -> dict[str, Any]:
    sequence = outcome.response.sequences[index]
    stream = call.stream()
    for token in sequence.tokens:
        stream.add(token)
    _, reply = stream.finish()
    call.record(sequence, reply, outcome)
    choice: dict[str, Any] = {
        "index": index,
        "message": reply.to_json(),
        "logprobs": None,
        "finish_reason": "tool_calls" if reply.calls else sequence.stop_reason,
    }
    if call.body.logprobs:
        kept = stream.num_told_tokens
        rows = None if outcome.topk_sampled is None else outcome.topk_sampled[index]
        assert sequence.logprobs is not None
        drawn = zip(sequence.tokens[:kept], sequence.logprobs[:kept], strict=True)
        content = [
            chat_logprob(call.talker, token, logprob, rows[place] if rows is not None else ())
            for place, (token, logprob) in enumerate(drawn)
        ]
        choice["logprobs"] = {"content": content, "refusal": None}
    return {**choice, "token_ids": list(sequence.tokens)} if call.body.return_token_ids else choice


def usage(prompt: Sequence[int], outcome: SampleReply) -> dict[str, Any]:
    """Tokens read and drawn, the stop included."""
    drawn = sum(len(sequence.tokens) for sequence in outcome.response.sequences)
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": drawn,
        "total_tokens": len(prompt) + drawn,
        "prompt_tokens_details": {"cached_tokens": outcome.response.num_cached_prompt_tokens},
    }


class EventStream(StreamingResponse):
    """Server-sent events of one request. When the stream ends, for any reason, the request is ended too."""

    def __init__(self, events: AsyncIterator[str], promise: Promise) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._promise = promise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            cancel(self._promise)


def event(content: object) -> str:
    return f"data: {json.dumps(content)}\n\n"


DONE = "data: [DONE]\n\n"


async def _answer_stream(gateway: Gateway, call: Call) -> Response:
    """A stream that begins with the first token. A request that is refused before it gets a status code."""
    feed = TokenFeed()
    promise = gateway.draw(call.talker, call.sample, on_token=feed.on_token)
    await feed.follow(promise)
    return EventStream(_events(call, feed, promise), promise)


def stream_error(error: TimeoutError | HttpFailure, what: str) -> str:
    """The last event of a stream that cannot go on."""
    if isinstance(error, HttpFailure):
        return event(error_json(error.status, error.detail))
    return event(error_json(504, f"{what} took longer than {DEADLINE_S:g} s"))


async def _events(call: Call, feed: TokenFeed, promise: Promise) -> AsyncIterator[str]:
    head = call.head("chat.completion.chunk")
    with_usage = call.body.stream_options is not None and call.body.stream_options.include_usage
    if with_usage:
        head["usage"] = None
    first: dict[str, Any] = {} if not call.body.return_token_ids else {"prompt_token_ids": call.prompt}
    teller = _Teller(call, head)
    for index in range(call.num_choices):
        yield event({**teller.chunk(index, {"role": "assistant", "content": "", "refusal": None}), **first})
    try:
        async with asyncio.timeout(DEADLINE_S):
            async for index, token, logprob in feed.tokens():
                if (chunk := teller.add(index, token, logprob)) is not None:
                    yield event(chunk)
        outcome = outcome_of(promise)
    except (TimeoutError, HttpFailure) as error:
        yield stream_error(error, "the reply")
        return
    for index, sequence in enumerate(outcome.response.sequences):
        for chunk in teller.finish(index, sequence, outcome):
            yield event(chunk)
    if with_usage:
        yield event({**head, "choices": [], "usage": usage(call.prompt, outcome)})
    yield DONE
    await call.told()


class _Teller:
    """What to send next, by choice."""

    def __init__(self, call: Call, head: dict[str, Any]) -> None:
        self._call = call
        self._head = head
        self._streams = [call.stream() for _ in range(call.num_choices)]
        self._entries: list[list[dict[str, Any]]] = [[] for _ in self._streams]
        self._told = [0] * call.num_choices
        self._ids: list[list[int]] = [[] for _ in self._streams]

    def chunk(self, index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head, "choices": [choice]}

    def add(self, index: int, token: int, logprob: float) -> dict[str, Any] | None:
        """The chunk that a token makes; None while there is nothing to show."""
        shown = self._streams[index].add(token)
        self._ids[index].append(token)
        if self._call.body.logprobs:
            self._entries[index].append(chat_logprob(self._call.talker, token, logprob))
        return self._with_tokens(index, self.chunk(index, {"content": shown})) if shown else None

    def finish(self, index: int, sequence: SampledSequence, outcome: SampleReply) -> list[dict[str, Any]]:
        rest, reply = self._streams[index].finish()
        self._call.record(sequence, reply, outcome)
        chunks: list[dict[str, Any]] = []
        if rest:
            chunks.append(self._with_tokens(index, self.chunk(index, {"content": rest})))
        if reply.calls:
            calls = [{"index": place, **call_to_json(call)} for place, call in enumerate(reply.calls)]
            chunks.append(self._with_tokens(index, self.chunk(index, {"tool_calls": calls})))
        reason = "tool_calls" if reply.calls else sequence.stop_reason
        return [*chunks, self._with_tokens(index, self.chunk(index, {}, reason))]

    def _with_tokens(self, index: int, chunk: dict[str, Any]) -> dict[str, Any]:
        """Add the logprobs and ids of the tokens that were not sent yet."""
        (choice,) = chunk["choices"]
        if self._call.body.logprobs:
            upto = self._streams[index].num_told_tokens
            new = self._entries[index][self._told[index] : upto]
            self._told[index] = max(upto, self._told[index])
            choice["logprobs"] = {"content": new, "refusal": None} if new else None
        if self._call.body.return_token_ids:
            choice["token_ids"], self._ids[index] = self._ids[index], []
        return chunk
