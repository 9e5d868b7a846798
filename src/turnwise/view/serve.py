"""Starts the server of the page, prints its address, opens a browser, and ends at Ctrl-C."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError
from turnwise.runtime.network import is_loopback, open_port
from turnwise.view.pages import Pages

PORT = 8642
"""The first port that is tried."""
TRIES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewOptions:
    """Options of `turnwise view`."""

    place: Path
    host: str = "127.0.0.1"
    port: int | None = None
    """None: the first free one from `PORT` on."""
    opens_browser: bool = True


def serve_view(options: ViewOptions) -> None:
    """Serve until interrupted."""
    try:
        import fastapi  # noqa: F401
        import uvicorn
    except ImportError as cause:
        raise ConfigError(
            f"{cause.name} is missing; install what the viewer needs: pip install 'turnwise[service]'"
        ) from cause
    from turnwise.view.app import create_view_app

    pages = open_pages(options.place)
    listener = _listen(options)
    token = secrets.token_urlsafe(24)
    is_local = is_loopback(options.host)
    app = create_view_app(pages, token, is_local=is_local)
    host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listener.getsockname()[1]}/?token={token}"

    class ViewServer(uvicorn.Server):
        """Prints its address when it is ready."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            if self.started:
                _announce(url, pages, is_local=is_local, opens_browser=options.opens_browser)

    settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2, ws="none")
    try:
        ViewServer(settings).run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn has closed everything, and raises the signal again
        pass
    finally:
        pages.close()
    print("closed; runs go on as they are", file=sys.stderr)


def open_pages(place: Path) -> Pages:
    """The pages over a directory. Raises ConfigError with what to do where there is no run."""
    if not place.exists():
        raise ConfigError(f"{place} is not there; give a run directory, or a directory with runs below it")
    pages = Pages(place)
    if not pages.folder.directories():
        raise ConfigError(
            f"{place} holds no run; train one first: turnwise train guess_number model=tiny, or give another directory"
        )
    return pages


def _announce(url: str, pages: Pages, *, is_local: bool, opens_browser: bool) -> None:
    count = len(pages.folder.directories())
    print(f"{count} run{'s' if count != 1 else ''} below {pages.folder.shown_place}", file=sys.stderr)
    if not is_local:
        print("other machines can reach this; anyone with the address can stop and steer runs", file=sys.stderr)
    print(f"open {url}", file=sys.stderr)
    print("Ctrl-C ends the viewer", file=sys.stderr, flush=True)
    if opens_browser and _has_browser():
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()


def _has_browser() -> bool:
    """Whether a window can be opened. A text browser would take the terminal over, so it does not count."""
    if sys.platform == "darwin":
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or os.environ.get("BROWSER"))


def _listen(options: ViewOptions) -> socket.socket:
    """The port that was asked for, or else the first free one."""
    ports = range(PORT, PORT + TRIES) if options.port is None else [options.port]
    problem: Any = None
    for port in ports:
        try:
            return open_port(options.host, port, backlog=128)
        except OSError as cause:
            problem = cause
    which = f"{options.host}:{options.port}" if options.port is not None else f"{options.host}, ports {PORT} and after"
    raise ConfigError(f"cannot listen on {which} ({problem.strerror}); choose another --port, or 0 for any free one")
