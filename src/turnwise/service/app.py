"""The web application: routers, limits on callers and bodies, and the answers to failures."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from turnwise import __version__
from turnwise.client.engines import LoadedModel
from turnwise.errors import CheckpointError, TurnwiseError
from turnwise.runtime.network import is_on_this_machine
from turnwise.service.config import ServeConfig
from turnwise.service.failures import HttpFailure, log, log_internal, without_paths
from turnwise.service.metrics import add_metrics
from turnwise.service.named_policies import NamedPolicy
from turnwise.service.openai import routes as openai
from turnwise.service.routes import mint, rest, sampling, sessions, training
from turnwise.service.service import Service
from turnwise.service.store.store import Store
from turnwise.service.wire.screen import LARGE_BODY, InvalidBodyError, to_details

LARGE_ROUTES = ("/forward_backward", "/forward", "/asample", "/forward_backward_reverse_kl", "/completions")
"""How the paths end whose bodies may have `max_body_bytes`; what others send is bounded by `LARGE_BODY`, so that
reading it takes no time that another request would notice."""
MIDDLE_ROUTES = {"/retrieve_futures": 8 * LARGE_BODY}
"""Paths with a bound of their own: a hundred thousand names."""


def create_app(
    config: ServeConfig, store: Store, models: Mapping[str, LoadedModel], policies: Sequence[NamedPolicy] = ()
) -> FastAPI:
    """Create the application; its service starts and ends with the server's event loop."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = app.state.service = Service(config, store, models, policies)
        service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(title="turnwise", version=__version__, lifespan=lifespan, redoc_url=None)
    # The most frequent routes come first, because a request is compared with the routes in this order.
    for router in (sampling.router, training.router, sessions.router, rest.router, mint.router, openai.router):
        app.include_router(router)
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    add_metrics(app)
    app.add_middleware(Gate, config=config)
    return app


class Gate:
    """The outermost layer: limits bodies, refuses foreign hosts if no key is needed, and answers 500 for our bugs."""

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        has_started = False

        async def watched_send(message: Message) -> None:
            nonlocal has_started
            has_started = has_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, self._bounded(receive, self._limit(scope)), watched_send)
        except _BodyTooLargeError:
            await _too_large(self._limit(scope))(scope, receive, send)
        except ClientDisconnect:
            return  # the client is gone
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - our bug: the client learns its name, the log the rest
            name = log_internal(error)
            if not has_started:
                await _json(500, f"internal error {name}")(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> JSONResponse | None:
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            return _json(400, "content-length is no number")
        if int(length) > (limit := self._limit(scope)):
            return _too_large(limit)
        # Without keys, a web page must not reach this service through a host name that resolves to this machine.
        service: Service | None = getattr(scope["app"].state, "service", None) if "app" in scope else None
        if service is not None and service.access.is_open:
            host = headers.get(b"host", b"").decode("latin-1")
            if not is_on_this_machine(host):
                return _json(403, "without API keys this service answers on localhost only")
        return None

    def _limit(self, scope: Scope) -> int:
        """Most bytes of this request's body."""
        path, most = scope["path"], self._config.max_body_bytes
        if path.endswith(LARGE_ROUTES):
            return most
        return min(most, next((size for end, size in MIDDLE_ROUTES.items() if path.endswith(end)), LARGE_BODY))

    def _bounded(self, receive: Receive, limit: int) -> Receive:
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise _BodyTooLargeError
            return message

        return bounded


def _too_large(limit: int) -> JSONResponse:
    return _json(413, f"the body is larger than {limit} bytes")


class _BodyTooLargeError(Exception):
    """A body without a declared length is larger than allowed."""


def _json(status: int, detail: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": detail}, status_code=status, headers=dict(headers or {}))


async def _on_failure(_: Request, error: Any) -> JSONResponse:
    return _json(error.status, error.detail, error.headers)


async def _on_known_error(_: Request, error: Any) -> JSONResponse:
    status = 404 if isinstance(error, CheckpointError) else 400
    return _json(status, without_paths(str(error)))


async def _on_invalid(_: Request, error: Any) -> JSONResponse:
    return JSONResponse({"detail": to_details(error)}, status_code=422)


async def _on_http_error(_: Request, error: Any) -> JSONResponse:
    return _json(error.status_code, str(error.detail), error.headers)


async def _on_storage_error(_: Request, error: Any) -> JSONResponse:
    log.error("the store failed: %s", error)
    return _json(
        503, "the server cannot write to its disk right now; nothing was changed, try again", {"retry-after": "5"}
    )


_HANDLERS: Mapping[Any, Callable[..., Any]] = {
    HttpFailure: _on_failure,
    TurnwiseError: _on_known_error,
    RequestValidationError: _on_invalid,
    ValidationError: _on_invalid,
    InvalidBodyError: _on_invalid,
    HTTPException: _on_http_error,
    sqlite3.Error: _on_storage_error,
}
