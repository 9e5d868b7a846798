"""The weights that the fused body reads: of the frozen base, of a policy whose weights are all trained, or their
gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from turnwise.engine.model.gated_mlp import Mlp
from turnwise.engine.model.lora import LinearGroup
from turnwise.engine.ops.interface import Heads
from turnwise.models.blocks import PartNames


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """The weights of one decoder block."""

    input_norm: Tensor
    qkv: LinearGroup
    heads: Heads
    out: LinearGroup
    inner_norm: Tensor
    mlp: Mlp

    @property
    def groups(self) -> tuple[LinearGroup, ...]:
        return self.qkv, self.out, *self.mlp.groups

    @property
    def names(self) -> list[str]:
        """Everything that can carry an adapter."""
        return [*(name for group in self.groups for name in group.names), *self.mlp.expert_names]


@dataclass(frozen=True, slots=True)
class BodyWeights:
    """Everything from the embedding to the last norm."""

    embedding: Tensor
    blocks: Sequence[BlockWeights]
    last_norm: Tensor

    @property
    def groups(self) -> list[LinearGroup]:
        return [group for block in self.blocks for group in block.groups]

    def with_tensors(
        self, names: PartNames, prefix: str, tensor: Callable[[str], Tensor], join: Callable[[LinearGroup], LinearGroup]
    ) -> BodyWeights:
        """The same structure over other tensors.

        Args:
            prefix: what stands before the names of the body's parts.
            tensor: finds a tensor by the parameter's full name.
            join: finds the tensors of a group of linears.
        """

        def norm(place: str) -> Tensor:
            return tensor(f"{prefix}{place}.weight")

        blocks: list[BlockWeights] = []
        for index, block in enumerate(self.blocks):
            layer = f"{names.layers}.{index}."
            heads = block.heads
            if heads.query_norm is not None:
                query, key = norm(f"{layer}{names.query_norm}"), norm(f"{layer}{names.key_norm}")
                heads = replace(heads, query_norm=query, key_norm=key)
            blocks.append(
                BlockWeights(
                    input_norm=norm(f"{layer}{names.input_norm}"),
                    qkv=join(block.qkv),
                    heads=heads,
                    out=join(block.out),
                    inner_norm=norm(f"{layer}{names.inner_norm}"),
                    mlp=block.mlp.with_tensors(tensor, join),
                )
            )
        return BodyWeights(norm(names.embedding), blocks, norm(names.last_norm))
