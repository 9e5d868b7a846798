"""Learners as actors of a Ray cluster, spread over its nodes by a placement group."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from turnwise.engine.config import ClusterConfig
from turnwise.engine.learners.calls import LearnerCall, LearnerSetup
from turnwise.engine.learners.group import LearnerPlace
from turnwise.engine.learners.portable import portable
from turnwise.engine.learners.process import LearnerProcess
from turnwise.engine.samplers.links import SamplerLink
from turnwise.engine.samplers.ray_links import MAX_CALLS, ActorThreads, RayLink, SamplerActor
from turnwise.errors import LearnerError
from turnwise.runtime.ray_cluster import (
    PLACE_S,
    RayActor,
    RayRoom,
    connect_ray,
    is_client,
    refuse_unused_gpus,
)

RECEIVE_S = 60.0
"""Seconds to fetch an answer that is there."""


class LearnerActor(SamplerActor):
    """The process of one rank, in an actor; it answers requests to sample beside, if it is asked to."""

    def __init__(self, threads: ActorThreads | None) -> None:
        super().__init__(threads)
        self._process: LearnerProcess | None = None

    async def answer(self, message: LearnerSetup | LearnerCall) -> tuple[str, Any]:
        return await asyncio.to_thread(self._answer, message)

    def _answer(self, message: LearnerSetup | LearnerCall) -> tuple[str, Any]:
        try:
            if isinstance(message, LearnerSetup):
                self._process = LearnerProcess(message)
                self.host = self._process.make_sampler()
                return "ready", self._process.num_base_bytes
            assert self._process is not None, "the set-up comes first"
            return "done", self._process.answer(message)
        except Exception as error:  # noqa: BLE001 - rank 0 raises it
            return "error", portable(error)


class RayPeer:
    """A learner in an actor."""

    def __init__(self, rank: int, actor: RayActor, give_room_back: Callable[[], None], *, samples: bool) -> None:
        self.rank = rank
        self._actor = actor
        self._link = RayLink(actor) if samples else None
        self._give_room_back = give_room_back
        self._answer: Any = None
        self._problem = ""

    @property
    def name(self) -> str:
        return f"actor {self._actor.name}"

    @property
    def is_gone(self) -> bool:
        return self._actor.is_gone

    def send(self, message: object, deadline_s: float) -> None:  # noqa: ARG002 - Ray takes it without blocking
        if self._actor.is_gone:
            raise OSError("the actor is gone")
        self._answer = self._actor.handle.answer.remote(message)

    def has_answer(self, wait_s: float = 0.0) -> bool:
        return self._actor.is_ready(self._answer, wait_s)

    def receive(self) -> tuple[str, Any]:
        try:
            return self._actor.get(self._answer, deadline_s=RECEIVE_S)
        except OSError as cause:
            self._problem = str(cause)
            raise

    def why(self) -> str:
        state = "is gone" if self._actor.is_gone else "does not answer"
        return f"{state}{f': {self._problem}' if self._problem else ''}"

    def hang_up(self) -> None:
        self._actor.kill()

    def kill(self) -> None:
        self._actor.kill()

    def end(self) -> None:
        """Give the room of all learners back, with the first learner that ends; Ray ends the actor."""
        self._give_room_back()

    def sampler_link(self) -> SamplerLink | None:
        return self._link


class RayCluster:
    """Finds places for learners on a Ray cluster. `cluster.learners` - 1 are actors; the first one is this process."""

    def __init__(self, cluster: ClusterConfig, *, has_gpu: bool, is_cpu_chosen: bool) -> None:
        """Join the cluster.

        Args:
            has_gpu: this process has a GPU, so each of the others is to have one.
            is_cpu_chosen: the user wants no GPU.
        """
        self._cluster, self._takes_gpu = cluster, has_gpu
        self._ray = connect_ray(cluster.address)
        if not has_gpu and not is_cpu_chosen:
            refuse_unused_gpus(self._ray, cluster.address)
        self._holder: RayActor | None = None

    def reserve_gpu(self) -> int:
        """Keep one GPU of this node for this process, so that Ray gives it to no actor. Returns its index.

        A Ray client is on no node; its GPU is its own. Raises `LearnerError` if no GPU of the node is free.
        """
        if is_client(self._cluster.address):
            return 0
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        node = self._ray.get_runtime_context().get_node_id()
        here = strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        options = {"num_cpus": 0, "num_gpus": 1, "scheduling_strategy": here}
        self._holder = RayActor(self._ray, GpuHolder, (), options)
        wait_s = min(PLACE_S, self._cluster.deadline_s)
        try:
            taken = self._holder.get(self._holder.handle.gpu.remote(), deadline_s=wait_s)
        except OSError as cause:
            self.close()
            raise LearnerError(
                f"no GPU of this node of the Ray cluster is free for the first learner ({cause}); other jobs may use "
                "them, or ray start was told fewer with --num-gpus"
            ) from cause
        return _visible_index(taken, os.environ.get("CUDA_VISIBLE_DEVICES"))

    def place(self, size: int) -> LearnerPlace:
        """Find room for learners 1 to `size` - 1. Raises `LearnerError` if the cluster has none."""
        util = importlib.import_module("ray.util")
        if size == 1:
            return LearnerPlace(util.get_node_ip_address(), _nobody)
        bundle = {"CPU": 1, **({"GPU": 1} if self._takes_gpu else {})}
        wait_s = self._cluster.deadline_s
        try:
            room = RayRoom.find(self._ray, [bundle] * (size - 1), f"{size - 1} of {size} learners", wait_s=wait_s)
        except OSError as cause:
            raise LearnerError(str(cause)) from cause
        hosts = [*room.hosts(), socket.gethostname()]

        def start_peer(rank: int) -> RayPeer:
            options = {"num_cpus": 1, "num_gpus": int(self._takes_gpu), "max_concurrency": MAX_CALLS}
            threads = None if self._takes_gpu else ActorThreads.of(hosts.count(hosts[rank - 1]))
            actor = RayActor(self._ray, LearnerActor, (threads,), {**options, **room.strategy(rank - 1)})
            return RayPeer(rank, actor, room.give_back, samples=self._cluster.samples_too(rank))

        return LearnerPlace(util.get_node_ip_address(), start_peer, num_here=hosts.count(hosts[-1]))

    def close(self) -> None:
        """Give the GPU of this process back."""
        if self._holder is not None:
            self._holder.kill()
        self._holder = None


class GpuHolder:
    """Keeps a GPU for a process that is no actor."""

    def gpu(self) -> str:
        """The GPU's name on its node, as in `CUDA_VISIBLE_DEVICES`."""
        ray = importlib.import_module("ray")
        return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])

    def live(self) -> None:
        """Never return: the caller notices the end of the actor by it."""
        threading.Event().wait()


def _visible_index(gpu: str, visible: str | None) -> int:
    """The index, in this process, of a GPU of the node."""
    if visible is None:
        return int(gpu)
    names = [name.strip() for name in visible.split(",")]
    if gpu not in names:
        raise LearnerError(
            f"Ray keeps GPU {gpu} of this node for the first learner, and this process sees CUDA_VISIBLE_DEVICES="
            f"{visible} alone; start the run without it"
        )
    return names.index(gpu)


def _nobody(rank: int) -> RayPeer:
    raise AssertionError(f"there is no learner {rank}")
