"""The interface of `engine/ops`: what a device computes for the engine, and the values that its functions take.

`Ops` has one field per subject. A field holds a module or an object that has the functions of its protocol, so an
implementation is a table of modules (`torch_ops.py`, `cpu_ops.py`, `cuda_ops.py`).

Shape legend: N packed tokens, H hidden size, Q query heads, K key (and value) heads, D head size, I inner size,
B rows to draw for, R rows of logits, V vocabulary, M rows and G groups of an expert product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from turnwise.engine.ops.facts import DeviceFacts

if TYPE_CHECKING:
    from turnwise.engine.attention.plans import PagedPlan, TreePlan


@dataclass(frozen=True, slots=True)
class Heads:
    """How the joined projection [N, (Q + 2 K) D] divides, and the norms that some models lay on its heads."""

    num_query: int
    num_kv: int
    size: int
    query_norm: Tensor | None
    key_norm: Tensor | None
    eps: float

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views [N, heads, D] of query, key and value."""
        heads = qkv.view(len(qkv), -1, self.size)
        return heads[:, : self.num_query], heads[:, self.num_query : -self.num_kv], heads[:, -self.num_kv :]


@dataclass(frozen=True, slots=True)
class SoftmaxGradients:
    """What the gradient of a softmax over logits [R, V] needs to know of each row; every tensor is float32 [R]."""

    temperature: Tensor
    logsumexps: Tensor
    """log-sum-exp of logits / temperature."""
    grads: Tensor
    """d loss / d logprob, summed over the row's targets."""
    entropies: Tensor | None = None
    grad_entropies: Tensor | None = None
    """d loss / d entropy. None, like `entropies`, where the loss has no entropy term."""


