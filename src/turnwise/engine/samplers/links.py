"""A sampler in another process, seen from the run: calls go out, answers come back in any order.

A link never starts a sampler again: its owner makes another link when this one is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, Protocol

from turnwise.engine.learners.group import ProcessPeer, start_process
from turnwise.engine.samplers.calls import CancelCall, SamplerCall, SamplerSetup
from turnwise.engine.samplers.host import SamplerHost

MODULE = "turnwise.engine.samplers.process"


class SamplerLink(Protocol):
    """The way to one sampler. `OSError` in an answer means that the sampler is gone."""

    @property
    def name(self) -> str:
        """Its name in messages, such as "process 123"."""
        ...

    @property
    def is_gone(self) -> bool: ...

    @property
    def sees_files(self) -> bool:
        """Whether it reads the files of this machine."""
        ...

    def call(self, call: SamplerCall | SamplerSetup) -> Future[Any]:
        """Begin a call, without blocking. Cancelling its future ends it in the sampler too."""
        ...

    def why(self) -> str:
        """How it ended, with the last lines of its output."""
        ...

    def end(self) -> None:
        """End the sampler, if this link started it."""
        ...


class DirectLink:
    """The engine of this process."""

    name = "this process"
    is_gone = False
    sees_files = True

    def __init__(self, host: SamplerHost) -> None:
        self._host = host

    def call(self, call: SamplerCall | SamplerSetup) -> Future[Any]:
        assert not isinstance(call, SamplerSetup), "its engine is loaded"
        try:
            return self._host.begin(call)
        except Exception as error:  # noqa: BLE001 - an answer, as from another process
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def why(self) -> str:
        return "is this process"

    def end(self) -> None:
        """Do nothing: the run's engine ends with the run."""


class PipeLink:
    """A sampler at the other end of a connection. One thread writes, so that no caller waits; another one reads."""

    sees_files = True

    def __init__(
        self, connection: Connection, name: str, *, why: Callable[[], str], end: Callable[[], None] = lambda: None
    ) -> None:
        self.name, self.why, self._end = name, why, end
        self._connection = connection
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._is_gone = False
        self._outbox: queue.SimpleQueue[tuple[int, object] | None] = queue.SimpleQueue()
        for work in (self._write, self._read):
            threading.Thread(target=work, name=f"turnwise sampler {name}", daemon=True).start()

    @property
    def is_gone(self) -> bool:
        return self._is_gone

    def call(self, call: SamplerCall | SamplerSetup) -> Future[Any]:
        number, future = next(self._numbers), Future[Any]()
        with self._lock:
            if not self._is_gone:
                self._waiting[number] = future
        if number not in self._waiting:
            future.set_exception(OSError(self.why()))
            return future
        future.add_done_callback(lambda done: self._forget(number) if done.cancelled() else None)
        self._outbox.put((number, call))
        return future

    def end(self) -> None:
        self._lose()
        self._end()

    def _forget(self, number: int) -> None:
        if self._waiting.pop(number, None) is not None:
            self._outbox.put((number, CancelCall(number)))

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                self._lose()
            except Exception as error:  # noqa: BLE001 - a call that cannot be pickled fails alone
                self._settle(message[0], error)

    def _read(self) -> None:
        try:
            while True:
                number, kind, value = self._connection.recv()
                self._settle(number, value, is_error=kind == "error")
        except (EOFError, OSError):
            self._lose()

    def _settle(self, number: int, value: Any, *, is_error: bool = True) -> None:
        future = self._waiting.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if is_error:
            future.set_exception(value)
        else:
            future.set_result(value)

    def _lose(self) -> None:
        """Fail all calls under way, because the sampler is gone."""
        with self._lock:
            if self._is_gone:
                return
            self._is_gone = True
        self._outbox.put(None)
        why = self.why()
        for number in list(self._waiting):
            self._settle(number, OSError(why))


def start_sampler(number: int, environment: Mapping[str, str]) -> PipeLink:
    """Start a sampler on this machine. Its first call is its set-up."""
    peer = start_process(number, environment, module=MODULE)
    assert isinstance(peer, ProcessPeer)

    def end() -> None:
        with contextlib.suppress(OSError):
            peer.hang_up()
        peer.kill()
        peer.end()

    return PipeLink(peer.connection, peer.name, why=lambda: f"{peer.name} {peer.why()}", end=end)
