"""The places of a run's learners: the process, machine and device that each of them has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnwise.engine.config import ClusterConfig, EngineConfig
from turnwise.engine.device_info import choose_device, is_cpu_chosen, num_gpus
from turnwise.engine.learners.group import LearnerPlace, start_process
from turnwise.engine.machine_share import MachineShare, count_here, thread_share
from turnwise.engine.threads import USERS_CHOICES
from turnwise.runtime.torchrun import read_world

if TYPE_CHECKING:
    from turnwise.engine.learners.ray_peers import RayCluster

PEER_CACHE_GIB = 0.05
"""KV cache of a learner that does not sample."""


class LearnerPlaces:
    """Makes room for the first learner in this process, and finds places for the others."""

    def __init__(self, config: EngineConfig, cluster: ClusterConfig) -> None:
        """Take this process's share of its machine; with Ray, reserve the first learner's GPU."""
        self._cluster = cluster
        self._gpus = num_gpus(choose_device(config)[0].type)
        self._share = MachineShare()
        self._ray: RayCluster | None = None
        if cluster.uses_ray:
            from turnwise.engine.learners.ray_peers import RayCluster  # ray

            self._ray = RayCluster(cluster, has_gpu=self._gpus > 0, is_cpu_chosen=is_cpu_chosen(config))
            if self._gpus:
                config = config.model_copy(update={"device": f"cuda:{self._ray.reserve_gpu()}"})
        self.own_config = config
        self.peer_config = config.model_copy(update={"kv_cache_gib": PEER_CACHE_GIB})
        num_engines = count_here(cluster.num_devices, cluster)
        self._has_own_gpu = self._gpus >= num_engines
        if not self._gpus:
            self._share.take_threads(count_here(cluster.learners, cluster))
        elif not self._has_own_gpu:
            self._share.take_gpu(num_engines)

    def find(self, size: int) -> LearnerPlace:
        """Places of learners 1 to `size` - 1: on this machine, where torchrun has started them, or where Ray puts them.

        Raises `LearnerError` if there are none.
        """
        world = read_world()
        if self._ray is not None:
            place = self._ray.place(size)
            if not self._gpus:
                self._share.take_threads(place.num_here)
            return place
        if world is not None and world.size == size:
            from turnwise.engine.learners.torchrun import place_under_torchrun

            return place_under_torchrun(world)
        environment: dict[str, str] = {}
        if not self._gpus:
            environment = dict.fromkeys(USERS_CHOICES, str(thread_share(self._cluster.learners)))
        samples_too = self._cluster.samples_too
        return LearnerPlace("127.0.0.1", lambda rank: start_process(rank, environment, samples=samples_too(rank)))

    def config_of(self, rank: int) -> EngineConfig:
        """A learner's config: with a GPU of its own, if there are enough. Ray shows an actor its own GPU alone."""
        config = self.own_config if self._cluster.samples_too(rank) else self.peer_config
        if self._gpus and self._ray is not None:
            return config.model_copy(update={"device": "cuda"})
        if not self._gpus or not self._has_own_gpu:
            return config
        first = choose_device(config)[0].index or 0
        return config.model_copy(update={"device": f"cuda:{(first + rank) % self._gpus}"})

    def close(self) -> None:
        """Give back what this process took."""
        if self._ray is not None:
            self._ray.close()
        self._share.give_back()
