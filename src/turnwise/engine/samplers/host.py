"""An engine that samples for others: published weights by name, and calls about them."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.engine.learners.portable import portable
from turnwise.engine.samplers.calls import (
    CancelCall,
    FactsCall,
    GenerateCall,
    LoadCall,
    SamplerCall,
    SamplerFacts,
    UnloadCall,
)
from turnwise.engine.worker import EngineWorker

if TYPE_CHECKING:
    from turnwise.engine.engine import Engine
    from turnwise.engine.model.lora import Policy

QUEUE = "samplers"
"""The worker's queue for what is not sampling."""


class SamplerHost:
    """Answers calls with the engine of a worker, which may train beside. Any thread may call it."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker
        self._policies: dict[str, Policy] = {}

    def begin(self, call: SamplerCall) -> Future[Any]:
        """Begin to answer. Cancelling the future ends what was begun. `LookupError`: no such weights are here."""
        match call:
            case GenerateCall(request, name):
                return self._worker.sample(request, self._find(name))
            case LoadCall():
                return self._worker.run(QUEUE, lambda engine: self._load(engine, call))
            case UnloadCall(name):
                return self._worker.run(QUEUE, lambda _: self._policies.pop(name, None) and None)
            case FactsCall():
                return self._worker.run(QUEUE, _facts)

    def _find(self, name: str | None) -> Policy:
        if name is None:
            return self._worker.engine.base_policy
        if name not in self._policies:
            raise LookupError(f"the weights {name} are not loaded here")
        return self._policies[name]

    def _load(self, engine: Engine, call: LoadCall) -> None:
        if call.name in self._policies:
            return
        if call.files is None:
            policy = engine.load_policy(call.directory)
        else:
            with tempfile.TemporaryDirectory(prefix="turnwise-sampler-") as place:
                for name, content in call.files.items():
                    (Path(place) / name).write_bytes(content)
                policy = engine.load_policy(Path(place))
        engine.sampler.get_ready(policy)
        self._policies[call.name] = policy


def _facts(engine: Engine) -> SamplerFacts:
    return SamplerFacts(engine.vocab_size, engine.max_context_length)


def serve_samples(connection: Connection, host: SamplerHost) -> None:
    """Answer numbered calls until the other side hangs up. Answers come as they are ready, in any order."""
    sending, waiting = threading.Lock(), dict[int, Future[Any]]()

    def answer(number: int, kind: str, value: object) -> None:
        with sending:
            try:
                connection.send((number, kind, value))
            except OSError:
                return  # nobody listens any more

    def answer_when_done(number: int) -> Callable[[Future[Any]], None]:
        def is_done(future: Future[Any]) -> None:
            waiting.pop(number, None)
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                answer(number, "done", future.result())
            else:
                answer(number, "error", portable(error))

        return is_done

    while True:
        try:
            number, call = connection.recv()
        except (EOFError, OSError):
            return
        if isinstance(call, CancelCall):
            future = waiting.get(call.number)
            if future is not None:
                future.cancel()
            continue
        try:
            future = host.begin(call)
        except Exception as error:  # noqa: BLE001 - whoever called raises it
            answer(number, "error", portable(error))
            continue
        waiting[number] = future
        future.add_done_callback(answer_when_done(number))
