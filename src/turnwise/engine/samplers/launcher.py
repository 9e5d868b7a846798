"""Starts samplers of their own: processes of this machine, or actors of a Ray cluster."""

from __future__ import annotations

from turnwise.engine.config import ClusterConfig, EngineConfig
from turnwise.engine.device_info import GPU_SHARE_VARIABLE, choose_device, is_cpu_chosen, num_gpus
from turnwise.engine.machine_share import gpu_share, thread_share
from turnwise.engine.samplers.links import SamplerLink, start_sampler
from turnwise.engine.threads import USERS_CHOICES
from turnwise.runtime.ray_cluster import connect_ray, refuse_unused_gpus


class SamplerLauncher:
    """Starts samplers. Each has a GPU of its own after the learners' if there are enough; else all share what is
    there, and on a CPU the cores."""

    def __init__(self, cluster: ClusterConfig, engine: EngineConfig) -> None:
        self._cluster, self._engine = cluster, engine.for_sampling()
        self._gpus = num_gpus(choose_device(engine)[0].type)
        self._has_own_gpu = self._gpus >= cluster.num_devices
        self._environment: dict[str, str] = {}
        if not self._gpus:
            self._environment = dict.fromkeys(USERS_CHOICES, str(thread_share(cluster.samplers)))
        elif not self._has_own_gpu and not cluster.uses_ray:
            self._environment = {GPU_SHARE_VARIABLE: gpu_share(cluster.num_devices)}

    def engine_of(self, number: int) -> EngineConfig:
        """A sampler's config. Ray shows an actor its own GPU alone."""
        if self._gpus and self._cluster.uses_ray:
            return self._engine.model_copy(update={"device": "cuda"})
        if not self._gpus or not self._has_own_gpu:
            return self._engine
        first = choose_device(self._engine)[0].index or 0
        device = (first + self._cluster.learners + number) % self._gpus
        return self._engine.model_copy(update={"device": f"cuda:{device}"})

    def start(self, number: int) -> SamplerLink:
        """Start a sampler process, which then waits for its set-up."""
        if not self._cluster.uses_ray:
            return start_sampler(number, self._environment)
        from turnwise.engine.samplers.ray_links import start_ray_sampler  # ray

        cluster = self._cluster
        if not self._gpus and not is_cpu_chosen(self._engine):
            refuse_unused_gpus(connect_ray(cluster.address), cluster.address)
        return start_ray_sampler(cluster.address, number, num_samplers=cluster.samplers, takes_gpu=self._gpus > 0)
