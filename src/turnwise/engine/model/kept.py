"""What the fused body keeps of a decoder block's forward pass for its backward pass. Imports without torch.

The body keeps what is listed here, and the memory plan adds it up (`engine/budget.py`);
`tests/numerics/test_body.py` holds the list against the tensors of real passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.engine.ops.facts import DeviceFacts
from turnwise.models.blocks import BlockSpec
from turnwise.models.facts import ModelSizes

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """One tensor that a block keeps."""

    name: str
    size: int
    """Numbers per token."""
    itemsize: int
    """Bytes per number."""


def kept_tensors(sizes: ModelSizes, itemsize: int, rank: int, facts: DeviceFacts) -> tuple[KeptTensor, ...]:
    """What one block keeps, with activations of `itemsize` bytes and adapters of `rank` on every linear.

    Where `facts` say so, the normed inputs are formed again from the residual stream and not kept, and float32 heads
    without head norms are rotated in place; otherwise the rotated query and key stand beside the projection.
    """
    block = sizes.block or BlockSpec()
    query, key = sizes.num_heads * sizes.head_size, sizes.num_kv_heads * sizes.head_size
    rotates_in_place = facts.rotates_in_place and itemsize == FLOAT32_BYTES and block.head_norm == "none"
    activations = {
        "h": sizes.hidden_size,
        "inner_h": sizes.hidden_size,
        **({"x": sizes.hidden_size, "inner_x": sizes.hidden_size} if facts.keeps_normed_inputs else {}),
        "qkv": query + 2 * key,
        **({} if rotates_in_place else {"query": query, "key": key}),
        "out": query,
        "low_qkv": 3 * rank,
        "low_out": rank,
        **_kept_of_mlp(sizes, rank),
    }
    statistics = {"rstd": 1, "inner_rstd": 1, "logsumexp": sizes.num_heads}
    if sizes.experts is not None:
        # Scores are float32; the choice and the order of rows are int64, which is twice as wide.
        statistics |= {"scores": sizes.experts.num_chosen, "rows": 6 * sizes.experts.num_chosen}
    return (
        *(KeptTensor(name, size, itemsize) for name, size in activations.items()),
        *(KeptTensor(name, size, FLOAT32_BYTES) for name, size in statistics.items()),
    )


def _kept_of_mlp(sizes: ModelSizes, rank: int) -> dict[str, int]:
    """What an MLP keeps; experts keep a row for every expert that a token uses."""
    spec = sizes.experts
    if spec is None:
        return {"gate_up": 2 * sizes.inner_size, "low_gate_up": 2 * rank, "low_down": rank}
    rows = spec.num_chosen * max(1, rank // spec.num_chosen)
    kept = {
        "logits": spec.num_experts,
        "gate_up": 2 * spec.num_chosen * spec.inner_size,
        "low_gate_up": rows,
        "low_down": rows,
    }
    if spec.shared_size:
        kept |= {"shared_gate_up": 2 * spec.shared_size, "low_shared": 3 * rank}
    if spec.has_shared_gate:
        kept |= {"shared": sizes.hidden_size, "shared_gate": 1, "low_shared_gate": rank}
    return kept


def kept_bytes(sizes: ModelSizes, itemsize: int, rank: int, facts: DeviceFacts) -> int:
    """Bytes that one block keeps for one token."""
    return sum(kept.size * kept.itemsize for kept in kept_tensors(sizes, itemsize, rank, facts))
