"""Reads large bodies in a process of its own before anybody here does.

Reading JSON holds Python's lock from the first byte to the last, in a thread too. 20 MB of garbage would keep every
other request waiting for half a second, and a body that is wrong in a million places for a minute. So a body of more
than `LARGE_BODY` goes to another process first, which says what is wrong with it; only a body that fits its schema is
read here. All lists of the schemas stop at their first wrong item (`schemas.Items`).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from turnwise.errors import TurnwiseError
from turnwise.service.failures import HttpFailure
from turnwise.service.wire import types as wire

LARGE_BODY = 1 << 20
"""Bytes of a body from which on another process reads it first: 50 ms of reading."""
MAX_DETAILS = 20
"""Most mistakes of a body that an error lists."""


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
        """The mistakes, in the form of pydantic's own errors."""
        return self.mistakes.details


class BodyScreen:
    """The other process. It starts with `start`, or else with the first large body, and ends with the service."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def start(self) -> None:
        """Let the process start now, so that the first large body does not wait for its imports."""
        self._open().submit(os.getpid)

    def _open(self) -> ProcessPoolExecutor:
        if self._pool is None:  # spawned, because a fork of a process with an engine in it is not safe
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=_end_with_the_server)
        return self._pool

    async def check(self, schema: type[BaseModel], body: bytes) -> None:
        """Raise `InvalidBodyError` if a large body does not fit; small ones are left to the caller."""
        if len(body) <= LARGE_BODY:
            return
        mistakes = await self._ask(find_mistakes, schema, body)
        if mistakes is not None:
            raise InvalidBodyError(mistakes)

    async def check_protobuf(self, body: bytes) -> None:
        """The same for a training request in protobuf; reading one holds Python's lock too."""
        if len(body) > LARGE_BODY and (mistakes := await self._ask(find_proto_mistake, body)) is not None:
            raise InvalidBodyError(mistakes)

    async def _ask(self, question: Callable[..., Any], *values: Any) -> Any:
        body: bytes = values[-1]
        try:
            return await asyncio.get_running_loop().run_in_executor(self._open(), question, *values)
        except BrokenProcessPool as cause:
            self.close()
            raise HttpFailure(413, f"the body of {len(body)} bytes could not be read; send less at once") from cause

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def _end_with_the_server() -> None:
    """In the other process: Ctrl-C is the server's to obey, and a server that was killed leaves nobody behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = multiprocessing.parent_process()
    if server is not None:

        def follow() -> None:
            server.join()
            os._exit(0)

        threading.Thread(target=follow, name="follow the server", daemon=True).start()


def find_mistakes(schema: type[BaseModel], body: bytes) -> Mistakes | None:
    """In the other process: what is wrong with a body; None if it fits."""
    try:
        schema.model_validate_json(body)
    except ValidationError as error:
        has_sender = {"model_id", "seq_id"} <= set(schema.model_fields)
        return Mistakes(details=to_details(error), sender=wire.read_json_sender(body) if has_sender else None)
    return None


def find_proto_mistake(body: bytes) -> Mistakes | None:
    """In the other process: why a protobuf `ForwardBackwardRequest` cannot be used; None if it can."""
    try:
        wire.decode_forward_backward(body)
    except TurnwiseError as error:
        detail = {"loc": ["body"], "msg": str(error)[:300], "type": "value_error"}
        return Mistakes(details=[detail], sender=wire.read_proto_sender(body))
    return None


def to_details(error: Any) -> list[dict[str, Any]]:
    """The first mistakes, without what was sent: that may be large."""
    kept = {"include_input": False, "include_url": False, "include_context": False}
    found = error.errors(**kept) if isinstance(error, ValidationError) else error.errors()
    return [
        {"loc": [str(part)[:100] for part in item["loc"]], "msg": str(item["msg"])[:300], "type": item["type"]}
        for item in found[:MAX_DETAILS]
    ]
