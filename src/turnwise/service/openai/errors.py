"""Errors and callers as OpenAI clients know them: `{"error": {...}}` bodies, and keys in an Authorization header."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any, cast

from fastapi import Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from turnwise.errors import CheckpointError, TurnwiseError
from turnwise.service.access import Caller
from turnwise.service.failures import HttpFailure, without_paths
from turnwise.service.service import Service
from turnwise.service.wire.screen import InvalidBodyError

_TYPES: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES: Mapping[int, str] = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded", 504: "timeout"}


def error_json(status: int, message: str, param: str | None = None) -> dict[str, object]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": _CODES.get(status)}}


class AsciiJson(JSONResponse):
    """JSON in ASCII. A client or a model may write half a surrogate pair, which cannot be encoded as UTF-8."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class OpenAIRoute(APIRoute):
    """A route whose failures have the body that OpenAI's clients read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                if self.body_field is not None:
                    service: Service = request.app.state.service
                    schema = cast(type[BaseModel], self.body_field.field_info.annotation)
                    await service.screen.check(schema, await request.body())
                return await handler(request)
            except InvalidBodyError as error:
                return _invalid(error)
            except HttpFailure as error:
                body = error_json(error.status, error.detail, getattr(error, "param", None))
                return AsciiJson(body, error.status, headers=error.headers)
            except RequestValidationError as error:
                return _invalid(error)
            except TurnwiseError as error:
                status = 404 if isinstance(error, CheckpointError) else 400
                param = getattr(error, "param", None)
                return AsciiJson(error_json(status, without_paths(str(error)), param), status)
            except HTTPException as error:
                return AsciiJson(error_json(error.status_code, str(error.detail)), error.status_code)

        return answer


def _invalid(error: RequestValidationError | InvalidBodyError) -> AsciiJson:
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(place)[:200] or None
    if first["type"] == "extra_forbidden":
        message = f"unknown parameter {param!r}; leave it out"
    elif first["type"] == "json_invalid":
        message = "the body is no JSON"
    else:
        message = f"{param or 'the body'}: {str(first['msg'])[:300]}"
    return AsciiJson(error_json(400, message, param), 400)


async def get_caller(request: Request) -> Caller:
    """The caller whose key was sent as `Authorization: Bearer KEY` or `X-API-Key: KEY`."""
    service: Service = request.app.state.service
    kind, _, credential = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not credential.strip():
        credential = request.headers.get("x-api-key", "")
    return service.access.caller(credential.strip() or None)


KeyHolder = Annotated[Caller, Depends(get_caller)]
