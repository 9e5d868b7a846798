"""From a model's name to sampled tokens: access checks, the wait for an answer, and the stop when the client leaves."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from turnwise.errors import CheckpointError, TurnwiseError
from turnwise.renderers import Renderer, get_renderer
from turnwise.service.access import Caller
from turnwise.service.engines import ServedModel
from turnwise.service.failures import HttpFailure, without_paths
from turnwise.service.futures import Promise
from turnwise.service.named_policies import ChatSettings
from turnwise.service.openai.capture import Captures
from turnwise.service.sampling.sampling import SamplingSession
from turnwise.service.service import Service
from turnwise.service.store.store import SessionRow
from turnwise.service.wire import schemas
from turnwise.service.wire import types as wire
from turnwise.service.wire.results import SampleReply
from turnwise.types import SampleRequest, SamplingParams

DEADLINE_S = 600.0
"""The longest time for an answer. After it, sampling is stopped."""
FIRST_SEQ = 2**62
"""The first number of our requests in a sampling session. SDKs use lower numbers in the same session."""
CLIENT_GONE = 499

DrawnToken = tuple[int, int, float]
"""The number of the choice, the token's id, and its logprob."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """A base model's tokenizer and its chat format."""

    tokenizer: Any
    renderer: Renderer | None
    problem: str = ""
    """Why there is no renderer."""


@dataclass(frozen=True, slots=True)
class Talker:
    """A policy that a client can talk to."""

    model: str
    """The name that the client used."""
    sampler: SamplingSession
    format: ChatFormat
    stops: tuple[str, ...] = ()
    """Strings that ended the replies of the policy's run."""

    @property
    def renderer(self) -> Renderer:
        if self.format.renderer is None:
            raise HttpFailure(400, f"{self.model[:200]} cannot chat: {self.format.problem}; use /v1/completions")
        return self.format.renderer

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The token ids that end a turn or a sequence."""
        if self.format.renderer is not None:
            return self.format.renderer.stop_ids
        eos_id = self.format.tokenizer.eos_token_id
        return () if eos_id is None else (int(eos_id),)

    def text_of(self, ids: Sequence[int]) -> str:
        return str(self.format.tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=False))

    def ids_of(self, text: str) -> list[int]:
        """Raw text as the tokenizer reads it; control tokens in the text count as control tokens."""
        try:
            return [int(token) for token in self.format.tokenizer(text)["input_ids"]]
        except (UnicodeError, TypeError) as cause:
            raise HttpFailure(400, f"the prompt cannot be encoded: {cause}") from cause


class Gateway:
    """The OpenAI endpoints' side of one service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.captures = Captures(service.captures)
        self._formats: dict[tuple[str, ChatSettings], asyncio.Task[ChatFormat]] = {}
        self._numbers = itertools.count(FIRST_SEQ)

    async def find(self, model: str, caller: Caller) -> Talker:
        """The policy of that name: a base model, a policy of `turnwise serve RUN`, a checkpoint's path, or a sampling
        session."""
        try:
            sampler = self._sampler(model, caller)
        except HttpFailure as error:
            if error.status in (400, 404):
                raise _no_model(model) from error
            raise
        except CheckpointError as error:
            raise _no_model(model) from error
        named = self.service.models.policies.get(model)
        chat = ChatSettings() if named is None else named.chat
        return Talker(model, sampler, await self._format(sampler.served, chat), chat.stop)

    def _sampler(self, model: str, caller: Caller) -> SamplingSession:
        service = self.service
        if ":sample:" in model and "://" not in model:
            return service.sampling.get(model, caller.owner)
        session = self._session(caller)
        if "://" in model:
            row = service.checkpoints.find(model, caller.owner)
            # If a checkpoint was overwritten, it needs a new sampler, because the old one holds the old weights.
            identity, what = f"{row.path} {row.created_at}", {"model_path": model}
        elif model in service.models.policies:
            identity, what = service.models.policies[model].identity, {"base_model": model}
        else:
            identity, what = service.models.find(model).name, {"base_model": model}
        number = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:6], "big")
        body = schemas.CreateSamplingSessionBody(session_id=session, sampling_session_seq_id=number, **what)
        return service.sampling.get(service.sampling.create(caller, body), caller.owner)

    def _session(self, caller: Caller) -> str:
        """The session of an owner's requests; it gets a fair share like any other session."""
        session_id = f"openai-{caller.owner}"
        if self.service.store.session(session_id, caller.owner) is None:
            now = time.time()
            row = SessionRow(
                session_id=session_id,
                owner=caller.owner,
                created_at=now,
                last_seen_at=now,
                tags=["openai"],
                display_name="OpenAI-compatible endpoints",
            )
            self.service.store.put(row)
        return session_id

    async def _format(self, served: ServedModel, chat: ChatSettings) -> ChatFormat:
        """A base model with a chat format. Its tokenizer is loaded once, in another thread than the event loop's."""
        key = served.name, chat
        task = self._formats.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            work = asyncio.to_thread(_load_format, served, chat)
            task = self._formats[key] = asyncio.get_running_loop().create_task(work)
        return await asyncio.shield(task)

    def draw(
        self, talker: Talker, sample: SampleRequest, *, topk_sample_logprobs: int = 0, on_token: Any = None
    ) -> Promise:
        """Queue a request."""
        request = wire.ServedSample(sample=sample, topk_sample_logprobs=topk_sample_logprobs)
        num_bytes = 8 * len(sample.prompt) + 500
        return self.service.sampling.enqueue(
            talker.sampler, request, seq=next(self._numbers), num_bytes=num_bytes, on_token=on_token
        )

    async def result(self, promise: Promise, request: Request) -> SampleReply:
        """Wait for a request, at most until the deadline. If the client leaves, the request is cancelled."""
        gone = asyncio.ensure_future(_until_gone(request))
        done = asyncio.ensure_future(self.service.promises.wait(promise, DEADLINE_S))
        try:
            await asyncio.wait({gone, done}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            done.cancel()
            cancel(promise)
        if promise.is_done:
            return outcome_of(promise)
        if gone.done() and not gone.cancelled():
            raise HttpFailure(CLIENT_GONE, "the client left")
        if self.service.promises.is_closing:
            raise HttpFailure(503, "the server is shutting down; try again", headers={"retry-after": "5"})
        raise HttpFailure(504, f"no answer within {DEADLINE_S:g} s; send a shorter request")


class TokenFeed:
    """The tokens of one request as they are drawn. The event loop reads it; the engine's thread fills it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[DrawnToken | None] = asyncio.Queue()
        self._ahead: list[DrawnToken | None] = []

    def on_token(self, index: int, token: int, logprob: float) -> None:
        with suppress(RuntimeError):  # the server's event loop is closed, so nobody listens
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, token, logprob))

    async def follow(self, promise: Promise) -> None:
        """Wait for the first token or the end. Raises if the request was refused or failed."""
        if promise.is_done:
            self._queue.put_nowait(None)
        else:
            promise.on_done.append(lambda _: self._queue.put_nowait(None))
        try:
            async with asyncio.timeout(DEADLINE_S):
                self._ahead.append(await self._queue.get())
            if promise.is_done:
                outcome_of(promise)
        except TimeoutError as cause:
            raise HttpFailure(504, f"no token within {DEADLINE_S:g} s") from cause
        except asyncio.CancelledError:
            cancel(promise)
            raise

    async def tokens(self) -> AsyncIterator[DrawnToken]:
        while True:
            drawn = self._ahead.pop() if self._ahead else await self._queue.get()
            if drawn is None:
                return
            yield drawn


def cancel(promise: Promise) -> None:
    """Stop the sampling of a request that nobody waits for."""
    if not promise.is_done and promise.on_cancel is not None:
        promise.on_cancel()


def outcome_of(promise: Promise) -> SampleReply:
    outcome = promise.outcome
    promise.was_read = True
    failure = None if outcome is None else outcome.failure
    if failure is not None:
        raise HttpFailure(400 if failure.category == "user" else 500, failure.error)
    assert isinstance(outcome, SampleReply)
    return outcome


def sampling_params(
    body: Any, stop_ids: tuple[int, ...], max_tokens: int | None, stops: Sequence[str] = ()
) -> SamplingParams:
    """The sampling settings of the body, plus the chat format's end of turn and the run's own strings as stops."""
    settings: Mapping[str, Any] = {
        name: value for name in ("temperature", "top_p", "top_k", "min_p") if (value := getattr(body, name)) is not None
    }
    return SamplingParams(
        max_tokens=max_tokens, seed=body.seed, stop=[*body.stops(), *stops] or None, stop_token_ids=stop_ids, **settings
    )


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


def _no_model(model: str) -> HttpFailure:
    return HttpFailure(
        404,
        f"no model {model[:200]!r}; GET /v1/models lists base models, policies and your checkpoints (tinker:// paths)",
    )


def _load_format(served: ServedModel, chat: ChatSettings) -> ChatFormat:
    tokenizer = served.loaded.get_tokenizer()
    settings = {"multi_turn": chat.multi_turn, "strip_thinking": chat.strip_thinking}
    try:
        return ChatFormat(tokenizer, get_renderer(tokenizer, name=chat.renderer, **settings))
    except TurnwiseError as error:
        return ChatFormat(tokenizer, None, without_paths(str(error)))


async def get_gateway(request: Request) -> Gateway:
    state = request.app.state
    if getattr(state, "openai", None) is None or state.openai.service is not state.service:
        state.openai = Gateway(state.service)
    return state.openai


GatewayDep = Annotated[Gateway, Depends(get_gateway)]
