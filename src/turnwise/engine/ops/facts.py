"""What an engine knows about a kind of device before it uses it. This file imports without torch."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """How the ops of one kind of device use memory and time."""

    default_dtype: str
    """Dtype of the frozen weights where the config says `auto`."""
    is_async: bool
    """Launches return before the device has done the work, so the host can prepare the next step meanwhile."""
    prefers_few_launches: bool
    """A launch costs more than reading an input again."""
    keeps_normed_inputs: bool
    """A training pass keeps the outputs of the norms; else backward computes them again from the residual stream."""
    rotates_in_place: bool
    """A training pass rotates float32 heads without norms in place, and keeps one copy of them."""
    has_wide_activations: bool
    """Activations, keys and values, and adapters in use are float32 whatever the dtype of the weights is."""
    widens_gradients: bool
    """The gradients inside a layer are float32 whatever the dtype of the activations is."""
    wide_gradients: int
    """Tensors of the MLP's hidden width that live at once in a layer's backward pass; fused kernels need fewer."""
    fuses_softmax: bool
    """The softmax over the vocabulary reads logits in the model's dtype and makes no float32 copy of them."""
    logits_chunk_bytes: int
    """Size of one chunk's logits, counted in float32."""
    prefill_tokens: int
    """Prompt tokens that one sampler step reads at most, where the config does not say."""
    has_own_memory: bool
    """The device has its own memory, and the engine may plan with all of it; else it shares the machine's memory."""
    kv_cache_bytes: int | None
    """Size of the KV cache, where the config does not say; None: half of what the weights leave."""
    pass_tokens: tuple[int, int] | None
    """Most tokens of a training pass, without and with shared beginnings; None: as many as the memory holds."""


CPU = DeviceFacts(
    default_dtype="float32",
    is_async=False,
    prefers_few_launches=False,
    keeps_normed_inputs=False,
    rotates_in_place=True,
    has_wide_activations=True,
    widens_gradients=True,
    wide_gradients=8,
    fuses_softmax=False,
    logits_chunk_bytes=96 << 20,
    prefill_tokens=512,
    has_own_memory=False,
    kv_cache_bytes=GIB,
    pass_tokens=(2048, 4096),  # a longer pass is hardly faster and needs more memory
)
CUDA = DeviceFacts(
    default_dtype="bfloat16",
    is_async=True,
    prefers_few_launches=True,
    keeps_normed_inputs=True,
    rotates_in_place=False,
    has_wide_activations=False,
    widens_gradients=False,
    wide_gradients=4,
    fuses_softmax=True,
    logits_chunk_bytes=GIB,
    prefill_tokens=16384,
    has_own_memory=True,
    kv_cache_bytes=None,
    pass_tokens=None,
)
DEVICES = {"cpu": CPU, "cuda": CUDA}
"""Facts by kind of device."""


def facts_of(kind: str) -> DeviceFacts:
    """The facts of `cpu` or `cuda`; a device that is neither is used as a CPU is."""
    return DEVICES.get(kind, CPU)
