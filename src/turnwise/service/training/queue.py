"""The order of training requests: by sequence number within a model, fairly between sessions, together where possible.

A model's requests run in the order of their sequence numbers, in whatever order they arrive. The queue waits for a
missing number and skips it if it does not come: its request was refused, or its client gave up. A number that comes
again gets its old promise. The engine has one request at a time and one waiting behind it. If there is a choice, the
session that has used the engine least goes next. Batches of other models with the same loss settings share its passes.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from turnwise.engine.worker import EngineWorker, Steps, in_one_step
from turnwise.errors import TurnwiseError
from turnwise.service.failures import to_failure
from turnwise.service.futures import Promise, Promises, QueueState
from turnwise.service.wire.results import JsonReply, RequestFailure, RequestOutcome
from turnwise.service.wire.types import TrainingBatch
from turnwise.types import ForwardBackwardOutput

if TYPE_CHECKING:
    from turnwise.engine.engine import Engine

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 2
MAX_SHARED = 16
"""Most models in one shared batch."""
MAX_REMEMBERED = 10_000
SHARED_TOKENS = 8192
"""A batch with more tokens than this does not share its passes."""
CLOSE_S = 10.0
"""Seconds that `close` waits for the engine's current work."""
OP_COST = 64
"""The cost of an operation without tokens, in tokens; it is charged to the session."""


@dataclass(slots=True, eq=False, kw_only=True)
class Operation:
    """One training request of one model."""

    begin: Callable[[Engine], Steps]
    """The work that runs on the engine's thread."""
    promise: Promise | None = None
    """None for operations of the service itself."""
    finish: Callable[[Any], RequestOutcome] = lambda _: JsonReply({})
    """Turns the engine's value into the client's result; runs on the event loop, and may record what was done."""
    batch: TrainingBatch | None = None
    """The batch of a forward_backward, which may share passes with other models; else None."""
    adapter: Callable[[Engine], Any] | None = None
    """The adapter that `batch` trains, on the engine's thread."""
    prepare: Callable[[], None] | None = None
    """Runs on the event loop when the operation gets its place behind all that was handed over before it; what it
    raises fails the request."""
    needs_quiet: bool = False
    """Wait until the model's earlier requests are finished: what they recorded is read by `prepare`."""
    cost: float = OP_COST
    runs_alone: bool = False


@dataclass(slots=True, eq=False)
class Lane:
    """The requests of one model."""

    model_id: str
    session_id: str
    worker: EngineWorker
    next_seq: int = 1
    max_seen: int = 0
    waiting: dict[int, Operation] = field(default_factory=dict)
    """Sequence number -> a request whose turn has not come."""
    after: list[tuple[int, Operation]] = field(default_factory=list)
    """Requests without a number: each runs after everything that had come before it."""
    urgent: list[Operation] = field(default_factory=list)
    """Operations of the service itself; they go before any request."""
    request_ids: dict[int, str] = field(default_factory=dict)
    """Sequence number -> its request, to answer a repeated submission; the newest `MAX_REMEMBERED`."""
    in_flight: int = 0
    is_shared: bool = False
    """Its operation is in a shared batch at the engine. The batch may have to run again, so nothing may follow yet."""
    gap: asyncio.TimerHandle | None = None
    last_used: float = 0.0

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.after or self.urgent or self.in_flight)

    def remember(self, seq: int, request_id: str) -> None:
        self.request_ids[seq] = request_id
        if len(self.request_ids) > MAX_REMEMBERED:
            del self.request_ids[next(iter(self.request_ids))]

    def head(self) -> Operation | None:
        """Return the operation that may run next; None if there is none."""
        if self.is_shared:
            return None
        if self.urgent:
            operation = self.urgent[0]
        elif self.after and self.after[0][0] < self.next_seq:
            operation = self.after[0][1]
        else:
            operation = self.waiting.get(self.next_seq)
        return None if operation is not None and operation.needs_quiet and self.in_flight else operation

    def pop(self) -> Operation:
        if self.urgent:
            return self.urgent.pop(0)
        if self.after and self.after[0][0] < self.next_seq:
            return self.after.pop(0)[1]
        operation = self.waiting.pop(self.next_seq)
        self.next_seq += 1
        return operation


