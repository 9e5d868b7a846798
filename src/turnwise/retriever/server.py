"""The retriever over HTTP.

    POST /retrieve  {"query": "Anna Belford", "topk": 3, "return_scores": true}
                    {"result": [[{"document": {"id": "7", "contents": "..."}, "score": 4.2}, ...]]}
    GET  /health    {"status": "ok", "index": "bm25", "documents": 280}

`query` is one text or a list; `queries`, a list, means the same. `result` has one list per query, best passage first.
Without `return_scores` the passages stand alone: {"result": [[{"id": ..., "contents": ...}]]}.

Every request has limits: its bytes, its queries, their length, `topk`, and its time. A refused request is answered with
a sentence under `detail`. No answer names a file of this machine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from turnwise.errors import ConfigError
from turnwise.retriever.corpus import Hit
from turnwise.retriever.index import CorpusIndex

Json = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of one request."""

    default_topk: int = 10
    max_topk: int = 100
    max_queries: int = 256
    max_query_chars: int = 2000
    max_body_bytes: int = 1 << 20
    deadline_s: float = 20.0
    """Time limit from the first byte to the answer."""
    num_threads: int = 4

    def __post_init__(self) -> None:
        for name in ("default_topk", "max_topk", "max_queries", "max_query_chars", "max_body_bytes", "num_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; expected at least 1")
        if self.deadline_s <= 0:
            raise ConfigError(f"deadline_s={self.deadline_s:g}; expected more than 0 seconds")
        if self.default_topk > self.max_topk:
            raise ConfigError(f"default_topk={self.default_topk} is more than max_topk={self.max_topk}")


class RetrieveRequest(BaseModel):
    """The body of /retrieve. Unknown keys, which other clients send, are ignored."""

    model_config = ConfigDict(extra="ignore")

    query: str | list[str] | None = None
    queries: list[str] | None = None
    topk: int | None = Field(default=None, ge=1)
    return_scores: bool = True


def make_app(index: CorpusIndex, limits: ServerLimits | None = None) -> FastAPI:
    """Make the application. It owns its threads from start-up to shutdown."""
    limits = limits or ServerLimits()
    pool = ThreadPoolExecutor(limits.num_threads, thread_name_prefix="turnwise-retriever")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Bounded, limits=limits)
    app.add_exception_handler(RequestValidationError, _explain_refusal)

    @app.get("/health", response_model=None)
    async def health() -> Json:
        return {"status": "ok", "index": index.kind, "documents": len(index.corpus.documents)}

    @app.post("/retrieve", response_model=None)
    async def retrieve(request: RetrieveRequest) -> Json:
        queries, topk = _read_queries(request, limits), request.topk or limits.default_topk
        if topk > limits.max_topk:
            raise HTTPException(422, f"topk: {topk} is too many; at most {limits.max_topk}")
        found = await _search(pool, index, queries, topk)
        return {"result": [[_hit_to_json(hit, request.return_scores) for hit in hits] for hits in found]}

    return app


def _read_queries(request: RetrieveRequest, limits: ServerLimits) -> list[str]:
    if (request.query is None) == (request.queries is None):
        raise HTTPException(422, 'expected one of "query" (text or a list) and "queries" (a list)')
    given = request.query if request.query is not None else request.queries
    queries = [given] if isinstance(given, str) else list(given or [])
    if not 1 <= len(queries) <= limits.max_queries:
        raise HTTPException(422, f"queries: {len(queries)} came; expected 1 to {limits.max_queries}")
    longest = max(len(query) for query in queries)
    if longest > limits.max_query_chars:
        raise HTTPException(422, f"query: {longest} characters are too many; at most {limits.max_query_chars}")
    if not all(query.strip() for query in queries):
        raise HTTPException(422, "query: it is empty; expected words to look for")
    return queries


async def _search(pool: ThreadPoolExecutor, index: CorpusIndex, queries: Sequence[str], topk: int) -> list[list[Hit]]:
    """Search in a thread. A cancelled request stops after its current query."""
    is_given_up = threading.Event()

    def search_all() -> list[list[Hit]]:
        return [index.search(query, topk) for query in queries if not is_given_up.is_set()]

    try:
        return await asyncio.get_running_loop().run_in_executor(pool, search_all)
    finally:
        is_given_up.set()


def _hit_to_json(hit: Hit, with_score: bool) -> Json:
    document: Json = {"id": hit.document.id, "contents": hit.document.contents}
    return {"document": document, "score": hit.score} if with_score else document


async def _explain_refusal(_: Request, error: Exception) -> JSONResponse:
    """Say where in the body the mistake is. The body itself is not sent back."""
    assert isinstance(error, RequestValidationError)
    problems = [f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()[:5]]
    return JSONResponse({"detail": "; ".join(problems)}, status_code=422)


class Bounded:
    """ASGI middleware that answers 413 to a body that is too large, and 504 to a request that takes too long."""

    def __init__(self, app: Callable[..., Awaitable[None]], limits: ServerLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Json, receive: Callable[[], Awaitable[Json]], send: Callable[..., Any]) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def note_and_send(message: Json) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            async with asyncio.timeout(self._limits.deadline_s):
                await self._app(scope, self._bounded(scope, receive), note_and_send)
        except TimeoutError:
            if has_begun:
                raise  # a part of the answer was sent; all we can do is close the connection
            late = JSONResponse({"detail": f"no answer within {self._limits.deadline_s:g} s"}, status_code=504)
            await late(scope, receive, send)

    def _bounded(self, scope: Json, receive: Callable[[], Awaitable[Json]]) -> Callable[[], Awaitable[Json]]:
        """Wrap `receive` to count bytes. If the announced length is too large, refuse at once."""
        too_large = f"the body is too large; at most {self._limits.max_body_bytes} bytes"
        num_bytes = 0
        announced = dict(scope["headers"]).get(b"content-length", b"0")

        async def receive_some() -> Json:
            nonlocal num_bytes
            if announced.isdigit() and int(announced) > self._limits.max_body_bytes:
                raise HTTPException(413, too_large)
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._limits.max_body_bytes:
                raise HTTPException(413, too_large)
            return message

        return receive_some
