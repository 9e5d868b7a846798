"""Learners as actors of a Ray cluster, spread over its nodes by a placement group."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from turnwise.engine.config import ClusterConfig
from turnwise.engine.learners.calls import LearnerCall, LearnerSetup
from turnwise.engine.learners.group import LearnerPlace
from turnwise.engine.learners.portable import portable
from turnwise.engine.learners.process import LearnerProcess
from turnwise.engine.samplers.links import SamplerLink
from turnwise.engine.samplers.ray_links import MAX_CALLS, RayLink, SamplerActor
from turnwise.errors import LearnerError
from turnwise.runtime.ray_cluster import RayActor, connect_ray

PLACE_S = 30.0
"""Seconds for the cluster to find room."""
RECEIVE_S = 60.0
"""Seconds to fetch an answer that is there."""


class LearnerActor(SamplerActor):
    """The process of one rank, in an actor; it answers requests to sample beside, if it is asked to."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__(environment)
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

    def send(self, message: object) -> None:
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


def place_on_ray(cluster: ClusterConfig, size: int, *, environment: Mapping[str, str], takes_gpu: bool) -> LearnerPlace:
    """Find room for learners 1 to `size` - 1. Raises `LearnerError` if the cluster has none."""
    ray = connect_ray(cluster.address)
    util, groups, strategies = (
        importlib.import_module(name)
        for name in ("ray.util", "ray.util.placement_group", "ray.util.scheduling_strategies")
    )
    bundle = {"CPU": 1, **({"GPU": 1} if takes_gpu else {})}
    group = groups.placement_group([bundle] * (size - 1), strategy="SPREAD") if size > 1 else None
    if group is not None and not group.wait(timeout_seconds=min(PLACE_S, cluster.deadline_s)):
        groups.remove_placement_group(group)
        raise LearnerError(f"the Ray cluster has no room for {size - 1} learners of {bundle}")

    def give_room_back() -> None:
        with contextlib.suppress(Exception):  # the cluster may be gone
            groups.remove_placement_group(group)

    def start_peer(rank: int) -> RayPeer:
        strategy = strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank - 1)
        options = {"num_cpus": 1, "num_gpus": int(takes_gpu), "scheduling_strategy": strategy}
        actor = RayActor(ray, LearnerActor, (dict(environment),), {**options, "max_concurrency": MAX_CALLS})
        return RayPeer(rank, actor, give_room_back, samples=cluster.samples_too(rank))

    return LearnerPlace(util.get_node_ip_address(), start_peer)
