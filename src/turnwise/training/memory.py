"""What a run takes of its device's memory, from sizes alone: weights, adapter, KV cache and one training pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from turnwise.config.config import Config
from turnwise.engine.budget import (
    FLOAT32_BYTES,
    SHARING_STRETCH,
    MemorySplit,
    format_bytes,
    full_weights_bytes,
    gathered_bytes,
    machine_bytes,
    recomputed_pass_bytes,
    split_memory,
    split_pass_bytes,
    training_pass_bytes,
)
from turnwise.engine.config import EngineConfig
from turnwise.engine.device_info import DeviceInfo
from turnwise.engine.machine_share import count_here
from turnwise.engine.model.fused_parts import check_split, is_fused
from turnwise.engine.model.kept import PLAIN_STRETCH, KeptChoice, KeptRoom, PassSizes
from turnwise.errors import ConfigError
from turnwise.models.facts import ModelFacts
from turnwise.rollout.limits import RolloutLimits

ADAPTER_COPIES = 6
"""Weights, gradient, two Adam moments, the copy that is sampled from, and the gradient before a pass that may fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes by purpose."""

    device: DeviceInfo
    weights: int
    trained: str
    """`lora` or `full`."""
    merged: int
    """The adapted weights once more, with the adapter added in: what the sampler reads."""
    adapter: int
    """What is trained (an adapter, or all weights), with gradient, optimizer state and the copies to sample from."""
    kv_cache: int
    training_pass: int
    num_pass_tokens: int
    """Most tokens of one training pass."""
    is_recomputed: bool = False
    """The pass keeps each layer's input only: all activations would be more than there is room for."""
    num_part_tokens: int = 0
    """Tokens of a part, if dialogues longer than a pass run in parts (`engine/model/parts.py`); 0: they run whole."""
    is_pass_chosen: bool = False
    """The user set the length of a pass."""
    learners: int = 1
    """Processes that each take as much."""
    learners_here: int = 1
    """Those of them on this machine; on a CPU they share its memory."""
    opponents: int = 0
    """Weights and KV caches of opponents with other base models on the same device, which are loaded first."""
    gathered: int = 0
    """Room for the blocks that a pass gathers, where each learner holds a part of the weights."""

    @property
    def total(self) -> int:
        return self.num_fixed + self.kv_cache + self.training_pass

    @property
    def num_fixed(self) -> int:
        """Bytes that the run needs in any case. The KV cache and the passes take what is left."""
        return self.weights + self.merged + self.adapter + self.gathered + self.opponents

    @property
    def num_needed(self) -> int:
        """Bytes without which the run cannot begin: it leaves the merged copy out if that does not fit."""
        return self.weights + self.adapter + self.gathered

    def check_fits(self) -> None:
        """Refuse a run whose weights and training state alone are more than the device holds."""
        is_gpu = self.device.facts.has_own_memory
        capacity = self.device.free_bytes if is_gpu else machine_bytes()
        needed = self.num_fixed if is_gpu else self.num_fixed * self.learners_here
        if needed <= capacity:
            self._check_pass(capacity)
            return
        where = "the GPU has free" if is_gpu else "this machine has"
        what = "weights, opponents and what is trained" if self.opponents else "weights and what is trained"
        hint = "model.train=lora, or a smaller model" if self.trained == "full" else "a smaller model"
        hint += ", or opponent.device or less opponent.kv_cache_gib" if self.opponents else ""
        hint += ", or more learners" if self.gathered else ", or cluster.learners with cluster.shard=true"
        of_all = f" of {self.learners_here} learners" if self.learners_here > 1 and not is_gpu else ""
        raise ConfigError(
            f"{what}{of_all} need {format_bytes(needed)}, and {where} {format_bytes(capacity)}; "
            f"use {hint}. In all: {self.line()}"
        )

    def _check_pass(self, capacity: int) -> None:
        """Refuse passes that the user made longer than what is left of the device."""
        in_all = self.num_fixed + self.kv_cache + self.training_pass
        is_cut = self.num_part_tokens > 0
        if not (self.is_recomputed or is_cut) or not self.is_pass_chosen or in_all <= capacity:
            return
        left = max(0, capacity - self.num_fixed - self.kv_cache)
        fitting = int(self.num_pass_tokens * left / self.training_pass)
        least = f"in parts of {self.num_part_tokens:,}" if is_cut else "if activations are computed twice"
        raise ConfigError(
            f"engine.micro_batch_tokens lets a training pass hold {self.num_pass_tokens:,} tokens, which need "
            f"{format_bytes(self.training_pass)} even {least}; {format_bytes(left)} of "
            f"{format_bytes(capacity)} are left, which hold about {fitting:,} tokens. Leave the option out, or use "
            f"engine.micro_batch_tokens={max(1, fitting // SHARING_STRETCH)}. In all: {self.line()}"
        )

    def line(self) -> str:
        """The memory as a line of the plan."""
        is_full = self.trained == "full"
        twice = " (activations computed twice)" if self.is_recomputed else ""
        twice = f" (in parts of {self.num_part_tokens:,})" if self.num_part_tokens else twice
        parts = {
            "frozen base" if is_full else "weights": self.weights,
            **({} if is_full else {"their merged copy": self.merged}),
            "trained weights and optimizer" if is_full else "adapter and optimizer": self.adapter,
            **({"gathered blocks": self.gathered} if self.gathered else {}),
            **({"opponents": self.opponents} if self.opponents else {}),
            "KV cache": self.kv_cache,
            f"training pass of up to {self.num_pass_tokens:,} tokens{twice}": self.training_pass,
        }
        is_gpu = self.device.facts.has_own_memory
        where = f"of {format_bytes(self.device.total_bytes)} on the GPU" if is_gpu else "on the CPU"
        spelled = ", ".join(f"{name} {format_bytes(value)}" for name, value in parts.items())
        parts = ", which hold the weights in parts" if self.gathered else ""
        each = f", in each of {self.learners} learners{parts}" if self.learners > 1 else ""
        return f"about {format_bytes(self.total)} {where} in {self.device.dtype}{each}: {spelled}"


