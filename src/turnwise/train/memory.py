"""What a run takes of its device's memory, from sizes alone: weights, adapter, KV cache and one training pass.

A training pass keeps, per token and layer, what the engine's hand-written backward pass reads (`engine.body`): the
residual stream and its norms, the projections, attention's inputs and output, the gate, and each adapter's low-rank
products. On top comes the larger of two things that never meet: a chunk of logits, or the gradients inside one layer.
Models outside the Llama family keep about a third more. Numbers are of tensors; Python and its libraries add some
hundred MiB.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.engine.config import EngineConfig
from turnwise.engine.place import LOGITS_CHUNK_BYTES, MICRO_BATCH_TOKENS, TREE_STRETCH, Place, count_kv_tokens
from turnwise.rollout.limits import RolloutLimits
from turnwise.train.config import Config
from turnwise.train.critic_config import CRITIC_METHODS
from turnwise.train.facts import ModelFacts

GIB = 1 << 30
FLOAT32_BYTES = 4
ADAPTER_COPIES = 6
"""Weights, gradient, two Adam moments, the copy that is sampled from, and the gradient before a pass that may fail."""
LOW_RANK_PARTS = 7
"""Products of x and A in a layer: query, key, value, output, gate, up, down."""
WIDE_GRADIENTS = {"cpu": 8, "cuda": 4}
"""Tensors of the MLP's inner size that live at once in a layer's backward pass; kernels fuse some of them."""
STREAMS = 6
"""Tensors of the hidden size outside the layers: embedding, last norm, the head's rows, and their gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes by purpose."""

    place: Place
    weights: int
    merged: int
    """The adapted weights once more, with the adapter added in: what the sampler reads."""
    adapter: int
    kv_cache: int
    training_pass: int
    num_pass_tokens: int
    """Most tokens of one training pass."""

    @property
    def total(self) -> int:
        return self.weights + self.merged + self.adapter + self.kv_cache + self.training_pass

    def line(self) -> str:
        """As the plan says it."""
        parts = {
            "weights": self.weights,
            "their merged copy": self.merged,
            "adapter and optimizer": self.adapter,
            "KV cache": self.kv_cache,
            f"training pass of up to {self.num_pass_tokens:,} tokens": self.training_pass,
        }
        is_gpu = self.place.device == "cuda"
        where = f"of {format_bytes(self.place.total_bytes)} on the GPU" if is_gpu else "on the CPU"
        spelled = ", ".join(f"{name} {format_bytes(value)}" for name, value in parts.items())
        return f"about {format_bytes(self.total)} {where} in {self.place.dtype}: {spelled}"


def format_bytes(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / (1 << 20):.1f} MiB"


def estimate_memory(
    config: Config, engine: EngineConfig, place: Place, facts: ModelFacts, limits: RolloutLimits, num_attempts: int
) -> Memory:
    """Of a run with this config.

    Args:
        num_attempts: dialogues that one optimizer step learns from, at most.
    """
    model, size = config.model, place.dtype_bytes
    weights = facts.num_parameters * size
    beside = Place(
        device=place.device,
        dtype=place.dtype,
        free_bytes=max(0, place.free_bytes - weights),
        total_bytes=place.total_bytes,
    )
    kv_bytes = facts.kv_values_per_token * size
    kv_tokens = count_kv_tokens(engine, beside, bytes_per_token=kv_bytes, context_length=facts.context_length)
    num_tokens = pass_tokens(engine, place, limits, num_attempts)
    return Memory(
        place=place,
        weights=weights,
        merged=facts.num_adapted_parameters(model) * size,
        adapter=_adapter_bytes(config, place, facts),
        kv_cache=kv_tokens * kv_bytes,
        training_pass=training_pass_bytes(facts, place, num_tokens, rank=model.rank, train_unembed=model.train_unembed),
        num_pass_tokens=num_tokens,
    )


def pass_tokens(engine: EngineConfig, place: Place, limits: RolloutLimits, num_attempts: int) -> int:
    """Most tokens of a pass: four micro-batches where dialogues share a beginning, and any one dialogue whole.

    What the world says is not known here; a dialogue counts with what the policy may say in it.
    """
    micro_batch = engine.micro_batch_tokens or MICRO_BATCH_TOKENS[place.device]
    said = min(limits.max_turns * limits.max_tokens_per_turn, limits.max_trajectory_tokens)
    return min(max(TREE_STRETCH * micro_batch, said), max(1, num_attempts) * limits.max_trajectory_tokens)


def training_pass_bytes(facts: ModelFacts, place: Place, num_tokens: int, *, rank: int, train_unembed: bool) -> int:
    """What a pass over `num_tokens` packed tokens, all of them trained, needs besides weights and adapter."""
    size = place.dtype_bytes
    kept = facts.num_layers * _kept_per_token(facts, rank, size)
    streams = STREAMS * facts.hidden_size * size
    in_layer = WIDE_GRADIENTS[place.device] * facts.inner_size * (FLOAT32_BYTES if place.device == "cpu" else size)
    return num_tokens * (kept + streams) + max(
        num_tokens * in_layer, _logits_bytes(facts, place, num_tokens, train_unembed)
    )


def _kept_per_token(facts: ModelFacts, rank: int, size: int) -> int:
    """Bytes of `engine.body._LayerSaved` for one token."""
    query, key = facts.num_heads * facts.head_size, facts.num_kv_heads * facts.head_size
    residual = 4 * facts.hidden_size
    projections = query + 2 * key
    attention = query + key + query
    values = residual + projections + attention + 2 * facts.inner_size + LOW_RANK_PARTS * rank
    statistics = 2 + facts.num_heads
    return values * size + statistics * FLOAT32_BYTES


def _logits_bytes(facts: ModelFacts, place: Place, num_rows: int, train_unembed: bool) -> int:
    """Logits of a chunk and the adapter's part of them, beside what is left of the chunk before."""
    size, is_fused = place.dtype_bytes, place.device == "cuda"
    cast = size if size < FLOAT32_BYTES else 0
    own = size if is_fused else FLOAT32_BYTES + cast
    low_rank = FLOAT32_BYTES + cast if train_unembed else 0
    each = max(own, size + low_rank)
    before = size if is_fused else FLOAT32_BYTES
    num_logits = num_rows * facts.vocab_size
    first = min(num_logits, LOGITS_CHUNK_BYTES[place.device] // FLOAT32_BYTES)
    second = min(num_logits - first, first)
    return max(first * each, first * before + second * each if second else 0)


def _adapter_bytes(config: Config, place: Place, facts: ModelFacts) -> int:
    """The policy's adapter with its state, and the critic's where the method has one."""
    model = config.model
    cast = place.dtype_bytes if place.dtype_bytes < FLOAT32_BYTES else 0
    total = facts.num_adapter_parameters(model) * (FLOAT32_BYTES * ADAPTER_COPIES + 2 * cast)
    if config.method.name in CRITIC_METHODS:
        without_head = model.model_copy(update={"train_unembed": False})
        num_critic = facts.num_adapter_parameters(without_head, config.critic.rank)
        total += num_critic * FLOAT32_BYTES * (ADAPTER_COPIES - 2)
    return total
