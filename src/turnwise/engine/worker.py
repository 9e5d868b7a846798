"""The one thread that owns an engine, and with it the device.

Everything above the engine posts its work here and gets a `concurrent.futures.Future` back. Training operations are
queued by client: each client's operations run in the order they came, and clients take turns. Sampling shares the
device with the running operation: after each micro-batch the sampler runs for as long as the micro-batch took (at least
one step), so neither waits for the other to finish.

Callers share only the inbox with the thread; every other field belongs to the thread. A request is settled exactly
once: with its result, with its own error, or with `EngineStoppedError` when the worker is closed or dies.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from turnwise.errors import EngineStoppedError
from turnwise.types import SampleRequest, SampleResponse

if TYPE_CHECKING:
    from turnwise.engine.engine import Engine
    from turnwise.engine.model.lora import Policy
    from turnwise.engine.sampling.requests import OnToken

T = TypeVar("T")
Steps = Generator[None, None, T]
"""An operation that yields between its micro-batches and returns its result."""

EXIT_JOIN_S = 10.0
"""Seconds that the interpreter waits at exit for a micro-batch that is still running."""

_log = logging.getLogger(__name__)


class _WorkerFuture(Future[T]):
    """A future that refuses to be waited for on the worker's own thread, which would wait forever."""

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__()
        self._thread = thread

    def result(self, timeout: float | None = None) -> T:
        if threading.current_thread() is self._thread and not self.done():
            raise RuntimeError(
                "a custom loss or a callback waits for another request to the same engine, on the engine's own thread; "
                "make that request before, and pass its result in"
            )
        return super().result(timeout)


@dataclass(slots=True, eq=False)
class _Operation:
    """One training operation, waiting for its client's turn."""

    queue_id: str
    begin: Callable[[Engine], Steps[Any]]
    future: Future[Any]


@dataclass(slots=True, eq=False)
class _Sample:
    """One sampling request, from its arrival to its last token."""

    request: SampleRequest
    policy: Policy
    future: Future[Any]
    pick: Callable[[SampleResponse], Any]
    """The part of the response that the future gets."""
    on_token: OnToken | None = None
    request_id: int | None = None
    """The sampler's id for this request, after it was handed over."""


@dataclass(slots=True, eq=False)
class _CancelSample:
    sample: _Sample


class _Close:
    """Asks the thread to stop at the next micro-batch or decode step."""


def in_one_step(work: Callable[[Engine], T]) -> Callable[[Engine], Steps[T]]:
    """An operation that runs without a break, as `EngineWorker.run_steps` takes it."""

    def begin(engine: Engine) -> Steps[T]:
        yield from ()
        return work(engine)

    return begin