def estimate_memory(
    config: Config,
    engine: EngineConfig,
    device: DeviceInfo,
    facts: ModelFacts,
    limits: RolloutLimits,
    num_attempts: int,
) -> Memory:
    """The memory of a run with this config.

    Args:
        num_attempts: dialogues that one optimizer step learns from, at most.
    """
    model, size = config.model, device.dtype_bytes
    parts = config.cluster.learners if config.cluster.shard else 1
    weights, gathered = facts.num_parameters * size // parts, _gathered_bytes(config, device, facts)
    split = split_memory(
        engine.model_copy(update={"merge_adapter": "never"}) if gathered else engine,
        replace(device, free_bytes=max(0, device.free_bytes - weights - gathered - device.reserved_bytes)),
        facts,
        adapted_parameters=sum(shape.num_values for shape in facts.linears.values()),
        context_length=facts.context_length,
        num_parameters=facts.num_parameters // parts,
    )
    num_tokens = pass_tokens(split, limits, num_attempts, facts.angle_switch)
    check_split(facts, engine.activations, is_sharded=config.cluster.shard)
    choice, training_pass = _longest_pass(config, engine, device, facts, split, num_tokens)
    return Memory(
        device=device,
        weights=weights,
        trained=model.train,
        merged=facts.num_adapted_parameters(model) * size if split.may_merge else 0,
        adapter=_adapter_bytes(config, device, facts),
        kv_cache=split.kv_bytes,
        training_pass=training_pass,
        num_pass_tokens=num_tokens,
        is_recomputed=not choice.keeps_all,
        num_part_tokens=choice.part_tokens,
        is_pass_chosen=engine.micro_batch_tokens > 0,
        learners=config.cluster.learners,
        learners_here=count_here(config.cluster.learners, config.cluster),
        gathered=gathered,
        opponents=device.reserved_bytes,
    )


