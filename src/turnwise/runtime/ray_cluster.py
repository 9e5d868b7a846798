"""A Ray cluster, for code that starts processes on it. Waits have deadlines: a call to a lost node never returns."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.errors import ConfigError

PLACE_S = 30.0
"""Seconds for the cluster to find room."""

LOST = (
    *("RayActorError", "RaySystemError", "NodeDiedError", "WorkerCrashedError", "ObjectLostError"),
    *("ActorPlacementGroupRemoved", "ActorUnschedulableError"),
)
"""Errors of Ray that say that an actor, its node or its answer is gone."""


def connect_ray(address: str) -> Any:
    """Join the cluster at `cluster.address`. Returns the module `ray`."""
    try:
        ray = importlib.import_module("ray")
    except ModuleNotFoundError as cause:
        raise ConfigError(f"cluster.address={address} needs ray: pip install 'turnwise[ray]'") from cause
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError) as cause:
            raise ConfigError(
                f"cluster.address={address}: no Ray cluster answers ({cause}); start one: ray start --head"
            ) from cause
    return ray


class RayActor:
    """One actor, with a call that lasts as long as the actor does: so its end is seen without asking it."""

    def __init__(self, ray: Any, actor_class: type, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """`actor_class` has a method `live`, which never returns. Ray does not restart it: its state would be lost."""
        self._ray = ray
        remote = ray.remote(actor_class).options(**{"max_concurrency": 2, "max_restarts": 0, **options})
        self.handle: Any = remote.remote(*arguments)
        self._life = self.handle.live.remote()

    @property
    def name(self) -> str:
        return repr(self.handle)

    @property
    def is_gone(self) -> bool:
        return self.is_ready(self._life)

    def is_ready(self, reference: Any, wait_s: float = 0.0) -> bool:
        return bool(self._ray.wait([reference], timeout=wait_s)[0])

    def get(self, reference: Any, *, deadline_s: float) -> Any:
        """The result of a call. `OSError`: the actor or its answer is gone, or did not come in time."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=deadline_s)
        except errors.GetTimeoutError as cause:
            raise OSError(f"no answer within {deadline_s:g} s") from cause
        except tuple(getattr(errors, name) for name in LOST) as cause:
            raise OSError(str(cause).splitlines()[0]) from cause

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # the actor, its node or the cluster may be gone
            self._ray.kill(self.handle, no_restart=True)


class RayRoom:
    """Room on the cluster that is kept for actors: a placement group, one bundle for each of them."""

    def __init__(self, ray: Any, group: Any) -> None:
        self._ray, self._group = ray, group

    @classmethod
    def find(cls, ray: Any, bundles: Sequence[Mapping[str, float]], what: str, *, wait_s: float = 0.0) -> RayRoom:
        """Wait for room, spread over nodes: for `PLACE_S`, or less. Raises `OSError` if there is none in time."""
        wait_s = min(wait_s, PLACE_S) if wait_s else PLACE_S
        groups = importlib.import_module("ray.util.placement_group")
        group = groups.placement_group([dict(one) for one in bundles], strategy="SPREAD")
        if not group.wait(timeout_seconds=wait_s):
            groups.remove_placement_group(group)
            has = {name: count for name, count in ray.available_resources().items() if name in ("CPU", "GPU")}
            raise OSError(
                f"the Ray cluster has no room for {what} of {bundles[0]}: after {wait_s:g} s {has or 'nothing'} is free"
            )
        return cls(ray, group)

    def strategy(self, index: int) -> dict[str, Any]:
        """The option of an actor that goes into this bundle."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        strategy = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        return {"scheduling_strategy": strategy}

    def hosts(self) -> list[str]:
        """The name of each bundle's machine. Two nodes on one machine share its cores."""
        table = importlib.import_module("ray.util").placement_group_table(self._group)
        names = {node["NodeID"]: node["NodeManagerHostname"] for node in self._ray.nodes()}
        nodes = table["bundles_to_node_id"]
        return [names.get(nodes[index], nodes[index]) for index in range(len(nodes))]

    def give_back(self) -> None:
        """Let others have the room. Ray ends the actors in it."""
        groups = importlib.import_module("ray.util.placement_group")
        with contextlib.suppress(Exception):  # the cluster may be gone
            groups.remove_placement_group(self._group)


def num_machines(ray: Any) -> int:
    """Machines of the cluster; several nodes may be on one."""
    return len({node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]})


def is_client(address: str) -> bool:
    """Whether a process that joins there is a Ray client, which may be outside the cluster."""
    return address.startswith("ray://")


def refuse_unused_gpus(ray: Any, address: str) -> None:
    """Refuse a run whose first process has no GPU on a cluster that has some: every engine does as the first one."""
    gpus = ray.cluster_resources().get("GPU", 0)
    if not gpus:
        return
    advice = "start the run on a node that has one"
    if is_client(address):
        advice = "a Ray client leads its run itself: start the run on a node that has one, with cluster.address=auto"
    raise ConfigError(
        f"cluster.address={address}: the Ray cluster has {gpus:g} GPUs, and this process, which is the first learner, "
        f"has none, so all learners and samplers would use CPUs; {advice}, or set engine.device=cpu"
    )
