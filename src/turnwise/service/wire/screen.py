"""Reads large JSON bodies in a process of its own before anybody here does.

Reading JSON holds Python's lock from the first byte to the last, in a thread too. 20 MB of garbage would keep every
other request waiting for half a second, and a body that is wrong in a million places for a minute. So a body of more
than `LARGE_BODY` goes to another process first, which says what is wrong with it; only a body that fits its schema is
read here. All lists of the schemas stop at their first wrong item (`schemas.Items`).
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from turnwise.service.failures import HttpFailure
from turnwise.service.wire import types as wire

LARGE_BODY = 1 << 20
"""Bytes of a body from which on another process reads it first: 50 ms of reading."""
MAX_DETAILS = 20
"""Mistakes of a body that are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistakes:
    """What is wrong with a body, and who sent it where that can be read."""

    details: Sequence[dict[str, Any]]
    sender: tuple[str, int] | None = None


class InvalidBodyError(Exception):
    """A large body that does not fit its schema."""

    def __init__(self, mistakes: Mistakes) -> None:
        super().__init__(f"{len(mistakes.details)} mistakes")
        self.mistakes = mistakes

    def errors(self) -> Sequence[dict[str, Any]]:
        """As pydantic's own errors have them."""
        return self.mistakes.details


class BodyScreen:
    """The other process. It starts with the first large body and ends with the service."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    async def check(self, schema: type[BaseModel], body: bytes) -> None:
        """Raise `InvalidBodyError` if a large body does not fit; small ones are left to the caller."""
        if len(body) <= LARGE_BODY:
            return
        if self._pool is None:  # spawned, because a fork of a process with an engine in it is not safe
            self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        try:
            mistakes = await asyncio.get_running_loop().run_in_executor(self._pool, find_mistakes, schema, body)
        except BrokenProcessPool as cause:
            self.close()
            raise HttpFailure(413, f"the body of {len(body)} bytes could not be read; send less at once") from cause
        if mistakes is not None:
            raise InvalidBodyError(mistakes)

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def find_mistakes(schema: type[BaseModel], body: bytes) -> Mistakes | None:
    """In the other process: what is wrong with a body; None if it fits."""
    try:
        schema.model_validate_json(body)
    except ValidationError as error:
        has_sender = {"model_id", "seq_id"} <= set(schema.model_fields)
        return Mistakes(details=to_details(error), sender=wire.read_json_sender(body) if has_sender else None)
    return None


def to_details(error: Any) -> list[dict[str, Any]]:
    """The first mistakes, without what was sent: that may be large."""
    kept = {"include_input": False, "include_url": False, "include_context": False}
    found = error.errors(**kept) if isinstance(error, ValidationError) else error.errors()
    return [
        {"loc": [str(part)[:100] for part in item["loc"]], "msg": str(item["msg"])[:300], "type": item["type"]}
        for item in found[:MAX_DETAILS]
    ]