def check_sharded(config: Config, facts: ModelFacts, device: DeviceInfo) -> None:
    """Refuse to hold a model in parts where that does not work, before anything is loaded."""
    if facts.experts is not None:
        raise ConfigError(
            "cluster.shard=true with a model that routes tokens to experts: its weights cannot be shared out yet; "
            "leave it out, or use a model with dense blocks"
        )
    if not is_fused(facts):
        raise ConfigError(
            "cluster.shard=true with a model that runs transformers' layers: its weights cannot be shared out yet; "
            "leave it out, or use a model with layers of ours (docs/models.md)"
        )
    if config.rollout.backend == "local" and device.facts.has_own_memory and not config.cluster.has_own_samplers:
        raise ConfigError(
            "cluster.shard=true with rollout.backend=local: the sampler of this process would gather the model for "
            "every token; use rollout.backend=vllm or sglang with rollout.tensor_parallel_size, or "
            "cluster.placement=separate if the model fits one GPU for sampling"
        )


def _gathered_bytes(config: Config, device: DeviceInfo, facts: ModelFacts) -> int:
    """Room for the largest unit of the weights: a block, or the embedding."""
    if not config.cluster.shard:
        return 0
    unit = max(facts.vocab_size * facts.hidden_size, facts.num_parameters // max(1, facts.num_layers))
    return gathered_bytes(unit, device, is_full=config.model.train == "full")


def _longest_pass(
    config: Config, engine: EngineConfig, device: DeviceInfo, facts: ModelFacts, split: MemorySplit, num_tokens: int
) -> tuple[KeptChoice, int]:
    """What the engine will choose for its longest pass, and the bytes that it needs.

    A pass that is longer than others may be is one dialogue, which may run in parts. The longest pass over several
    dialogues is never cut, so it may need more if its activations do not fit either.
    """
    model = config.model
    rank, train_unembed = (0, False) if model.train == "full" else (model.rank, model.train_unembed)
    one = PassSizes(facts, device.activation_bytes, rank, device.facts)
    room = KeptRoom(split.training_bytes, engine.activations, split.limit.alone)
    is_ours, shared = is_fused(facts), min(num_tokens, split.limit.sharing)
    can_split = is_ours and not config.cluster.shard and not model.routing_replay

    def choose(count: int) -> KeptChoice:
        return room.choose(
            one, count if is_ours else int(count * PLAIN_STRETCH), can_split=can_split and count > shared
        )

    def needed(of_pass: Callable[..., int], count: int) -> int:
        return of_pass(facts, device, count, rank=rank, train_unembed=train_unembed)

    choice = choose(num_tokens)
    if choice.part_tokens:
        parted = functools.partial(split_pass_bytes, part_tokens=choice.part_tokens)
        whole = 0 if choose(shared).keeps_all else needed(recomputed_pass_bytes, shared)
        return choice, max(needed(parted, num_tokens), whole)
    return choice, needed(training_pass_bytes if choice.keeps_all else recomputed_pass_bytes, num_tokens)


def pass_tokens(split: MemorySplit, limits: RolloutLimits, num_attempts: int, switch: int | None = None) -> int:
    """Most tokens of a pass: what dialogues that share a beginning may fill, and any one dialogue whole.

    What the world says is not known here; a dialogue counts with what the policy may say in it. One of more than
    `switch` tokens runs once more up to there (`engine/training/pack.py`).
    """

    def run(count: int) -> int:
        return count if switch is None or count <= switch else count + switch

    said = min(limits.max_turns * limits.max_tokens_per_turn, limits.max_trajectory_tokens)
    return min(max(split.limit.sharing, run(said)), max(1, num_attempts) * run(limits.max_trajectory_tokens))


def _adapter_bytes(config: Config, device: DeviceInfo, facts: ModelFacts) -> int:
    """What is trained of the policy with its state, and the critic's adapter where the method has one."""
    model = config.model
    if model.train == "full":
        before = FLOAT32_BYTES if config.train.accumulate > 1 else 0  # a gradient to go back to after a failed pass
        own = facts.num_parameters // (config.cluster.learners if config.cluster.shard else 1)
        total = full_weights_bytes(own, device) + own * before
    else:
        cast = device.activation_bytes if device.activation_bytes < FLOAT32_BYTES else 0
        total = facts.num_adapter_parameters(model) * (FLOAT32_BYTES * ADAPTER_COPIES + 2 * cast)
    if config.method.needs_critic:
        without_head = model.model_copy(update={"train_unembed": False, "rank": config.critic.rank or model.rank})
        total += facts.num_adapter_parameters(without_head) * FLOAT32_BYTES * (ADAPTER_COPIES - 2)
    return total
