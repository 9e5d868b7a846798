"""The service's answers when something goes wrong.

`HttpFailure` ends a call with a status; a `RequestFailure` is the result of a request that was accepted and went wrong.
Messages are for the user of the client: they contain no path of this machine and no traceback.
"""

from __future__ import annotations

import logging
import re
import sqlite3
import uuid

from turnwise.errors import EngineStoppedError, TurnwiseError
from turnwise.service.wire.results import RequestFailure

log = logging.getLogger("turnwise.service")

_PATH = re.compile(r"(?<![\w:/.])(?:/[^\s/:;,'\"]+){2,}/?")
"""An absolute path of this machine; `tinker://...` is none."""


class HttpFailure(TurnwiseError):  # noqa: N818
    """Answered at once, with a status and a JSON body."""

    def __init__(self, status: int, detail: str, *, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers or {}


def not_found(what: str) -> HttpFailure:
    """One answer for what does not exist and for what belongs to another key."""
    return HttpFailure(404, f"{what} not found")


def session_finished() -> HttpFailure:
    """The answer to a request after its session's end; SDKs do not repeat such a request."""
    return HttpFailure(400, "this session is finished; nothing more is accepted for it, create another")


def to_failure(error: BaseException) -> RequestFailure:
    """Turn an error into the answer that the client gets."""
    if isinstance(error, HttpFailure):
        return RequestFailure(error.detail, "user" if error.status < 500 else "server")
    if isinstance(error, EngineStoppedError):
        return RequestFailure("the engine stopped before this request was done", "server", is_final=False)
    if isinstance(error, TurnwiseError):
        return RequestFailure(without_paths(str(error)), "user")
    if isinstance(error, sqlite3.Error) or (isinstance(error, OSError) and error.errno is not None):
        log.error("a request failed on disk: %s", error)
        reason = error.strerror if isinstance(error, OSError) else error
        return RequestFailure(f"the server could not use its disk ({reason}); nothing was changed, try again", "server")
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return RequestFailure("the device ran out of memory for this request; send shorter or fewer datums", "server")
    return RequestFailure(f"internal error {log_internal(error)}; the server's log tells more", "server")


def log_internal(error: BaseException) -> str:
    """Log an unexpected error; returns the error id that the client is told."""
    name = uuid.uuid4().hex[:8]
    log.error("internal error %s", name, exc_info=error)
    return name


def without_paths(text: str) -> str:
    """Cut every absolute path in a text to its last part."""
    return _PATH.sub(lambda found: found.group().rstrip("/").rpartition("/")[2], text)
