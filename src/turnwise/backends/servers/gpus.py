"""Which GPUs a server that the run starts gets: those after the learners', if there are enough."""

from __future__ import annotations

import os

from turnwise.engine.config import ClusterConfig, EngineConfig
from turnwise.engine.device_info import choose_device, is_cpu_chosen, num_gpus
from turnwise.engine.machine_share import count_here
from turnwise.errors import ConfigError
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.server_options import NO_OTHER, OTHER_SAMPLERS

VISIBLE = "CUDA_VISIBLE_DEVICES"


def choose_server_gpus(engine: EngineConfig, cluster: ClusterConfig, rollout: RolloutConfig) -> tuple[int, ...]:
    """The GPUs of the run's own server, as this process numbers them; none where the run uses a CPU.

    Raises a `ConfigError` if this machine has too few, or if Ray gives the others to learners.
    """
    if rollout.url or not _share(rollout) or is_cpu_chosen(engine):
        return ()
    device = choose_device(engine)[0]
    gpus, size = num_gpus(device.type), rollout.tensor_parallel_size
    if not gpus:
        return ()
    if cluster.uses_ray and cluster.learners > 1:
        raise ConfigError(
            f"rollout.backend={rollout.backend} with cluster.address={cluster.address}: Ray gives the GPUs of this "
            "machine to learners and knows nothing of a server that the run starts; start the server on machines of "
            "its own, and give rollout.url"
        )
    first, learners = device.index or 0, count_here(cluster.learners, cluster)
    if size > gpus:
        raise ConfigError(
            f"rollout.tensor_parallel_size={size}, and this machine has {gpus} GPUs; use fewer, or a server elsewhere "
            "(rollout.url)"
        )
    reads_memory = rollout.publish == "weights" and rollout.weight_transfer == "ipc"
    is_beside = learners + size <= gpus and rollout.placement == "separate" and not reads_memory
    start = first + learners if is_beside else first
    return tuple((start + number) % gpus for number in range(size))


def check_server_fits(
    engine: EngineConfig, cluster: ClusterConfig, rollout: RolloutConfig, *, needed: int, total: int
) -> None:
    """Refuse a server that shares a GPU with learners and does not fit beside them.

    Args:
        needed: bytes that one learner needs in any case.
        total: bytes of a GPU.
    """
    num_learners = _most_learners(choose_server_gpus(engine, cluster, rollout), engine, cluster)
    if not num_learners or rollout.placement == "colocated":
        return
    share = rollout.gpu_memory_utilization or _share(rollout)
    if num_learners * needed + share * total <= total:
        return
    gib = 1 << 30
    raise ConfigError(
        f"rollout.backend={rollout.backend}: the server that the run starts has no GPU of its own beside "
        f"{num_learners} learner{'s' * (num_learners > 1)} on it. It takes {share:.0%} of the GPU's "
        f"{total / gib:.1f} GiB, and weights and what is trained need {num_learners * needed / gib:.1f} GiB; set "
        "rollout.gpu_memory_utilization, rollout.placement=colocated, fewer learners, or rollout.url"
    )


def _share(rollout: RolloutConfig) -> float:
    """The share of a GPU that a server of this backend takes by default; 0 for a backend without servers."""
    return OTHER_SAMPLERS.get(rollout.backend, NO_OTHER).gpu_share


def _most_learners(gpus: tuple[int, ...], engine: EngineConfig, cluster: ClusterConfig) -> int:
    """Learners on the server's GPU that has most of them."""
    if not gpus:
        return 0
    device, learners = choose_device(engine)[0], count_here(cluster.learners, cluster)
    there = num_gpus(device.type)
    if count_here(cluster.num_devices, cluster) > there:
        return learners if (device.index or 0) in gpus else 0  # learners of too few GPUs share the first one
    taken = [((device.index or 0) + rank) % there for rank in range(learners)]
    return max(taken.count(gpu) for gpu in gpus)


def visible_gpus(gpus: tuple[int, ...]) -> dict[str, str]:
    """The variable that shows a server these GPUs alone."""
    if not gpus:
        return {}
    names = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return {VISIBLE: ",".join(names[gpu] if names else str(gpu) for gpu in gpus)}
