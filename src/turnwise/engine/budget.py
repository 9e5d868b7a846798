"""How an engine splits its device's memory: merged weights, KV cache, training passes. Imports without torch.

A training pass keeps, per token and layer, what a block says that it keeps (`engine/model/kept.py`). On top comes the
larger of two things that never exist at the same time: a chunk of logits, or the gradients inside one layer. Models
that do not run the fused body keep about a third more. Only tensors are counted; Python and its libraries add some
hundred MiB.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from turnwise.engine.config import EngineConfig
from turnwise.engine.device_info import DeviceInfo
from turnwise.engine.model.fused_parts import is_fused
from turnwise.engine.model.kept import FLOAT32_BYTES, PLAIN_STRETCH, PassSizes, kept_bytes
from turnwise.models.facts import ModelSizes

GIB = 1 << 30
MAX_KV_TOKENS = 1 << 21
MIN_PASS_TOKENS, MAX_PASS_TOKENS = 256, 32768
"""Bounds for a GPU: longer passes are not faster, and shorter ones leave the card idle."""
SHARING_STRETCH = 4
"""A pass whose datums share a prefix may hold this many times the tokens of one that shares nothing."""
USUAL_RANK = 64
"""The rank that is assumed before the first adapter exists."""
WINDOW_SLACK_BLOCKS = 4
"""KV blocks that a row holds beside those of its window, at most."""
STREAMS = 6
"""Tensors of the hidden size outside the layers: embedding, last norm, the head's rows, and their gradients."""
MERGED_SHARE = 0.25
"""The merged copy may take this share of the memory beside the weights; if it needs more, adapters are not merged."""


FULL_STATE_BYTES = 4 * FLOAT32_BYTES
"""Bytes of state per weight if all weights are trained: float32 master, gradient and AdamW's two moments."""
FULL_COPIES = 2
"""Copies in the model's dtype: one that passes and samplers read, one that the next update writes."""