class EngineWorker:
    """Runs training operations and sampling requests on an engine of its own.

    The worker's thread loads the engine. The constructor waits for it and raises its error.
    """

    def __init__(self, load: Callable[[], Engine], *, name: str) -> None:
        self.name = name
        self._inbox: queue.SimpleQueue[_Operation | _Sample | _CancelSample | _Close] = queue.SimpleQueue()
        self._stopped: Callable[[], EngineStoppedError] | None = None
        self._queues: OrderedDict[str, deque[_Operation]] = OrderedDict()
        self._running: tuple[_Operation, Steps[Any]] | None = None
        self._samples: set[_Sample] = set()
        self._is_closing = False
        loaded: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._main, args=(load, loaded), name=f"engine {name}", daemon=True)
        self._thread.start()
        self.engine = self._wait_for(loaded)
        """Use it for constants (`arch`, `vocab_size`, ...); call `run` for anything that computes."""
        atexit.register(self._close_at_exit)

    def _wait_for(self, loaded: Future[Engine]) -> Engine:
        try:
            return loaded.result()
        except BaseException:
            self._inbox.put(_Close())  # if the caller is interrupted, nobody will close the worker later
            raise

    @property
    def is_stopped(self) -> bool:
        return self._stopped is not None

    def run(self, queue_id: str, work: Callable[[Engine], T]) -> Future[T]:
        """Queue an operation that runs without a break."""
        return self.run_steps(queue_id, in_one_step(work))

    def run_steps(self, queue_id: str, begin: Callable[[Engine], Steps[T]]) -> Future[T]:
        """Queue an operation that yields between its micro-batches; the sampler runs in the gaps."""
        future: Future[T] = _WorkerFuture(self._thread)
        self._post(_Operation(queue_id, begin, future))
        return future

    def sample(
        self, request: SampleRequest, policy: Policy, *, on_token: OnToken | None = None
    ) -> Future[SampleResponse]:
        """Queue a sampling request; cancelling its future stops the sampling.

        Args:
            on_token: called on this worker's thread with every token as it is drawn: sample, token, logprob. It must
                be quick and must not raise.
        """
        future: Future[SampleResponse] = _WorkerFuture(self._thread)
        self._post_sample(_Sample(request, policy, future, _whole, on_token))
        return future

    def compute_logprobs(self, prompt: Sequence[int], policy: Policy) -> Future[list[float | None]]:
        """Queue the scoring of a prompt: the logprob of each of its tokens, None for the first."""
        future: Future[list[float | None]] = _WorkerFuture(self._thread)
        self._post_sample(_Sample(SampleRequest.scoring(prompt), policy, future, _prompt_logprobs))
        return future

    def _post_sample(self, sample: _Sample) -> None:
        def cancel(done: Future[Any]) -> None:
            if done.cancelled():
                self._inbox.put(_CancelSample(sample))

        sample.future.add_done_callback(cancel)
        self._post(sample)

    def close(self, timeout_s: float | None = None) -> None:
        """Stop: fail all waiting requests with `EngineStoppedError`, close the engine and join the thread."""
        atexit.unregister(self._close_at_exit)
        self._inbox.put(_Close())
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _close_at_exit(self) -> None:
        self.close(EXIT_JOIN_S)

    def _post(self, message: _Operation | _Sample) -> None:
        self._inbox.put(message)
        # The thread sets `_stopped` before it empties the inbox for the last time: either it saw this message, or
        # this line sees that it stopped.
        if self._stopped is not None:
            self._fail_inbox(self._stopped)

    # Everything below runs on the worker's thread, except `_fail_inbox`.

    def _main(self, load: Callable[[], Engine], loaded: Future[Engine]) -> None:
        try:
            engine = load()
        except BaseException as error:  # noqa: BLE001 - raised by the constructor
            self._stop(partial(_died, self.name, error))
            loaded.set_exception(error)
            return
        loaded.set_result(engine)
        stopped: Callable[[], EngineStoppedError] = partial(_closed, self.name)
        try:
            self._serve(engine)
        except BaseException as error:  # noqa: BLE001 - raised to everybody who waits
            _log.exception("the engine worker of %s died", self.name)
            _release_frames(error)
            stopped = partial(_died, self.name, error)
        steps = self._stop(stopped)
        try:
            if steps is not None:
                steps.close()
            engine.close()
        except Exception:  # noqa: BLE001 - nobody waits any more
            _log.exception("closing the engine of %s failed", self.name)

    def _serve(self, engine: Engine) -> None:
        while not self._is_closing:
            is_idle = self._running is None and not self._queues and not engine.sampler.has_work
            self._admit(engine, block=is_idle)
            spent_s = self._train_one_step(engine)
            self._sample_for(engine, spent_s)

    def _admit(self, engine: Engine, *, block: bool) -> None:
        """Read the inbox; with `block`, wait for the first message."""
        try:
            while not self._is_closing:
                self._take(engine, self._inbox.get(block=block))
                block = False
        except queue.Empty:
            return

    def _take(self, engine: Engine, message: _Operation | _Sample | _CancelSample | _Close) -> None:
        match message:
            case _Operation():
                self._queues.setdefault(message.queue_id, deque()).append(message)
            case _Sample():
                self._start_sample(engine, message)
            case _CancelSample(sample) if sample in self._samples:
                self._samples.discard(sample)
                sample.future.set_running_or_notify_cancel()
                if sample.request_id is not None:
                    engine.sampler.cancel(sample.request_id)
            case _CancelSample():
                pass  # it was done, or never handed over
            case _Close():
                self._is_closing = True

    def _start_sample(self, engine: Engine, sample: _Sample) -> None:
        if sample.future.cancelled():
            sample.future.set_running_or_notify_cancel()
            return
        self._samples.add(sample)
        on_done = partial(self._finish_sample, sample)
        try:
            sample.request_id = engine.sampler.submit(
                sample.request, sample.policy, on_done=on_done, on_token=sample.on_token
            )
        except Exception as error:  # noqa: BLE001 - it is the requester's
            self._finish_sample(sample, error)

    def _finish_sample(self, sample: _Sample, outcome: SampleResponse | BaseException) -> None:
        if sample in self._samples:  # else it was cancelled
            self._samples.discard(sample)
            if isinstance(outcome, BaseException):
                _fail(sample.future, outcome)
            elif sample.future.set_running_or_notify_cancel():
                sample.future.set_result(sample.pick(outcome))

    def _train_one_step(self, engine: Engine) -> float:
        """Run one micro-batch of the running operation, or of the next one; return the seconds it took."""
        started_s = time.perf_counter()
        operation = self._running[0] if self._running else self._next_operation()
        if operation is None:
            return 0.0
        try:
            if self._running is None:
                self._running = (operation, operation.begin(engine))
            next(self._running[1])
            if engine.sampler.has_work:  # it is to get as long as this really took
                engine.wait()
        except StopIteration as done:
            self._running = None
            operation.future.set_result(done.value)
        except BaseException as error:  # noqa: BLE001 - it is the caller's, raised by its future
            self._running = None
            _release_frames(error)
            operation.future.set_exception(error)
        return time.perf_counter() - started_s

    def _next_operation(self) -> _Operation | None:
        """The next client's oldest operation that was not cancelled; the client goes to the end of the queue."""
        while self._queues:
            queue_id, waiting = self._queues.popitem(last=False)
            operation = waiting.popleft()
            if waiting:
                self._queues[queue_id] = waiting
            if operation.future.set_running_or_notify_cancel():
                return operation
        return None

    def _sample_for(self, engine: Engine, duration_s: float) -> None:
        """Run the sampler for `duration_s` (at least one step) while it has work; new requests join between steps."""
        until_s = time.perf_counter() + duration_s
        while engine.sampler.has_work and not self._is_closing:
            engine.sample_step()
            self._admit(engine, block=False)
            if time.perf_counter() >= until_s:
                return

    def _stop(self, error: Callable[[], EngineStoppedError]) -> Steps[Any] | None:
        """Fail everything that waits or is still to come; return the operation that was interrupted."""
        self._stopped = error
        running, self._running = self._running, None
        if running is not None:
            running[0].future.set_exception(error())
        for waiting in self._queues.values():
            for operation in waiting:
                _fail(operation.future, error())
        self._queues.clear()
        for sample in list(self._samples):
            self._finish_sample(sample, error())
        self._fail_inbox(error)
        return running[1] if running is not None else None

    def _fail_inbox(self, error: Callable[[], EngineStoppedError]) -> None:
        try:
            while True:
                message = self._inbox.get_nowait()
                if isinstance(message, _Operation | _Sample):
                    _fail(message.future, error())
        except queue.Empty:
            return


def _whole(response: SampleResponse) -> SampleResponse:
    return response


def _prompt_logprobs(response: SampleResponse) -> list[float | None]:
    assert response.prompt_logprobs is not None, "the sampler was asked for them"
    return list(response.prompt_logprobs)


def _fail(future: Future[Any], error: BaseException) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)


def _release_frames(error: BaseException | None) -> None:
    """Clear the frames of an error's traceback, so that whoever keeps the error does not keep tensors alive."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _closed(name: str) -> EngineStoppedError:
    return EngineStoppedError(f"the engine of {name} was closed; create a new client to go on")


def _died(name: str, cause: BaseException) -> EngineStoppedError:
    error = EngineStoppedError(f"the engine of {name} stopped on an unexpected error: {cause!r}")
    error.__cause__ = cause
    return error
