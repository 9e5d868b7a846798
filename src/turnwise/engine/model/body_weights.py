"""The weights that the fused body reads: of the frozen base, of a policy whose weights are all trained, or their
gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor, nn

from turnwise.engine.model.gated_mlp import JoinedGroup, Mlp, TensorByName
from turnwise.engine.model.lora import LinearGroup, LoraLinear
from turnwise.engine.ops import for_device
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

    def with_tensors(self, names: PartNames, layer: str, tensor: TensorByName, join: JoinedGroup) -> BlockWeights:
        """The same structure over other tensors; `layer` stands before the names of the block's parts."""

        def norm(place: str) -> Tensor:
            return tensor(f"{layer}{place}.weight")

        heads = self.heads
        if heads.query_norm is not None:
            heads = replace(heads, query_norm=norm(names.query_norm), key_norm=norm(names.key_norm))
        return BlockWeights(
            input_norm=norm(names.input_norm),
            qkv=join(self.qkv),
            heads=heads,
            out=join(self.out),
            inner_norm=norm(names.inner_norm),
            mlp=self.mlp.with_tensors(tensor, join),
        )


@dataclass(frozen=True, slots=True)
class BodyWeights:
    """Everything from the embedding to the last norm."""

    embedding: Tensor
    blocks: Sequence[BlockWeights]
    last_norm: Tensor

    @property
    def groups(self) -> list[LinearGroup]:
        return [group for block in self.blocks for group in block.groups]

    def with_tensors(self, names: PartNames, prefix: str, tensor: TensorByName, join: JoinedGroup) -> BodyWeights:
        """The same structure over other tensors.

        Args:
            prefix: what stands before the names of the body's parts.
            tensor: finds a tensor by the parameter's full name.
            join: finds the tensors of a group of linears.
        """
        blocks = [
            block.with_tensors(names, f"{prefix}{names.layers}.{index}.", tensor, join)
            for index, block in enumerate(self.blocks)
        ]
        embedding, last_norm = (tensor(f"{prefix}{place}.weight") for place in (names.embedding, names.last_norm))
        return BodyWeights(embedding, blocks, last_norm)


def weight_of(module: nn.Module, name: str) -> Tensor:
    """The weight of a module's part."""
    return module.get_parameter(f"{name}.weight").detach()


def join_linears(layer: nn.Module, *names: str) -> LinearGroup:
    """The linears of a layer that read the same input."""
    return LinearGroup.join([cast(LoraLinear, layer.get_submodule(name)) for name in names])


def embed_tokens(input_ids: Tensor, embedding: Tensor) -> Tensor:
    """The rows of the tokens, in the dtype of the activations."""
    embedded = nn.functional.embedding(input_ids, embedding)
    return embedded.float() if for_device(embedding.device).facts.has_wide_activations else embedded