@dataclass(frozen=True, slots=True)
class CacheSlots:
    """The memory for rotated keys and values: `keys` and `values` are [slots, K, D]."""

    keys: Tensor
    values: Tensor
    slots: Tensor
    """[N] the slot of each token."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary position: cos and sin of every position [P, D / 2] float32, and the position of each packed token [N]."""

    cos: Tensor
    sin: Tensor
    positions: Tensor

    def of_tokens(self) -> tuple[Tensor, Tensor]:
        """cos and sin [N, 1, D / 2]."""
        return self.cos[self.positions][:, None], self.sin[self.positions][:, None]


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How scores become attention in one layer: softmax(cap(scale q k')) v over what a position sees."""

    scale: float
    window: int | None = None
    """The positions that a position sees, its own included; None: everything before it."""
    softcap: float | None = None
    """Scores become softcap tanh(score / softcap)."""
    sinks: Tensor | None = None
    """[Q] per query head, a score without a value that takes part in the softmax."""

    def within(self, length: int) -> AttentionRule:
        """The rule of a sequence of `length` tokens: a window that is as long is no window."""
        return self if self.window is None or length > self.window else self.without_window()

    def without_window(self) -> AttentionRule:
        return self if self.window is None else replace(self, window=None)


class Saved(NamedTuple):
    """What the backward pass of attention reads: heads-first query, key and value; tokens-first output."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    logsumexp: Tensor


@dataclass(frozen=True, slots=True)
class TailCut:
    """What is left out of the vocabulary before a draw, [B] each."""

    top_k: Tensor
    """Number of the most likely tokens that stay; 0 or less: all of them."""
    top_p: Tensor
    min_p: Tensor


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """How the next tokens are drawn, [B] each."""

    temperature: Tensor
    """0 takes the most likely token."""
    uniform: Tensor
    """The random number in [0, 1) of each row."""
    cut: TailCut | None = None
    """None where every row draws from the whole vocabulary."""


def padded_size(count: int, least: int, base: int) -> int:
    """The size to which a captured graph is padded: the first of least, least * base, ... that is not below `count`."""
    size = least
    while size < count:
        size *= base
    return size


@dataclass(frozen=True, slots=True)
class Captured:
    """A step that was captured as a graph: `replay` runs it on whatever `inputs` holds, and writes to `outputs`."""

    replay: Callable[[], object]
    inputs: Tensor
    outputs: Tensor


class LayerOps(Protocol):
    """The small steps between a decoder layer's matrix products; sums run in float32, norm weights get no gradient.

    A `room` is a tensor that nobody reads any more; an implementation may write its result there.
    """

    def add_norm(
        self, h: Tensor, delta: Tensor | None, weight: Tensor, eps: float, *, room: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """h + delta, its RMS norm times `weight`, and 1 / rms [N]."""
        ...

    def norm_backward(self, dx: Tensor, h: Tensor, rstd: Tensor, weight: Tensor, dh: Tensor | None) -> Tensor:
        """Gradient of `add_norm` with respect to its sum, added to `dh` (the gradient of the residual path)."""
        ...

    def rotate(
        self, qkv: Tensor, heads: Heads, rotation: Rotation, cache: CacheSlots | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Head norms and rotary position: query [N, Q, D], key and value [N, K, D], also written to the cache."""
        ...

    def rotate_backward(
        self, grads: tuple[Tensor, Tensor, Tensor], qkv: Tensor | None, heads: Heads, rotation: Rotation
    ) -> Tensor:
        """Gradient of the joined projection [N, (Q + 2 K) D]; `qkv` is needed where heads are normed."""
        ...

    def swiglu(self, gate_up: Tensor, *, room: Tensor | None = None) -> Tensor:
        """silu(gate) * up, from [N, 2 I]."""
        ...

    def swiglu_backward(self, dact: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient of `gate_up`, and the activation once more; both inputs may be overwritten."""
        ...


class ProductOps(Protocol):
    """Matrix products with frozen weights, and adapters' low-rank parts; none of them records a gradient."""

    def linear(self, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """x W' + b."""
        ...

    def multiply(
        self, a_MK: Tensor, b_KN: Tensor, *, out: Tensor | None = None, alpha: float = 1.0, is_added: bool = False
    ) -> Tensor:
        """alpha a b, written to `out` or added to it where given."""
        ...

    def takes_low_rank_along(self, x_NI: Tensor) -> bool:
        """Whether a product with these rows is faster when it adds its adapter's part itself."""
        ...

    def multiply_with_low_rank(
        self, a_MK: Tensor, b_KN: Tensor, low_a: Tensor, low_b: Tensor, *, out: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        """a b + scale low_a low_b; the large product is written once, its low-rank part included."""
        ...

    def low_rank_gradients(
        self, dy_NO: Tensor, low_Nr: Tensor, b_Or: Tensor, grad_b: Tensor, *, out: Tensor, scale: float
    ) -> None:
        """For y = scale low B': write d loss / d low to `out`, and add d loss / d B to `grad_b`."""
        ...

    def empty_rows(self, like: Tensor, rows: int, cols: int) -> Tensor:
        """An empty [rows, cols] tensor for the result of a product, in the layout that this device reads fastest."""
        ...


class AttentionOps(Protocol):
    """Attention over the plans of `engine/attention`.

    Tensors come heads-first [1, heads, tokens, D] and results go tokens-first [1, tokens, heads, D].
    """

    def tree_forward(
        self, query: Tensor, key: Tensor, value: Tensor, plan: TreePlan, rule: AttentionRule
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp [1, heads, tokens] of a packed forest."""
        ...

    def tree_backward(
        self, grad_out: Tensor, saved: Saved, plan: TreePlan, rule: AttentionRule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value; sinks are in `saved.out` and `saved.logsumexp`."""
        ...

    def prefill(
        self, query: Tensor, key: Tensor, value: Tensor, plan: PagedPlan, layer: int, rule: AttentionRule
    ) -> Tensor:
        """New prompt tokens attend to themselves causally and to their sequence's cached tokens."""
        ...

    def paged_decode(self, query: Tensor, layer: tuple[Tensor, Tensor], plan: PagedPlan, rule: AttentionRule) -> Tensor:
        """One query row [heads, D] per sequence attends to the blocks of its sequence."""
        ...

    def can_capture_prefill(self, dtype: torch.dtype, head_size: int) -> bool:
        """Whether a pass over prompts can be captured as a graph."""
        ...


class SoftmaxOps(Protocol):
    """The softmax over the vocabulary in training, fused."""

    def row_stats(self, logits_RV: Tensor, temperature_R: Tensor) -> tuple[Tensor, Tensor]:
        """Log-sum-exp and mean of logits / temperature under their softmax, [R] each; entropy is the difference."""
        ...

    def row_gradients(self, logits_RV: Tensor, rows: SoftmaxGradients) -> Tensor:
        """Write d loss / d logit, without the target's own part, over the logits:
        -(grad p + grad_entropy p (log p + H)) / T."""
        ...


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows in the order of their groups (of their experts): rows [ends[g - 1], ends[g]) belong to group g.

    Rows after the last end belong to no group.
    """

    order: Tensor
    """[M] int64: the row that stands at each place."""
    places: Tensor
    """[M] int64: the place of each row."""
    ends: Tensor
    """[G] int64."""
    host_ends: Sequence[int] | None = None
    """`ends` on the host, where the host may wait for them."""
    tiles: Tensor | None = None
    """[3, T] int32 of a kernel that works tile by tile: first place, number of rows, group."""


class ExpertOps(Protocol):
    """Products in which every row has its group's own matrix; none of them records a gradient."""

    can_capture: bool
    """Whether the host never waits for the device here, so that a step can be captured as a graph."""

    def group(self, keys_M: Tensor, num_groups: int) -> Groups:
        """Sort rows by their group; a row whose key is `num_groups` belongs to none."""
        ...

    def multiply(
        self,
        x_MI: Tensor,
        weights_GIO: Tensor,
        groups: Groups,
        *,
        out: Tensor | None = None,
        alpha: float = 1.0,
        is_added: bool = False,
    ) -> Tensor:
        """alpha x W of each row's group, written to `out` or added to it; x is in the order of the groups.

        Rows of no group become zero, or stay as they are where something is added.
        """
        ...

    def add_outer(self, left_MA: Tensor, right_MB: Tensor, groups: Groups, out_GAB: Tensor, alpha: float) -> None:
        """out += alpha left' right, for the rows of each group."""
        ...


class FewRowOps(Protocol):
    """A decode step of few rows, in few launches; none of them records a gradient."""

    def takes(self, num_rows: int, dtype: torch.dtype) -> bool:
        """Whether this is the fastest way for this number of rows."""
        ...

    def project(
        self,
        x_MI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        rest: Tensor | None = None,
        is_gated: bool = False,
    ) -> Tensor:
        """x W' + b, where x goes through a norm (weight, epsilon) first, gate and up become silu(gate) * up, and `rest`
        is added."""
        ...

    def attend(
        self, qkv: Tensor, heads: Heads, rotation: Rotation, plan: PagedPlan, layer: int, scale: float
    ) -> Tensor:
        """`LayerOps.rotate` with the cache, then `AttentionOps.paged_decode` over everything: [M, Q D]."""
        ...


class BlockTensors(NamedTuple):
    """What a sampler's pass reads of a decoder block with a gated MLP. Matrices are [O, I]."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    keys: Tensor
    """The layer of the KV cache [blocks, block size, K, D], as `values` is."""
    values: Tensor
    out: Tensor
    out_bias: Tensor | None
    inner_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    @property
    def others(self) -> list[Tensor]:
        """Norms, biases and the cache, where there are any."""
        biases = self.qkv_bias, self.out_bias, self.gate_up_bias, self.down_bias
        norms = self.input_norm, self.inner_norm, self.query_norm, self.key_norm
        return [one for one in (*norms, *biases, self.keys, self.values) if one is not None]


class StackOps(Protocol):
    """A sampler's pass through all blocks in few calls; nothing records a gradient."""

    def run(
        self,
        h_MH: Tensor,
        blocks: Sequence[BlockTensors],
        heads: Heads,
        rotation: Rotation,
        plan: PagedPlan,
        last_norm: Tensor,
        wanted: Tensor | None,
    ) -> Tensor | None:
        """Normed hidden states of the `wanted` rows (None: all), which the last block alone goes on with after its
        attention. `h` is overwritten. None where these tensors need another way."""
        ...


class PendingRead(Protocol):
    """A tensor on its way from the device to the host."""

    def wait(self) -> Tensor:
        """The tensor on the host, once it is there."""
        ...


class TransferOps(Protocol):
    """Copies between the host and the device."""

    def upload(self, array: np.ndarray) -> Tensor:
        """The array on the device; the host does not wait for the copy."""
        ...

    def upload_all(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """The arrays on the device, all in one copy."""
        ...

    def host_buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        """[size] uninitialised host memory that the device can copy from without the host's help."""
        ...

    def read_later(self, tensor: Tensor) -> PendingRead:
        """Start to copy a tensor to the host."""
        ...

    def wait(self) -> None:
        """Return when the device has done all that was launched."""
        ...


class GraphRecorder(Protocol):
    """Captures steps as graphs whose memory is shared: no two of them may run at once."""

    def capture(self, inputs: Tensor, step: Callable[[Tensor], Tensor]) -> Captured:
        """Run `step` on `inputs` and keep what it launched."""
        ...


class AddLowRank(Protocol):
    """y += (x A') B' of every row's own adapter, in place (`triton_lora.add_low_rank`); returns x A'."""

    def __call__(
        self, x_NI: Tensor, bank_a: Tensor, bank_b: Tensor, members: Tensor, tiles: Tensor, y_NO: Tensor
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """Everything that the engine computes on one device."""

    device: torch.device
    facts: DeviceFacts
    layers: LayerOps
    products: ProductOps
    attention: AttentionOps
    softmax_for: Callable[[torch.dtype], SoftmaxOps | None]
    """The fused softmax for logits of a dtype; None where only plain torch can compute it."""
    draw: Callable[[Tensor, DrawSettings], tuple[Tensor, Tensor]]
    """Logits [B, V] -> tokens [B] int64 and logprobs [B] float32; logits that are not finite give token -1 or NaN."""
    transfer: TransferOps
    experts: ExpertOps
    add_low_rank: AddLowRank | None = None
    """Serves rows of many adapters in one launch; None where there is no such kernel."""
    few_rows: FewRowOps | None = None
    """Kernels for a decode step of few rows, for 16-bit weights; None where there are none."""
    stack: StackOps | None = None
    """A sampler's pass in few calls; None where each step of a block is a call."""
    new_graph_recorder: Callable[[], GraphRecorder] | None = None
    """None where steps cannot be captured."""
    prepare_process: Callable[[], None] = lambda: None
    """What a process does once before its engine uses the device."""
    is_bitwise: bool = False
    """Whether the numbers of a token depend on its own sequence alone, to the last bit (`engine.bitwise`)."""
