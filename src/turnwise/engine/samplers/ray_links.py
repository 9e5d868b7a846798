"""Samplers as actors of a Ray cluster."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch

from turnwise.engine.learners.portable import portable
from turnwise.engine.samplers.calls import CancelCall, SamplerCall, SamplerSetup
from turnwise.engine.samplers.host import SamplerHost
from turnwise.engine.samplers.process import make_host
from turnwise.runtime.ray_cluster import RayActor, connect_ray

MAX_CALLS = 10_000
"""Calls that one actor answers at the same time."""


class SamplerActor:
    """An engine that samples, in an actor whose calls share an event loop."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        if "OMP_NUM_THREADS" in environment:
            torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        self.host: SamplerHost | None = None
        self._waiting: dict[int, Future[Any]] = {}

    async def sample(self, number: int, call: SamplerCall | SamplerSetup) -> tuple[str, Any]:
        """Answer one call."""
        try:
            if isinstance(call, SamplerSetup):
                self.host = await asyncio.to_thread(make_host, call)
                return "done", None
            assert self.host is not None, "the set-up comes first"
            self._waiting[number] = self.host.begin(call)
            return "done", await asyncio.wrap_future(self._waiting[number])
        except asyncio.CancelledError:
            return "done", None  # nobody waits for it
        except Exception as error:  # noqa: BLE001 - the run raises it
            return "error", portable(error)
        finally:
            self._waiting.pop(number, None)

    async def cancel(self, call: CancelCall) -> None:
        """End a call under way."""
        future = self._waiting.get(call.number)
        if future is not None:
            future.cancel()

    async def live(self) -> None:
        """Never return: the caller notices the end of the actor by it."""
        await asyncio.Event().wait()


class RayLink:
    """A sampler in an actor. It may be on another machine, so it gets files with the call."""

    sees_files = False

    def __init__(self, actor: RayActor) -> None:
        self._actor = actor
        self._numbers = itertools.count()

    @property
    def name(self) -> str:
        return f"actor {self._actor.name}"

    @property
    def is_gone(self) -> bool:
        return self._actor.is_gone

    def call(self, call: SamplerCall | SamplerSetup) -> Future[Any]:
        number, answer = next(self._numbers), Future[Any]()
        reference = self._actor.handle.sample.remote(number, call)

        def settle(done: Future[Any]) -> None:
            if not answer.set_running_or_notify_cancel():
                return
            error = done.exception()
            if error is not None:
                answer.set_exception(OSError(str(error).strip().splitlines()[0] if str(error) else repr(error)))
                return
            kind, value = done.result()
            if kind == "error":
                answer.set_exception(value)
            else:
                answer.set_result(value)

        def cancel(done: Future[Any]) -> None:
            if done.cancelled() and not self._actor.is_gone:
                self._actor.handle.cancel.remote(CancelCall(number))

        answer.add_done_callback(cancel)
        reference.future().add_done_callback(settle)
        return answer

    def why(self) -> str:
        return f"{self.name} {'is gone' if self._actor.is_gone else 'does not answer'}"

    def end(self) -> None:
        self._actor.kill()


def start_ray_sampler(address: str, environment: Mapping[str, str], *, takes_gpu: bool) -> RayLink:
    """Start a sampler on whatever node has a GPU left; on CPUs any node will do. Its first call is its set-up."""
    options = {"num_cpus": 0, "num_gpus": int(takes_gpu), "scheduling_strategy": "SPREAD", "max_concurrency": MAX_CALLS}
    return RayLink(RayActor(connect_ray(address), SamplerActor, (dict(environment),), options))
