"""Who gets which GPU of a Ray cluster of one node with three GPUs that are not there. Prints one line of JSON.

Run it with the interpreter of `ray_environment`.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from typing import Any

from campaigns.ray_kills import QUICK
from turnwise.engine.config import ClusterConfig
from turnwise.engine.learners import ray_peers
from turnwise.engine.learners.group import LearnerPeer
from turnwise.engine.learners.ray_peers import GpuHolder, RayCluster
from turnwise.engine.samplers.ray_links import start_ray_sampler
from turnwise.errors import ConfigError, LearnerError
from turnwise.runtime import ray_cluster

NUM_GPUS = 3
HANG_S = 300.0
"""Only a hang takes so long."""
CLUSTER = ClusterConfig(learners=NUM_GPUS, address="auto", deadline_s=HANG_S)


class Learner(GpuHolder):
    """A learner that answers with its GPU."""

    def __init__(self, threads: object) -> None:
        assert threads is None, "cores are no concern of a learner on a GPU"

    def answer(self, message: object) -> tuple[str, str]:  # noqa: ARG002
        return "ready", self.gpu()


def refused(work: Callable[[], Any]) -> str:
    """The error of some work."""
    try:
        return f"no error, but {work()!r}"
    except (ConfigError, LearnerError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def ask(peer: LearnerPeer) -> int:
    peer.send("which GPU?", HANG_S)
    assert peer.has_answer(HANG_S), peer.why()
    return int(peer.receive()[1])


def main() -> None:
    for name, value in QUICK.items():
        os.environ.setdefault(name, value)
    ray_cluster.PLACE_S = ray_peers.PLACE_S = HANG_S
    ray = importlib.import_module("ray")
    ray.init("local", num_cpus=4, num_gpus=NUM_GPUS, include_dashboard=False, object_store_memory=80 * 2**20)
    ray_peers.LearnerActor = Learner  # type: ignore[misc]
    ray_peers.MAX_CALLS = 4  # of an actor whose calls have a thread each
    cluster = RayCluster(CLUSTER, has_gpu=True, is_cpu_chosen=False)
    first = cluster.reserve_gpu()
    place = cluster.place(NUM_GPUS)
    others = [place.start_peer(rank) for rank in range(1, NUM_GPUS)]
    found: dict[str, object] = {"gpus": [first, *map(ask, others)], "num_here": place.num_here}
    ray_cluster.PLACE_S = ray_peers.PLACE_S = 1.0
    another = RayCluster(CLUSTER, has_gpu=True, is_cpu_chosen=False)
    found["reserve"] = refused(another.reserve_gpu)
    found["place"] = refused(lambda: another.place(2))
    found["sampler"] = refused(lambda: start_ray_sampler("auto", 4, num_samplers=1, takes_gpu=True))
    found["no GPU here"] = refused(lambda: RayCluster(CLUSTER, has_gpu=False, is_cpu_chosen=False))
    found["a CPU is chosen"] = refused(lambda: RayCluster(CLUSTER, has_gpu=False, is_cpu_chosen=True))
    cluster.close()
    ray_peers.PLACE_S = HANG_S
    found["given back"] = another.reserve_gpu()
    print(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    main()