class FairShare:
    """Chooses the session that was charged least. A session gets no credit for the time when it sent nothing."""

    def __init__(self) -> None:
        self._charged: dict[str, float] = {}

    def choose(self, candidates: Iterable[str]) -> str:
        known = list(dict.fromkeys(candidates))
        floor = min((self._charged[name] for name in known if name in self._charged), default=0.0)
        for name in known:
            self._charged[name] = max(self._charged.get(name, floor), floor)
        return min(known, key=lambda name: self._charged[name])

    def charge(self, name: str, cost: float) -> None:
        self._charged[name] = self._charged.get(name, 0.0) + cost

    def keep_only(self, names: Iterable[str]) -> None:
        """Forget sessions without waiting requests; the charges of the others start from the least of them."""
        kept = {name: self._charged[name] for name in names if name in self._charged}
        floor = min(kept.values(), default=0.0)
        self._charged = {name: charged - floor for name, charged in kept.items()}


class TrainingQueue:
    """Hands the operations of all models of one engine to its worker."""

    def __init__(self, worker: EngineWorker, promises: Promises, *, gap_s: float) -> None:
        self._worker = worker
        self._promises = promises
        self._gap_s = gap_s
        self._lanes: dict[str, Lane] = {}
        self._share = FairShare()
        self._in_flight = 0
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Start no more operations, and let the engine finish the current ones; the rest stays in the journal."""
        self._is_closed = True
        for lane in self._lanes.values():
            if lane.gap is not None:
                lane.gap.cancel()
        until = self._loop.time() + CLOSE_S
        while self._in_flight and self._loop.time() < until:
            await asyncio.sleep(0.01)

    def lane(self, model_id: str, session_id: str) -> Lane:
        if model_id not in self._lanes:
            self._lanes[model_id] = Lane(model_id, session_id, self._worker)
        return self._lanes[model_id]

    def lanes(self) -> Mapping[str, Lane]:
        return self._lanes

    def submit(self, lane: Lane, seq: int | None, operation: Operation) -> None:
        """Queue a request. The caller must have checked for a repeated `seq`."""
        if operation.promise is not None:
            operation.promise.why_waiting = lambda: self._why_waiting(lane, operation)
        lane.last_used = self._loop.time()
        if seq is None:
            lane.after.append((lane.max_seen, operation))
        elif seq < lane.next_seq:
            self._settle(operation, _too_late(seq))
            return
        else:
            lane.max_seen = max(lane.max_seen, seq)
            lane.waiting[seq] = operation
        self._watch_gap(lane)
        self._pump()

    def skip(self, lane: Lane, seq: int | None) -> None:
        """Skip a number whose request was refused."""
        if seq is not None and seq >= lane.next_seq and seq not in lane.waiting:
            lane.max_seen = max(lane.max_seen, seq)
            lane.waiting[seq] = Operation(promise=None, begin=in_one_step(lambda _: None))
            self._watch_gap(lane)
            self._pump()

    def submit_own(self, lane: Lane, operation: Operation) -> None:
        """Run an operation of the service itself before the model's next request."""
        lane.urgent.append(operation)
        self._pump()

    def _watch_gap(self, lane: Lane) -> None:
        """Start the clock when a request waits for a number that has not come; stop it when it has."""
        is_gap = bool(lane.waiting) and lane.next_seq not in lane.waiting
        if not is_gap and lane.gap is not None:
            lane.gap.cancel()
            lane.gap = None
        elif is_gap and lane.gap is None:
            lane.gap = self._loop.call_later(self._gap_s, self._close_gap, lane)

    def _close_gap(self, lane: Lane) -> None:
        lane.gap = None
        if lane.waiting and lane.next_seq not in lane.waiting:
            first = min(lane.waiting)
            log.warning(
                "%s: request %d to %d never came; going on with %d", lane.model_id, lane.next_seq, first - 1, first
            )
            lane.next_seq = first
        self._watch_gap(lane)
        self._pump()

    def _why_waiting(self, lane: Lane, operation: Operation) -> tuple[QueueState, str | None]:
        if lane.waiting and lane.next_seq not in lane.waiting and operation in lane.waiting.values():
            return "active", f"waiting for request {lane.next_seq} of this client, which has not arrived"
        busy = sum(1 for other in self._lanes.values() if other is not lane and not other.is_idle)
        if operation is lane.head() and busy:
            return "paused_capacity", f"{busy} other training clients are being served in turn"
        return "active", None

    def _pump(self) -> None:
        while self._in_flight < MAX_IN_FLIGHT and not self._is_closed:
            ready = [lane for lane in self._lanes.values() if lane.head() is not None]
            if not ready:
                if not self._in_flight:
                    self._share.keep_only(())
                return
            session = self._share.choose(lane.session_id for lane in ready)
            lane = next(lane for lane in ready if lane.session_id == session)
            self._lanes[lane.model_id] = self._lanes.pop(lane.model_id)  # the session's other models go first next time
            group = self._shared_batch(lane, ready)
            if self._is_prepared(*group):
                self._dispatch(group)

    def _is_prepared(self, *group: tuple[Lane, Operation]) -> bool:
        """Prepare the chosen operations and say whether they may run; only a single one can need preparation."""
        operation = group[0][1]
        if operation.prepare is not None:
            try:
                operation.prepare()
            except (TurnwiseError, OSError, sqlite3.Error) as error:
                self._settle(operation, to_failure(error))
                return False
        return True

    def _shared_batch(self, first: Lane, ready: Sequence[Lane]) -> list[tuple[Lane, Operation]]:
        """Take the chosen model's operation, and batches of other models that fit into the same passes."""
        operation = first.pop()
        self._watch_gap(first)
        chosen = [(first, operation)]
        if operation.batch is None or operation.runs_alone or operation.batch.num_tokens > SHARED_TOKENS:
            return chosen
        num_tokens = operation.batch.num_tokens
        for lane in ready:
            head = lane.head()
            if lane is first or head is None or head.batch is None or head.runs_alone:
                continue
            is_alike = head.batch.loss_key == operation.batch.loss_key
            if is_alike and num_tokens + head.batch.num_tokens <= SHARED_TOKENS and len(chosen) < MAX_SHARED:
                chosen.append((lane, lane.pop()))
                num_tokens += head.batch.num_tokens
                self._watch_gap(lane)
        return chosen

    def _dispatch(self, group: list[tuple[Lane, Operation]]) -> None:
        self._in_flight += 1
        for lane, operation in group:
            lane.in_flight += 1
            lane.is_shared = len(group) > 1
            lane.last_used = self._loop.time()
            self._share.charge(lane.session_id, operation.cost)
        begin = group[0][1].begin if len(group) == 1 else _begin_together([operation for _, operation in group])
        future = self._worker.run_steps("service", begin)
        future.add_done_callback(lambda done: self._loop.call_soon_threadsafe(self._finish, group, done))

    def _finish(self, group: list[tuple[Lane, Operation]], done: Future[Any]) -> None:
        self._in_flight -= 1
        for lane, _ in group:
            lane.in_flight -= 1
            lane.is_shared = False
            lane.last_used = self._loop.time()
        error = done.exception()
        if error is not None and len(group) > 1:
            # Run the batches one by one, so that only the bad one fails. The engine kept no gradient of any of them.
            for lane, operation in group:
                operation.runs_alone = True
                lane.urgent.insert(0, operation)
        elif error is not None:
            self._settle(group[0][1], to_failure(error))
        else:
            values = [done.result()] if len(group) == 1 else done.result()
            for (_, operation), value in zip(group, values, strict=True):
                self._complete(operation, value)
        self._pump()

    def _complete(self, operation: Operation, value: Any) -> None:
        outcome: RequestOutcome = RequestFailure("internal error; the server's log tells more", "server")
        try:
            outcome = operation.finish(value)
        except (TurnwiseError, OSError, sqlite3.Error) as error:
            outcome = to_failure(error)
        finally:  # in any case, no client is left waiting
            self._settle(operation, outcome)

    def _settle(self, operation: Operation, outcome: RequestOutcome) -> None:
        if operation.promise is not None:
            self._promises.settle(operation.promise, outcome)
        elif outcome.failure is not None:
            log.warning("background work failed: %s", outcome.failure.error)


def _begin_together(operations: Sequence[Operation]) -> Callable[[Engine], Steps]:
    """Run several models' batches as one operation; returns one output per model."""
    first = operations[0].batch
    assert first is not None

    def begin(engine: Engine) -> Steps[list[ForwardBackwardOutput]]:
        batches: list[tuple[Any, Any]] = []
        for operation in operations:
            assert operation.batch is not None
            assert operation.adapter is not None
            batches.append((operation.adapter(engine), operation.batch.datums))
        return (yield from engine.forward_backward_many(batches, first.loss_fn, first.loss_fn_config))

    return begin


def _too_late(seq: int) -> RequestFailure:
    return RequestFailure(
        f"request {seq} came after the server had stopped waiting for it; it was not applied", "server"
    )
