"""JSON over HTTP to one server, with a deadline for every call and the server's own words in every error."""

from __future__ import annotations

import asyncio
from typing import Any

from turnwise.errors import ConfigError, ServiceError
from turnwise.runtime.network import tls_context

MAX_WORDS = 400
"""Characters of a server's answer that an error quotes."""
KEY_VARIABLE = "TURNWISE_SERVER_KEY"
"""The environment variable with the API key of the servers at `rollout.url`. A key is never part of a config."""


class ServerGoneError(ServiceError):
    """A server did not answer, answered too late, failed inside, or lost what it had loaded: another one may do it."""

    def __init__(self, message: str, status: int | None = None, *, is_unreachable: bool = False) -> None:
        super().__init__(message)
        self.status = status
        """The status of its answer; None if there was no answer."""
        self.is_unreachable = is_unreachable
        """Whether nothing listens at its address."""


class ServerLateError(ServerGoneError):
    """A server gave no reply in time. It hangs, or it is slow."""


class ServerKeyError(ServerGoneError, ConfigError):
    """A server takes requests with an API key only, and ours is missing or another one."""


class ServerRefusedError(ServiceError):
    """A server answered that it will not do this; another server of the same kind would say the same."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def is_unreachable(error: Exception) -> bool:
    """Nothing listens there: a process that comes back is another one, and is awake."""
    return isinstance(error, ServerGoneError) and error.is_unreachable


def is_stuck(error: Exception) -> bool:
    """Something listens there, and does not do what it is asked."""
    return isinstance(error, TimeoutError | ServerGoneError) and not is_unreachable(error)


class JsonServer:
    """One server's connections. Use it from one event loop."""

    def __init__(self, url: str, *, key: str = "") -> None:
        """Args:
        key: The API key that goes with every request; none for a server that wants none.
        """
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client: Any = None
        self._is_closed = False

    async def get(self, path: str, *, deadline_s: float) -> Any:
        """Ask, and return the JSON that comes back; text that is no JSON comes back as text."""
        return await self._ask("GET", path, None, deadline_s)

    async def post(self, path: str, body: Any = None, *, deadline_s: float) -> Any:
        """Send JSON, and return the JSON that comes back; text that is no JSON comes back as text."""
        return await self._ask("POST", path, body, deadline_s)

    async def close(self) -> None:
        """Close the connections. A request that comes later is refused: nobody would close a new connection."""
        self._is_closed = True
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()

    async def _ask(self, method: str, path: str, body: Any, deadline_s: float) -> Any:
        httpx, address = _httpx(), f"{self.url}{path}"
        if self._is_closed:
            raise ServerGoneError(f"{address}: the connections to this server are closed")
        if self._client is None:
            self._client = _make_client(httpx, self.url)
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._client.request(method, address, json=body, headers=self._headers)
        except TimeoutError as cause:
            raise ServerGoneError(f"{address}: no answer within {deadline_s:g} s") from cause
        except (httpx.HTTPError, httpx.InvalidURL) as cause:
            words = f"{address}: {type(cause).__name__} ({str(cause)[:MAX_WORDS]})"
            raise ServerGoneError(words, is_unreachable=isinstance(cause, httpx.ConnectError)) from cause
        if response.status_code >= 500 or response.status_code in (408, 429):
            words = _words(response.text)
            raise ServerGoneError(f"{address}: status {response.status_code}: {words}", response.status_code)
        if response.status_code == 401:
            why = f"does not take the key in {KEY_VARIABLE}" if self._headers else "wants an API key"
            raise ServerKeyError(f"{address}: the server {why}; set the environment variable {KEY_VARIABLE} to its key")
        if response.status_code >= 300:
            words = _words(response.text)
            raise ServerRefusedError(f"{address}: status {response.status_code}: {words}", response.status_code)
        try:
            return response.json()
        except ValueError:
            return response.text


def _words(text: str) -> str:
    """The start of an answer, in one line."""
    return " ".join(text.split())[:MAX_WORDS]


def _httpx() -> Any:
    try:
        import httpx2
    except ImportError as cause:
        raise ConfigError("sampling on a server needs the package httpx2: pip install 'turnwise[servers]'") from cause
    return httpx2


def _make_client(httpx: Any, url: str) -> Any:
    """A client without a limit of its own: the fleet decides how many requests a server gets, and for how long."""
    verify = tls_context() if url.startswith("https") else False
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(timeout=None, limits=limits, verify=verify, trust_env=False)
