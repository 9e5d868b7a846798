"""The page about the service names every endpoint that there is."""

from __future__ import annotations

from pathlib import Path

from fastapi.routing import APIRoute

from turnwise.service.routes import mint, rest, sampling, sessions, training
from unit.service.conftest import Serve

PAGE = Path(__file__).parents[3] / "docs" / "service.md"


def test_every_endpoint_is_in_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    routes = [route for module in (mint, rest, sampling, sessions, training) for route in module.router.routes]
    for route in routes:
        assert isinstance(route, APIRoute)
        path = route.path.removeprefix("/api/v1")
        tail = path.removeprefix(rest.CHECKPOINT)
        named = f"{path}`" if tail == path else f"{tail}`"
        assert named in text or f"{path}`" in text, f"{route.methods} {path} is not in docs/service.md"


async def test_the_openapi_document_describes_the_bodies(serve: Serve) -> None:
    async with serve() as wire:
        document = (await wire.http.get("/openapi.json")).json()
        assert (await wire.http.get("/docs")).status_code == 200
    body = document["paths"]["/api/v1/forward_backward"]["post"]["requestBody"]["content"]
    assert set(body) == {"application/json", "application/x-protobuf"}
    assert "forward_backward_input" in body["application/json"]["schema"]["properties"]
