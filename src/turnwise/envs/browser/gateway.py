"""The only network of a browser: a proxy in this process that answers for the apps of its attempts, and nothing else.

Chromium is started with this proxy for every address, loopback included. A request for the host of an attempt is
answered by the app of that attempt, if it comes from the attempt's own browser context, which sends a secret with every
request. Anything else is refused. So a page can reach no other site, no service of this machine, and no other attempt.
A host is random and used once: nobody can guess it, and what a page stored under it, nobody sees again.
"""

from __future__ import annotations

import mimetypes
import secrets
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from turnwise.runtime.raised_at import describe_error

MAX_BODY = 4_000_000
"""Bytes of a request that an app gets."""
IDLE_S = 30.0
"""A connection that sends nothing for this long is closed."""
CONTEXT_HEADER = "X-Turnwise-Context"
"""Holds the secret of the browser context that a request comes from."""

_OFF_SITE = b"This address is blocked. Only the site of the task can be reached."


@dataclass(frozen=True, slots=True, kw_only=True)
class WebRequest:
    """What a browser asks of an app."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict[str, str])
    form: Mapping[str, str] = field(default_factory=dict[str, str])
    """The fields of a posted form. A field that comes twice has its last value."""
    files: Mapping[str, UploadedFile] = field(default_factory=dict[str, "UploadedFile"])


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedFile:
    """A file that a form sent. Its name is the sender's choice; never make a path of it."""

    name: str
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WebResponse:
    """An app's answer."""

    body: bytes = b""
    status: int = 200
    content_type: str = "text/html; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


class WebApp(Protocol):
    """A site. It answers one request at a time, from any thread."""

    def respond(self, request: WebRequest) -> WebResponse: ...


def file_below(folder: Path, name: str) -> Path | None:
    """The file of this name in a folder or below it. None if there is none, or if name or link lead out of it."""
    try:
        file = (folder / name).resolve()
        return file if file.is_relative_to(folder.resolve()) and file.is_file() else None
    except (OSError, ValueError):  # a name that no file can have: too long, or with a NUL
        return None


class FolderApp:
    """The files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    def respond(self, request: WebRequest) -> WebResponse:
        file = file_below(self._folder, request.path.lstrip("/"))
        if file is None:
            return WebResponse(status=404, body=b"no such file", content_type="text/plain")
        kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        return WebResponse(body=file.read_bytes(), content_type=kind, headers={"Cache-Control": "max-age=3600"})


@dataclass(kw_only=True)
class _Guest:
    """An app while its attempt goes on."""

    app: WebApp
    secret: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    problem: str | None = None


class SiteGateway:
    """The proxy. `admit` gives an app a host of its own."""

    def __init__(self) -> None:
        self._guests: dict[str, _Guest] = {}
        self._server = _ProxyServer(("127.0.0.1", 0), _ProxyHandler)
        self._server.gateway = self
        self._thread = threading.Thread(target=self._server.serve_forever, name="turnwise-gateway", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def admit(self, app: WebApp, name: str, secret: str) -> str:
        """Answer for this app from now on, to requests with this secret. Returns its host, `HEXDIGITS.shop.test`."""
        host = f"{secrets.token_hex(8)}.{name}.test"
        self._guests[host] = _Guest(app=app, secret=secret)
        return host

    def dismiss(self, host: str) -> None:
        self._guests.pop(host, None)

    def problem(self, host: str) -> str | None:
        """How the app of a host failed, if it did."""
        guest = self._guests.get(host)
        return guest.problem if guest is not None else None

    def answer(self, url: str, request: WebRequest, secret: str) -> WebResponse:
        host = urlsplit(url).hostname or ""
        guest = self._guests.get(host)
        if guest is None or not secrets.compare_digest(guest.secret.encode(), secret.encode()):
            return WebResponse(status=403, body=_OFF_SITE, content_type="text/plain")
        with guest.lock:
            try:
                return guest.app.respond(request)
            except Exception as error:  # noqa: BLE001 - `problem` reports it to whoever plays the attempt
                guest.problem = guest.problem or f"{request.method} {request.path}: {describe_error(error)}"
                return WebResponse(status=500, body=b"The site failed.", content_type="text/plain")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _ProxyServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    gateway: SiteGateway

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no news."""


class _ProxyHandler(BaseHTTPRequestHandler):
    server: _ProxyServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = IDLE_S

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_CONNECT(self) -> None:
        self._send(WebResponse(status=403, body=_OFF_SITE, content_type="text/plain"))  # no app speaks TLS or sockets

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if length > MAX_BODY:
            self._send(WebResponse(status=413, body=b"too large", content_type="text/plain"))
            return
        body = self.rfile.read(length)
        parts = urlsplit(self.path)
        form, files = _read_form(self.headers.get("Content-Type", ""), body)
        request = WebRequest(
            method=self.command,
            path=unquote(parts.path) or "/",
            query=dict(parse_qsl(parts.query, keep_blank_values=True)),
            form=form,
            files=files,
        )
        self._send(self.server.gateway.answer(self.path, request, self.headers.get(CONTEXT_HEADER, "")))

    def _send(self, response: WebResponse) -> None:
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        for name, value in {"Cache-Control": "no-store", **response.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)


def _read_form(kind: str, body: bytes) -> tuple[dict[str, str], dict[str, UploadedFile]]:
    if kind.startswith("application/x-www-form-urlencoded"):
        return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True)), {}
    form: dict[str, str] = {}
    files: dict[str, UploadedFile] = {}
    if kind.startswith("multipart/form-data"):
        message = message_from_bytes(b"Content-Type: " + kind.encode("latin-1", "replace") + b"\r\n\r\n" + body)
        for part in message.walk():
            field_name = part.get_param("name", header="content-disposition")
            content = part.get_payload(decode=True)
            if not isinstance(field_name, str) or not isinstance(content, bytes):
                continue
            if (file_name := part.get_filename()) is not None:
                files[field_name] = UploadedFile(name=file_name, content=content)
            else:
                form[field_name] = content.decode("utf-8", "replace")
    return form, files
