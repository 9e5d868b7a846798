"""Samplers as actors of a Ray cluster."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from turnwise.engine.learners.portable import portable
from turnwise.engine.machine_share import thread_share
from turnwise.engine.samplers.calls import CancelCall, SamplerCall, SamplerSetup
from turnwise.engine.samplers.host import SamplerHost
from turnwise.engine.samplers.process import make_host
from turnwise.engine.threads import USERS_CHOICES
from turnwise.runtime.ray_cluster import RayActor, RayRoom, connect_ray, num_machines

MAX_CALLS = 10_000
"""Calls that one actor answers at the same time."""


@dataclass(frozen=True, slots=True)
class ActorThreads:
    """How an actor finds its number of threads: by the cores of the machine where it is."""

    num_beside: int
    """Engines that share those cores, itself among them."""
    choices: Mapping[str, str]
    """What the user chose for the run."""

    @classmethod
    def of(cls, num_beside: int) -> ActorThreads:
        """For an actor of this process's run."""
        return cls(num_beside, {name: os.environ[name] for name in USERS_CHOICES if name in os.environ})

    def use(self) -> None:
        """Use them in this process."""
        for name in USERS_CHOICES:
            os.environ.pop(name, None)  # Ray sets one of them to the CPUs that it counts for the actor
        os.environ.update(self.choices)
        torch.set_num_threads(thread_share(self.num_beside))


class SamplerActor:
    """An engine that samples, in an actor whose calls share an event loop."""

    def __init__(self, threads: ActorThreads | None) -> None:
        """`threads` is None on a GPU."""
        if threads is not None:
            threads.use()
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

    def __init__(self, actor: RayActor, *, give_room_back: Callable[[], None] = lambda: None) -> None:
        self._actor = actor
        self._give_room_back = give_room_back
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
        self._give_room_back()


def start_ray_sampler(address: str, number: int, *, num_samplers: int, takes_gpu: bool) -> RayLink:
    """Start a sampler on a node that has a GPU left; on CPUs any node will do. Its first call is its set-up.

    Raises `OSError` if the cluster has no GPU for it.
    """
    ray = connect_ray(address)
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": MAX_CALLS}
    if not takes_gpu:
        threads = ActorThreads.of(math.ceil(num_samplers / max(1, num_machines(ray))))
        return RayLink(RayActor(ray, SamplerActor, (threads,), {**options, "scheduling_strategy": "SPREAD"}))
    room = RayRoom.find(ray, [{"GPU": 1}], f"sampler {number}")
    actor = RayActor(ray, SamplerActor, (None,), {**options, "num_gpus": 1, **room.strategy(0)})
    return RayLink(actor, give_room_back=room.give_back)