@dataclass(frozen=True, slots=True)
class PassLimit:
    """Most tokens of one training pass."""

    alone: int
    """Limit if no datum shares its beginning with another."""
    sharing: int
    """Limit if datums share beginnings, so that each adds only its own tokens."""

    @classmethod
    def of(cls, tokens: int) -> PassLimit:
        return cls(tokens, SHARING_STRETCH * tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySplit:
    """What the sampler and the trainer of one engine may take beside the weights."""

    may_merge: bool
    """Whether there is room for a second copy of the adapted weights."""
    merged_bytes: int
    kv_tokens: int
    """Tokens whose keys and values fit, of layers that see everything; of the others if there is none."""
    kv_bytes: int
    kv_group_tokens: tuple[int, ...]
    """The same for every group of layers, in the order of `ModelSizes.kv_windows`."""
    training_bytes: int
    """Bytes for the activations that a pass keeps; `engine/model/kept.py` says what a longer pass does."""
    limit: PassLimit

    def line(self) -> str:
        """One line for a person."""
        merged = f"merged weights {format_bytes(self.merged_bytes)}" if self.may_merge else "no merged weights"
        return (
            f"{merged}, KV cache {format_bytes(self.kv_bytes)} ({self.kv_tokens:,} tokens), training "
            f"{format_bytes(self.training_bytes)} (passes of {self.limit.alone:,} tokens, up to "
            f"{self.limit.sharing:,} where beginnings are shared)"
        )


def format_bytes(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / (1 << 20):.1f} MiB"


def full_weights_bytes(num_parameters: int, device: DeviceInfo) -> int:
    """What training all weights takes beside the frozen base and the passes."""
    return num_parameters * (FULL_STATE_BYTES + FULL_COPIES * device.dtype_bytes)


def gathered_bytes(num_values: int, device: DeviceInfo, *, is_full: bool) -> int:
    """What passes take beside their activations where the weights are in parts: the unit of `num_values` that a pass
    uses, the one before it, and the float32 gradient of one if all weights are trained."""
    return num_values * (2 * device.dtype_bytes + (FLOAT32_BYTES if is_full else 0))


def split_memory(
    config: EngineConfig,
    device: DeviceInfo,
    sizes: ModelSizes,
    *,
    adapted_parameters: int,
    context_length: int,
    num_parameters: int = 0,
) -> MemorySplit:
    """`device.free_bytes` is what a GPU has left beside the weights.

    Args:
        num_parameters: of the model, for an engine that trains all of them (`config.full_weights`).
    """
    left, merged = _left_bytes(config, device), adapted_parameters * device.dtype_bytes
    if config.full_weights:
        left, merged = max(0, left - full_weights_bytes(num_parameters, device)), 0
    may_merge = config.merge_adapter == "always" or (config.merge_adapter == "auto" and merged <= MERGED_SHARE * left)
    may_merge = may_merge and not config.full_weights and not config.bitwise
    left = max(0, left - merged) if may_merge and device.facts.has_own_memory else left
    budget = config.kv_cache_gib * GIB or device.facts.kv_cache_bytes or left / 2
    groups = _kv_group_tokens(config, device, sizes, budget, context_length)
    kv_bytes = sum(n * sizes.kv_group_values(w) for n, w in zip(groups, sizes.kv_windows, strict=True))
    kv_bytes *= device.activation_bytes
    training = int(left - kv_bytes) if device.facts.has_own_memory else int(left / 2)
    return MemorySplit(
        may_merge=may_merge,
        merged_bytes=merged if may_merge else 0,
        kv_tokens=groups[0],
        kv_bytes=kv_bytes,
        kv_group_tokens=groups,
        training_bytes=max(0, training),
        limit=_pass_limit(config, device, sizes, training),
    )


def _kv_group_tokens(
    config: EngineConfig, device: DeviceInfo, sizes: ModelSizes, budget: float, context_length: int
) -> tuple[int, ...]:
    """Tokens of each group of layers.

    Beside layers that see everything, those with a window get what the windows of all rows need, and a row that reads.
    """
    most = min(MAX_KV_TOKENS, config.max_num_seqs * context_length)
    windows = sizes.kv_windows
    reading = config.prefill_tokens or device.facts.prefill_tokens
    limits = [
        most
        if window is None or windows[0] is not None
        else min(most, config.max_num_seqs * (window + WINDOW_SLACK_BLOCKS * config.block_size) + reading)
        for window in windows
    ]
    each = [sizes.kv_group_values(window) * device.activation_bytes for window in windows]
    tokens, left, rest = most, budget, sum(each)
    for limit, cost in sorted(zip(limits, each, strict=True)):
        tokens = int(left // rest)
        if tokens <= limit:
            break
        left, rest, tokens = left - limit * cost, rest - cost, limit
    return tuple(min(tokens, limit) for limit in limits)


def _left_bytes(config: EngineConfig, device: DeviceInfo) -> float:
    """Bytes to plan with: on a GPU the free part of this process's share, on a CPU half of the machine's memory."""
    if device.facts.has_own_memory:
        return max(0.0, device.free_bytes - (1 - config.gpu_memory_utilization) * device.total_bytes)
    return machine_bytes() / 2


def machine_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _pass_limit(config: EngineConfig, device: DeviceInfo, sizes: ModelSizes, training_bytes: int) -> PassLimit:
    if config.micro_batch_tokens:
        return PassLimit.of(config.micro_batch_tokens)
    if device.facts.pass_tokens is not None:
        return PassLimit(*device.facts.pass_tokens)
    logits = _logits_bytes(sizes, device, MAX_PASS_TOKENS, train_unembed=True)
    each = _bytes_per_token(sizes, device, USUAL_RANK) * (1 if is_fused(sizes) else PLAIN_STRETCH)
    fits = int((training_bytes - logits) // each)
    alone = min(max(fits, MIN_PASS_TOKENS), MAX_PASS_TOKENS)
    return PassLimit(alone, min(max(fits, alone), SHARING_STRETCH * MAX_PASS_TOKENS))


def training_pass_bytes(
    sizes: ModelSizes, device: DeviceInfo, num_tokens: int, *, rank: int, train_unembed: bool
) -> int:
    """What a pass over `num_tokens` packed tokens, all of them trained, needs besides weights and adapter."""
    in_layer = num_tokens * _in_layer_bytes(sizes, device)
    kept = num_tokens * _bytes_per_token(sizes, device, rank) - in_layer
    return kept + max(in_layer, _logits_bytes(sizes, device, num_tokens, train_unembed))


def recomputed_pass_bytes(
    sizes: ModelSizes, device: DeviceInfo, num_tokens: int, *, rank: int, train_unembed: bool
) -> int:
    """The same for a pass that keeps each layer's input only, and computes everything inside a layer twice."""
    inputs = 2 * sizes.num_layers * sizes.hidden_size * device.activation_bytes  # the stream and what is added to it
    outside = STREAMS * sizes.hidden_size * device.activation_bytes
    in_layer = kept_bytes(sizes, device.activation_bytes, rank, device.facts) + _in_layer_bytes(sizes, device)
    return num_tokens * (inputs + outside) + max(
        num_tokens * in_layer, _logits_bytes(sizes, device, num_tokens, train_unembed)
    )


def split_pass_bytes(
    sizes: ModelSizes, device: DeviceInfo, num_tokens: int, *, rank: int, train_unembed: bool, part_tokens: int
) -> int:
    """The same for one sequence in parts: what stays of all tokens, and a pass over one part."""
    past = num_tokens * PassSizes(sizes, device.activation_bytes, rank, device.facts).past
    return past + training_pass_bytes(sizes, device, part_tokens, rank=rank, train_unembed=train_unembed)


def _bytes_per_token(sizes: ModelSizes, device: DeviceInfo, rank: int) -> int:
    """Bytes per token: all layers, the tensors outside them, and the gradients inside one layer."""
    kept = sizes.num_layers * kept_bytes(sizes, device.activation_bytes, rank, device.facts)
    return kept + STREAMS * sizes.hidden_size * device.activation_bytes + _in_layer_bytes(sizes, device)


def _in_layer_bytes(sizes: ModelSizes, device: DeviceInfo) -> int:
    each = FLOAT32_BYTES if device.facts.widens_gradients else device.activation_bytes
    # Every expert of a token has rows of its own: gathered inputs, gradients of outputs and of inputs.
    rows = 3 * sizes.experts.num_chosen * sizes.hidden_size if sizes.experts is not None else 0
    return (device.facts.wide_gradients * sizes.active_inner_size + rows) * each


def _logits_bytes(sizes: ModelSizes, device: DeviceInfo, num_rows: int, train_unembed: bool) -> int:
    """Bytes of a chunk's logits and the adapter's part of them, plus the rest of the chunk before."""
    size, is_fused = device.activation_bytes, device.facts.fuses_softmax
    cast = size if size < FLOAT32_BYTES else 0
    own = size if is_fused else FLOAT32_BYTES + cast
    low_rank = FLOAT32_BYTES + cast if train_unembed else 0
    each = max(own, size + low_rank)
    before = size if is_fused else FLOAT32_BYTES
    num_logits = num_rows * sizes.vocab_size
    first = min(num_logits, device.facts.logits_chunk_bytes // FLOAT32_BYTES)
    second = min(num_logits - first, first)
    return max(first * each, first * before + second * each if second else 0)
