"""Clients of the `openai` package whose requests go to a function of this process; nothing is sent anywhere."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

from turnwise.envs.chat_api.bodies import ChatBody
from turnwise.envs.chat_api.messages import Reply
from turnwise.errors import ConfigError, TurnwiseError

Ask = Callable[[bytes], tuple[ChatBody, "Future[Reply]"]]
"""Takes the body of a chat request; gives it back parsed, with the reply to come."""
ADDRESS = "http://turnwise.invalid/v1"


@dataclass(frozen=True, slots=True)
class _Begun:
    """A request that the policy answers."""

    body: ChatBody
    reply: Future[Reply]


def _packages() -> tuple[Any, Any]:
    try:
        import httpx
        import openai
    except ImportError as cause:
        raise ConfigError("an agent needs the openai package: pip install 'turnwise[agents]'") from cause
    return httpx, openai


def make_client(ask: Ask) -> Any:
    """An `openai.OpenAI`."""
    httpx, openai = _packages()

    def answer(request: Any) -> Any:
        begun = _begin(httpx, ask, request.method, request.url.path, request.read())
        return _finish(httpx, begun.body, begun.reply.result()) if isinstance(begun, _Begun) else begun

    http = httpx.Client(transport=httpx.MockTransport(answer))
    return openai.OpenAI(base_url=ADDRESS, api_key="none", max_retries=0, timeout=None, http_client=http)


def make_async_client(ask: Ask) -> Any:
    """An `openai.AsyncOpenAI`."""
    httpx, openai = _packages()

    async def answer(request: Any) -> Any:
        begun = _begin(httpx, ask, request.method, request.url.path, await request.aread())
        if not isinstance(begun, _Begun):
            return begun
        return _finish(httpx, begun.body, await asyncio.wrap_future(begun.reply))

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return openai.AsyncOpenAI(base_url=ADDRESS, api_key="none", max_retries=0, timeout=None, http_client=http)


def _begin(httpx: Any, ask: Ask, method: str, path: str, content: bytes) -> Any:
    """The parsed request and its reply to come, or an answer that needs no policy."""
    if (method, path) != ("POST", "/v1/chat/completions"):
        return httpx.Response(404, json=_error(f"{method} {path} is not here; an agent in training may only chat"))
    try:
        return _Begun(*ask(content))
    except TurnwiseError as error:
        return httpx.Response(400, json=_error(str(error)))


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


def _finish(httpx: Any, body: ChatBody, reply: Reply) -> Any:
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}
    reason = "tool_calls" if reply.calls else "stop"
    message = reply.to_json()
    if not body.stream:
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return httpx.Response(200, json={**head, "object": "chat.completion", "choices": [choice]})
    asked = cast("list[dict[str, Any]]", message.pop("tool_calls", None) or [])
    calls = [{**call, "index": index} for index, call in enumerate(asked)]
    delta: dict[str, Any] = {**message, "tool_calls": calls} if calls else message
    chunks: list[dict[str, Any]] = [
        {**head, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": part, "finish_reason": end}]}
        for part, end in ((delta, None), ({}, reason))
    ]
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, content="".join(lines).encode())
