"""The server of the page: answers for those who have the token, and files without data for everybody.

The token travels in a header of its own, never in a cookie, so that another site cannot make a browser send it. Hosts
are checked too: a name that an attacker points at this machine is refused (DNS rebinding). Nothing that a model or an
env wrote reaches HTML: the page puts texts into the document as text, and the policy below forbids inline scripts.
"""

from __future__ import annotations

import asyncio
import hmac
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from turnwise.errors import TurnwiseError
from turnwise.runtime.network import is_on_this_machine
from turnwise.view.orders import resume_run, steer_run, stop_run
from turnwise.view.pages import Pages
from turnwise.view.runs import UNREADABLE, json_ready

STATIC = Path(__file__).parent / "static"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".woff2": "font/woff2", "": "text/plain"}
MAX_BODY = 10_000


def create_view_app(pages: Pages, token: str, *, is_local: bool) -> FastAPI:
    """The app.

    Args:
        is_local: Whether the server is for this machine alone. Then it refuses a request that names another host: a web
            page could point a name of its own at this machine.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    files = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.is_file()}

    @app.middleware("http")
    async def guard(request: Request, call_next: Any) -> Response:
        host = request.headers.get("host", "")
        if is_local and not is_on_this_machine(host):
            return _refused(403, f"this server answers for this machine alone, not for {host!r}")
        if request.url.path.startswith("/api/") and not _has_token(request, token):
            return _refused(401, "the token is missing or wrong; open the address that `turnwise view` printed")
        response: Response = await call_next(request)
        for name, value in HEADERS.items():
            response.headers[name] = value
        return response

    @app.get("/")
    def shell() -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html")

    @app.get("/static/{name:path}")
    def static(name: str) -> Response:
        if name not in files:
            return _refused(404, f"no file {name!r}")
        path = files[name]
        return FileResponse(path, media_type=TYPES.get(path.suffix, "application/octet-stream"))

    @app.get("/api/{question}")
    def ask(question: str, request: Request) -> Response:
        if question not in pages.answers:
            return _refused(404, f"no question {question!r}")
        try:
            return JSONResponse(json_ready(pages.answers[question](dict(request.query_params))))
        except UNREADABLE as error:
            return _refused(400, str(error))

    @app.post("/api/{order}")
    async def order(order: str, request: Request) -> Response:
        if int(request.headers.get("content-length") or 0) > MAX_BODY:
            return _refused(413, f"expected at most {MAX_BODY} bytes")
        try:
            body = await request.json()
            said = await asyncio.to_thread(_obey, pages, order, body)
        except (TurnwiseError, ValueError, OSError, AttributeError, TypeError) as error:
            return _refused(400, str(error))
        return JSONResponse({"said": said})

    return app


def _obey(pages: Pages, order: str, body: dict[str, Any]) -> str:
    directory = pages.directory(str(body.get("run")))
    if order == "stop":
        return stop_run(directory, now=body.get("now") is True)
    if order == "steer":
        return steer_run(directory, str(body.get("setting")))
    if order == "resume":
        return resume_run(directory, [str(text) for text in body.get("overrides") or []])
    raise ValueError(f"no order {order!r}; expected stop, steer or resume")


def _has_token(request: Request, token: str) -> bool:
    given = request.headers.get("x-turnwise-token", "")
    return hmac.compare_digest(given.encode(), token.encode())


def _refused(status: int, why: str) -> JSONResponse:
    return JSONResponse({"error": why}, status_code=status, headers=HEADERS)
