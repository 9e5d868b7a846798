"""What the processes of a run hold and send to each other: `turnwise cluster plan`. Numbers are upper bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from turnwise.engine.budget import FLOAT32_BYTES, GIB, format_bytes
from turnwise.engine.device_info import DeviceInfo, choose_dtype, num_gpus
from turnwise.engine.machine_share import count_here
from turnwise.training.memory import Memory
from turnwise.training.plan import Plan, attempts_per_task
from turnwise.training.setup import Setup

DATUM_BYTES = 58
"""Bytes of one token of a checked datum that is sent to a learner: two columns of ids of eight bytes, two masks of one,
and ten columns of four at most."""
START_STATES = 3
"""A learner that starts takes over the weights and two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTraffic:
    """Bytes and requests of one training step."""

    gradients: int
    """Bytes of gradients that each learner sends, over all optimizer steps of the step."""
    datums: int
    """Bytes of datums that the first learner sends to all others together."""
    state: int
    """Bytes that one learner receives when it starts, or starts again."""
    env_requests: int
    """Requests to env workers."""
    gathered: int = 0
    """Bytes of weights that each learner receives in one training pass, if the learners hold them in parts."""
    passes: int = 0
    """Training passes of one learner in one step, at least."""
    pass_gradients: int = 0
    """Bytes of gradients that each learner sends in one training pass, if all weights are trained in parts."""
    published: int = 0
    """Bytes of new weights that each sampler receives, if there are several."""


def make_card(gib: float, dtype: str) -> DeviceInfo:
    """A GPU that this machine does not have, with nothing on it."""
    size = round(gib * GIB)
    return DeviceInfo(kind="cuda", dtype=choose_dtype("cuda", dtype)[0], free_bytes=size, total_bytes=size)


def estimate_traffic(setup: Setup, plan: Plan) -> ClusterTraffic:
    """Compute what the processes of a run send each other in one step."""
    num_trained, memory = plan.num_trained_parameters, plan.memory
    config, rollout = setup.config, setup.parts.rollout
    learners, train = config.cluster.learners, config.train
    model = config.model.model_copy(update={"train_unembed": False, "rank": config.critic.rank or config.model.rank})
    critic = setup.facts.num_adapter_parameters(model) if config.method.needs_critic else 0
    in_parts = num_trained if config.cluster.shard and config.model.train == "full" else 0
    trained = (num_trained + critic - in_parts) * FLOAT32_BYTES
    attempts = train.tasks_per_step * train.accumulate * attempts_per_task(config)
    tokens = attempts * min(rollout.max_trajectory_tokens, 2 * rollout.max_turns * rollout.max_tokens_per_turn)
    others = learners - 1
    return ClusterTraffic(
        gradients=train.substeps * 2 * trained * others // learners,
        datums=tokens * DATUM_BYTES * others // learners,
        state=START_STATES * trained if others else 0,
        env_requests=attempts * (rollout.max_turns + 2) if config.cluster.env_workers else 0,
        gathered=_gathered_bytes(setup, memory) * others // learners if config.cluster.shard else 0,
        passes=math.ceil(tokens / learners / memory.num_pass_tokens) if memory is not None else 0,
        pass_gradients=in_parts * FLOAT32_BYTES * others // learners,
        published=num_trained * FLOAT32_BYTES if config.cluster.has_fleet else 0,
    )


def _gathered_bytes(setup: Setup, memory: Memory | None) -> int:
    """Blocks twice, forward and backward, and what lies outside them twice."""
    assert memory is not None, "weights in parts are not at a service elsewhere"
    return 2 * setup.facts.num_parameters * memory.device.dtype_bytes


def cluster_lines(setup: Setup) -> list[str]:
    """The plan of a run's processes, for a person."""
    plan = setup.make_plan()
    traffic, cluster = estimate_traffic(setup, plan), setup.config.cluster
    lines = [f"learner {rank:<4} {_place(setup, rank, plan.memory)}" for rank in range(cluster.learners)]
    if cluster.has_own_samplers:
        memory = setup.make_plan(setup.config.engine_in_use.for_sampling()).memory
        lines += [f"sampler {number:<4} {_sampler_place(setup, number, memory)}" for number in range(cluster.samplers)]
    if isinstance(cluster.env_workers, int):
        where = "an actor of Ray" if cluster.uses_ray else "a process of this machine"
        lines += [f"env worker {number:<1} {where}" for number in range(cluster.env_workers)]
    else:
        lines += [f"env worker {number:<1} {address}" for number, address in enumerate(cluster.env_workers)]
    lines += ["traffic of one step, at most"]
    lines += [f"  gradients  {format_bytes(traffic.gradients)} from each learner, {setup.config.train.substeps} sums"]
    lines += [f"  datums     {format_bytes(traffic.datums)} from learner 0 to the others"]
    if cluster.shard:
        sent = f", {format_bytes(traffic.pass_gradients)} of gradients from it" if traffic.pass_gradients else ""
        lines += [f"  weights    {format_bytes(traffic.gathered)} to each learner in every training pass{sent}"]
        in_all = traffic.passes * (traffic.gathered + traffic.pass_gradients)
        lines += [f"             at least {traffic.passes:,} passes a step: {format_bytes(in_all)}"]
    if cluster.has_fleet:
        lines += [f"  publish    {format_bytes(traffic.published)} to each sampler, {cluster.samplers} of them"]
    lines += [f"  envs       {traffic.env_requests:,} requests to env workers"]
    lines += [f"a learner that starts takes over {format_bytes(traffic.state)}"]
    return lines


def _place(setup: Setup, rank: int, memory: Memory | None) -> str:
    """The place of a learner, and what it holds there. Only one that samples has a KV cache."""
    cluster = setup.config.cluster
    where = "this process" if rank == 0 else "an actor of Ray" if cluster.uses_ray else "a process of this machine"
    if memory is None:
        return f"{where}; the model is at {setup.config.model.base_url}"
    has_cache = rank == 0 or cluster.samples_too(rank)
    held = memory.total if has_cache else memory.total - memory.kv_cache - memory.merged
    return f"{where}, {_device(setup, rank, memory)}: {format_bytes(held)}"


def _sampler_place(setup: Setup, number: int, memory: Memory | None) -> str:
    """The place of a sampler of its own: with the model, a KV cache, and the versions that attempts still use."""
    cluster = setup.config.cluster
    where = "an actor of Ray" if cluster.uses_ray else "a process of this machine"
    assert memory is not None, "a service elsewhere has its own samplers"
    held = memory.weights * (cluster.learners if cluster.shard else 1) + memory.kv_cache + memory.merged
    return f"{where}, {_device(setup, cluster.learners + number, memory)}: {format_bytes(held)} and published weights"


def _device(setup: Setup, number: int, memory: Memory) -> str:
    """The device of one of a run's engines."""
    if setup.card is not None:
        return f"a card of {format_bytes(setup.card.total_bytes)}"
    cluster, gpus = setup.config.cluster, num_gpus(memory.device.kind)
    if not gpus or cluster.uses_ray:
        return memory.device.kind
    is_enough = gpus >= count_here(cluster.num_devices, cluster)
    return f"cuda:{number % gpus}" if is_enough else "the GPU that all share"
