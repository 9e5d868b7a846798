"""A long-lived program in a sandbox. It gets one line at a time and answers each with one line.

Starting a sandbox takes tens of milliseconds; asking a worker takes less than one. The program prints a first line when
it is ready. If a worker is late or dead, end it and start another one.
"""

from __future__ import annotations

import asyncio
import os
import resource
import select
import stat
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

from turnwise.envs.sandbox.process import START_S, Backend, Running, SandboxJob
from turnwise.envs.sync import call_in_thread
from turnwise.errors import SandboxError

PIPE_BYTES = 1 << 16
"""How much can be written to an empty pipe at once."""


class WorkerDiedError(SandboxError):
    """The program ended instead of answering."""


class Worker:
    """Made by `Sandbox.start_worker`. Only one thread or coroutine may use it at a time."""

    def __init__(self, backend: Backend, job: SandboxJob) -> None:
        owner = owner_who_reads(job.shown.values()) if os.geteuid() == 0 else None
        if owner is not None:
            job = replace(job, user_id=owner, limits=replace(job.limits, processes=_max_processes()))
        self._is_ended = False
        self._running = _starter().submit(Running, backend, job, stdin=None).result()
        try:
            os.set_blocking(self._running.stdin_fd, False)
            self._running.wait_until_up()
            if self._read_line(time.monotonic() + START_S) is None:
                raise SandboxError(f"{job.argv[0]} was not ready after {START_S:g} s")
        except BaseException:
            self.end()
            raise

    @property
    def is_alive(self) -> bool:
        return not self._is_ended and not self._running.has_ended

    @property
    def pid(self) -> int:
        """The host's pid of the sandbox's first process."""
        return self._running.init_pid or self._running.outer_pid

    def ask(self, line: bytes, within_s: float) -> bytes | None:
        """Return the answer without its line end, or None if it is late. `WorkerDiedError` if the program has ended."""
        end_s = time.monotonic() + within_s
        self._running.outputs[self._running.stdout_fd].clear()
        return self._read_line(end_s) if self._write(line + b"\n", end_s) else None

    async def ask_async(self, line: bytes, within_s: float) -> bytes | None:
        """`ask` on the event loop, without a thread, which would have to wait for Python's lock."""
        if len(line) >= PIPE_BYTES:  # a long line may need more than one write
            return await call_in_thread(self.ask, line, within_s)
        loop, descriptor = asyncio.get_running_loop(), self._running.stdout_fd
        self._running.outputs[descriptor].clear()
        if not self._write(line + b"\n", time.monotonic() + within_s):
            return None
        answered: asyncio.Future[bytes] = loop.create_future()

        def take() -> None:
            before = len(self._running.outputs[descriptor])
            self._running.pump(0)
            answer = self._running.outputs[descriptor]
            if answered.done():
                return
            if answer.endswith(b"\n"):
                answered.set_result(bytes(answer[:-1]))
            elif len(answer) == before:
                answered.set_exception(self._death())

        loop.add_reader(descriptor, take)
        try:  # an answer that came while the loop was blocked counts, even if it is read late
            await asyncio.wait([answered], timeout=within_s)
            return answered.result() if answered.done() else None
        finally:
            loop.remove_reader(descriptor)
            answered.cancel()

    def end(self) -> None:
        """Kill the program and everything that it started. It may be called twice."""
        self._is_ended = True
        self._running.end()

    def _write(self, data: bytes, end_s: float) -> bool:
        poll = select.poll()
        poll.register(self._running.stdin_fd, select.POLLOUT)
        while data and (left_s := end_s - time.monotonic()) > 0:
            poll.poll(left_s * 1000)
            try:
                data = data[os.write(self._running.stdin_fd, data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as cause:
                raise WorkerDiedError("it ended before it was asked") from cause
        return not data

    def _read_line(self, end_s: float) -> bytes | None:
        answer = self._running.outputs[self._running.stdout_fd]
        while not answer.endswith(b"\n"):
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return None
            has_ended = self._running.has_ended  # check this first, then read what it wrote before it ended
            before = len(answer)
            self._running.pump(left_s)
            if len(answer) == before and (has_ended or before > self._running.job.limits.output_bytes):
                raise self._death()
        return bytes(answer[:-1])

    def _death(self) -> WorkerDiedError:
        return WorkerDiedError(f"it ended, or said too much: {self._running.complaint()}")


@cache
def _starter() -> ThreadPoolExecutor:
    """The thread that starts workers. It lives as long as this process, because the kernel kills them with it."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="turnwise-sandbox-start")


def _max_processes() -> int:
    """The limit on processes for a user who has others. A smaller limit would keep the worker from starting."""
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    return 1 << 20 if hard == resource.RLIM_INFINITY else hard


def owner_who_reads(places: Iterable[Path]) -> int | None:
    """The user who can read these paths: None if every user can, else the owner of a path that others cannot read."""
    for place in places:
        info = place.stat()
        needed = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(info.st_mode) else 0)
        if info.st_mode & needed != needed:
            return info.st_uid
    return None
