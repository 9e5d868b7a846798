"""What a training pass keeps of its forward pass for its backward pass, and what it does where there is no room.

Imports without torch.

The body keeps what is listed here, and the memory plan adds it up (`engine/budget.py`);
`tests/numerics/test_body.py` holds the list against the tensors of real passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnwise.engine.config import Activations
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
    query, key = sizes.query_size, sizes.key_size
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


PLAIN_STRETCH = 4 / 3
"""Transformers' layers keep about this many times what ours do."""
MIN_PART_TOKENS = 256
"""Shorter parts of a long sequence would save little, and every part reads all weights."""


@dataclass(frozen=True, slots=True)
class PassSizes:
    """What the memory of a pass depends on besides its length."""

    sizes: ModelSizes
    itemsize: int
    """Bytes of one activation."""
    rank: int
    facts: DeviceFacts

    @property
    def in_block(self) -> int:
        """Bytes that one block keeps for one token."""
        return kept_bytes(self.sizes, self.itemsize, self.rank, self.facts)

    @property
    def kept(self) -> int:
        """Bytes per token of a pass that keeps everything."""
        return self.sizes.num_layers * self.in_block

    @property
    def recomputed(self) -> int:
        """Bytes per token of a pass that keeps the input of each block: the stream, and what is added to it."""
        return 2 * self.sizes.num_layers * self.sizes.hidden_size * self.itemsize + self.in_block

    @property
    def past(self) -> int:
        """Bytes per token of a sequence in parts: keys and values, their gradients in float32 (`parts.py`), and what
        the head reads, with its gradient."""
        rows = 2 * self.sizes.hidden_size * self.itemsize
        return self.sizes.kv_values_per_token * (self.itemsize + FLOAT32_BYTES) + rows


@dataclass(frozen=True, slots=True)
class KeptChoice:
    """What a pass keeps: everything, the inputs of its blocks, or (`part_tokens`) the activations of one part."""

    keeps_all: bool
    part_tokens: int = 0
    """Tokens of a part; 0: the pass runs as a whole."""

    @property
    def is_whole(self) -> bool:
        """Whether the pass runs as a whole and keeps everything."""
        return self.keeps_all and not self.part_tokens


@dataclass(frozen=True, slots=True)
class KeptRoom:
    """How much a pass may keep for its backward pass."""

    most_bytes: int | None = None
    """None: there is room for everything."""
    activations: Activations = "auto"
    most_part_tokens: int = 2048

    def choose(self, one: PassSizes, num_tokens: int, *, can_split: bool) -> KeptChoice:
        """For a pass of `num_tokens`. Only one sequence without branches can be split."""
        most, asked = self.most_bytes, self.activations
        if asked == "keep" or (asked == "auto" and (most is None or num_tokens * one.kept <= most)):
            return KeptChoice(keeps_all=True)
        fits = most is None or num_tokens * one.recomputed <= most
        part = self._part_tokens(one, num_tokens)
        if asked == "recompute" or not can_split or (asked == "auto" and fits) or part >= num_tokens:
            return KeptChoice(keeps_all=False)
        return KeptChoice(keeps_all=True, part_tokens=part)

    def _part_tokens(self, one: PassSizes, num_tokens: int) -> int:
        if self.most_bytes is None:
            return self.most_part_tokens
        left = self.most_bytes - num_tokens * one.past
        return min(self.most_part_tokens, max(MIN_PART_TOKENS, left // one.kept))
