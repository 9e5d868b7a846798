"""A thread beside the event loop that writes the run's status, takes orders, and notices a blocked event loop.

Code that computes for too long, or a disk that does not answer, blocks the loop; then only another thread can tell.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from turnwise.runlog import writer
from turnwise.runlog.schema import DATABASE
from turnwise.runtime.pending_calls import PENDING_CALLS, PendingCall
from turnwise.training.loop import Loop
from turnwise.training.steer import Order, take_orders
from turnwise.watch.interrupt import Interrupted
from turnwise.watch.observer import ObserverError
from turnwise.watch.status import SHOWN_CALLS, ShownCall, Status, memory_mb, write_status
from turnwise.watch.watchdog import StalledError

BEAT_S = 0.25
STATUS_EVERY_S = 1.0
BLOCKED_TOLD_S = 10.0
"""Report an event loop that has been blocked for this long."""
WRITER_FILE = Path(writer.__file__)
HARD_STOP_S = 10.0
"""A hard stop ends the process after this long, even if the event loop has not."""


def waiting_text(reason: str, calls: Sequence[PendingCall]) -> str:
    """What a run waits for, in words: the loop's reason and the oldest call, or one of them where they are the same."""
    if not calls:
        return ""
    oldest = str(calls[0])
    return oldest if not reason or calls[0].is_reason or oldest.startswith(reason) else f"{reason}; longest: {oldest}"


class Heartbeat:
    """Watches one training loop; use it as an async context manager around the loop's run."""

    def __init__(self, loop: Loop, on_stuck: Callable[[StalledError], None]) -> None:
        """Start nothing yet.

        Args:
            on_stuck: Called in the heartbeat's thread when the event loop has been blocked for `train.call_deadline_s`.
        """
        setup = loop.setup
        self._loop = loop
        self._directory = setup.recorder.writer.directory
        self._recorder = setup.recorder
        self._interrupt = setup.interrupt
        self._steering = setup.steering
        self._watchdog = loop.watchdog
        self._block_deadline_s = setup.parts.config.train.call_deadline_s
        self._on_stuck = on_stuck
        self._is_over = threading.Event()
        self._beat_s = time.monotonic()
        self._told_s = BLOCKED_TOLD_S
        self._exit_at_s = float("inf")

    async def __aenter__(self) -> Heartbeat:
        self._event_loop = asyncio.get_running_loop()
        self._main_id = threading.get_ident()
        self._ticker = asyncio.create_task(self._tick())
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._ticker.cancel()
        self._thread.join(timeout=STATUS_EVERY_S)
        is_stopped = isinstance(error, Interrupted | ObserverError | asyncio.CancelledError | KeyboardInterrupt)
        phase = "finished" if kind is None else "stopped" if is_stopped else "failed"
        write_status(self._directory, self._status(phase))

    async def _tick(self) -> None:
        """Runs on the event loop: record that it turns, and show what it waits for."""
        while True:
            self._beat_s = time.monotonic()
            oldest = PENDING_CALLS.oldest()
            self._recorder.observers.waiting(
                waiting_text(self._watchdog.reason, oldest), oldest[0].waited_s if oldest else 0
            )
            await asyncio.sleep(BEAT_S)

    def _watch(self) -> None:
        """Runs in the thread: obey orders, write the status, look at the event loop."""
        written_s = 0.0
        while not self._is_over.wait(BEAT_S):
            for order in take_orders(self._directory):
                self._obey(order)
            now_s = time.monotonic()
            if now_s - written_s >= STATUS_EVERY_S:
                written_s = now_s
                write_status(self._directory, self._status(self._recorder.phase_name))
            self._look_at_the_loop(now_s)

    def _obey(self, order: Order) -> None:
        self._steering.put(order.settings)
        if order.stop == "graceful":
            self._on_loop(self._stop_gracefully)
        elif order.stop == "hard":
            self._exit_at_s = time.monotonic() + HARD_STOP_S
            self._interrupt.stop_now()

    def _stop_gracefully(self) -> None:
        self._recorder.observers.message("asked to stop: after this step")
        self._interrupt.ask()

    def _on_loop(self, work: Callable[[], None]) -> None:
        self._event_loop.call_soon_threadsafe(work)

    def _look_at_the_loop(self, now_s: float) -> None:
        blocked_s = now_s - self._beat_s
        if blocked_s < BLOCKED_TOLD_S:
            self._told_s = BLOCKED_TOLD_S
        if blocked_s >= min(self._told_s, self._block_deadline_s):
            self._told_s *= 2
            self._recorder.observers.message(
                f"the event loop has not come round for {blocked_s:.0f} s: {self._where()}"
            )
        if blocked_s >= self._block_deadline_s:
            self._give_up(f"blocked for {blocked_s:.0f} s, in {self._where()}")
        elif now_s >= self._exit_at_s:
            self._give_up(f"a hard stop did not end the run within {HARD_STOP_S:.0f} s")

    def _give_up(self, detail: str) -> None:
        """The event loop cannot end the run, so its starter has to; this thread has nothing more to do."""
        self._is_over.set()
        self._on_stuck(StalledError("event loop", detail))

    def _where(self) -> str:
        """What blocks the event loop: the innermost lines of its stack, and the disk if it is writing the run."""
        # There is no other way to ask.
        frame = sys._current_frames().get(self._main_id)  # pyright: ignore[reportPrivateUsage]
        stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
        lines = " > ".join(f"{Path(line.filename).name}:{line.lineno} {line.name}" for line in stack[-3:])
        is_writing = any(Path(line.filename) == WRITER_FILE for line in stack)
        return f"disk: {self._directory / DATABASE} does not take what is written; in {lines}" if is_writing else lines

    def _status(self, phase: str) -> Status:
        loop, stream = self._loop, self._loop.supply.stream
        pool: dict[str, int] = {}
        if stream is not None:
            pool = {**stream.pool.counts(), "attempts playing": stream.num_attempts_playing}
        return Status(
            pid=os.getpid(),
            time=time.time(),
            phase=phase,
            step=loop.done_step,
            num_steps=loop.num_steps,
            version=loop.version,
            reason=self._watchdog.reason,
            pending_calls=tuple(ShownCall.of(call) for call in PENDING_CALLS.oldest(SHOWN_CALLS)),
            num_pending_calls=len(PENDING_CALLS),
            pool=pool,
            alarms=tuple(loop.alarms.active),
            blocked_s=round(max(0.0, time.monotonic() - self._beat_s - 2 * BEAT_S), 2),
            memory_mb=round(memory_mb(), 1),
        )
