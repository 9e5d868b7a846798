"""The client of a retriever server, for an agent's searches.

If a server is busy, broken or not reachable, the client tries again a few times, within one deadline. After that it
raises `AttemptFailed`, which blames the tool, so that the attempt is recorded but not scored.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from turnwise.errors import AttemptFailed, ConfigError, Party
from turnwise.retriever.corpus import Document, Hit
from turnwise.runtime.network import tls_context

MAX_ANSWER_BYTES = 8 << 20
BACK_OFF_S = 0.2
"""Wait n times this before try n + 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrieverClient:
    """Asks one retriever server. It holds no connection, so any number of attempts and event loops may share it."""

    url: str
    """`http://host:port`, with or without /retrieve."""
    deadline_s: float = 10.0
    """Time limit of one search, with all tries."""
    max_tries: int = 3

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"retriever_url={self.url!r}; expected an address such as http://127.0.0.1:8000")
        if self.deadline_s <= 0:
            raise ConfigError(f"deadline_s={self.deadline_s:g}; expected more than 0 seconds")
        if self.max_tries < 1:
            raise ConfigError(f"max_tries={self.max_tries}; expected at least 1")

    @property
    def address(self) -> str:
        base = self.url.rstrip("/")
        return base if base.endswith("/retrieve") else f"{base}/retrieve"

    async def search(self, query: str, topk: int) -> list[Hit]:
        """Find at most `topk` passages, best first."""
        request = {"query": query, "topk": topk, "return_scores": True}
        problem = "it was not reached"
        deadline = asyncio.timeout(self.deadline_s)
        try:
            async with deadline:
                for number in range(1, self.max_tries + 1):
                    status, text = await self._post(request)
                    if status == 200:
                        return _read_hits(text, topk)
                    problem = f"status {status}: {text[:200]}" if status else text
                    if status and status != 429 and status < 500:
                        break  # a second try would be refused too
                    if number < self.max_tries:
                        await asyncio.sleep(number * BACK_OFF_S)
        except TimeoutError as cause:
            if not deadline.expired():
                raise
            raise AttemptFailed(Party.TOOL, f"retriever: no answer within {self.deadline_s:g} s; {problem}") from cause
        raise AttemptFailed(Party.TOOL, f"retriever: {problem}")

    async def _post(self, request: dict[str, Any]) -> tuple[int, str]:
        """Send one request. Return status and text of the answer; status 0 if there was no answer."""
        httpx = _httpx()
        try:
            # Ignore the proxies of the environment, because the user named this address.
            async with (
                httpx.AsyncClient(timeout=self.deadline_s, verify=tls_context(), trust_env=False) as client,
                client.stream("POST", self.address, json=request) as response,
            ):
                body = bytearray()
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > MAX_ANSWER_BYTES:
                        return 502, f"the answer has more than {MAX_ANSWER_BYTES} bytes"
                return response.status_code, body.decode("utf-8", errors="replace")
        except httpx.HTTPError as cause:
            return 0, f"{type(cause).__name__} at {self.address}"


def _read_hits(text: str, topk: int) -> list[Hit]:
    try:
        (rows,) = json.loads(text)["result"]
        hits = [_read_hit(row) for row in rows]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as cause:
        expected = '{"result": [[{"document": {"contents": ...}, "score": ...}]]}'
        raise AttemptFailed(Party.TOOL, f"retriever: it answered {text[:120]!r}; expected {expected}") from cause
    return hits[:topk]


def _read_hit(row: Any) -> Hit:
    document = row["document"]
    if not isinstance(document["contents"], str):
        raise TypeError("contents")
    identifier = str(document.get("id", document["contents"][:40]))
    return Hit(document=Document(id=identifier, contents=document["contents"]), score=float(row.get("score", 0.0)))


def _httpx() -> Any:
    try:
        import httpx2
    except ImportError as cause:
        raise ConfigError("a retriever address needs the package httpx2: pip install 'turnwise[retriever]'") from cause
    return httpx2
