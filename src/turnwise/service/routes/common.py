"""What every router uses: the caller, the body with its size limit, and the answer that holds a request's id."""

from __future__ import annotations

from typing import Annotated, Any

import zstandard
from fastapi import Depends, Request
from fastapi.responses import JSONResponse

from turnwise.runtime.network import is_loopback
from turnwise.service.access import Caller
from turnwise.service.failures import HttpFailure
from turnwise.service.service import Service
from turnwise.service.wire import schemas
from turnwise.service.wire import types as wire

PREFIX = "/api/v1"


async def get_service(request: Request) -> Service:
    return request.app.state.service


async def get_caller(request: Request) -> Caller:
    service: Service = request.app.state.service
    return service.access.caller(request.headers.get("x-api-key"))


ServiceDep = Annotated[Service, Depends(get_service)]
CallerDep = Annotated[Caller, Depends(get_caller)]


async def read_body(request: Request, limit: int) -> bytes:
    """Read the body, and decompress it if it was sent with zstd. `Gate` has limited the size of what arrives."""
    body = await request.body()
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise HttpFailure(415, f"content-encoding {encoding[:50]!r} is not supported; expected zstd or none")
    reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body)
    try:
        data = reader.read(limit + 1)
    except zstandard.ZstdError as cause:
        raise HttpFailure(400, "the body is no zstd frame") from cause
    if len(data) > limit:
        raise HttpFailure(413, f"the body is larger than {limit} bytes once decompressed")
    return data


def inline_schema(body: type[schemas.Body]) -> dict[str, Any]:
    """Return a model's JSON schema with all references resolved."""

    def resolve(node: Any, definitions: dict[str, Any]) -> Any:
        if isinstance(node, list):
            return [resolve(item, definitions) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolve(definitions[node["$ref"].rpartition("/")[2]], definitions)
        return {key: resolve(value, definitions) for key, value in node.items() if key != "$defs"}

    schema = body.model_json_schema()
    return resolve(schema, schema.get("$defs", {}))


def documented(body: type[schemas.Body], *, protobuf: str | None = None) -> dict[str, Any]:
    """Describe, for the OpenAPI document, a body that the route reads itself."""
    content: dict[str, Any] = {wire.JSON: {"schema": inline_schema(body)}}
    if protobuf is not None:
        content[wire.PROTOBUF] = {"schema": {"type": "string", "format": "binary", "title": protobuf}}
    return {"requestBody": {"required": True, "content": content}}


def promised(request_id: str, **more: Any) -> JSONResponse:
    """Answer a submission with the id of its request."""
    return JSONResponse({"request_id": request_id, **more})


def is_local(request: Request) -> bool:
    """Whether the client runs on this machine, and can read its files."""
    return request.client is not None and is_loopback(request.client.host)
