"""What a pass of the fused body holds between its forward and its backward pass, block by block."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from turnwise.engine.model.gated_mlp import KeptMlp
from turnwise.engine.ops.interface import Saved


@dataclass(frozen=True, slots=True)
class BlockInput:
    """The residual stream before a block, and what the previous block adds to it."""

    h: Tensor
    delta: Tensor | None


@dataclass(slots=True, kw_only=True)
class KeptBlock:
    """What one block's backward pass reads of its forward pass (`kept.kept_tensors` lists it)."""

    h: Tensor
    rstd: Tensor
    x: Tensor | None
    """None if it is recomputed from `h` and `rstd`."""
    low_qkv: list[Tensor]
    qkv: Tensor | None
    """The projection before head norms; None if the model has no head norms."""
    attention: Saved
    low_out: list[Tensor]
    inner_h: Tensor
    inner_rstd: Tensor
    inner_x: Tensor | None
    mlp: KeptMlp

    def tensors(self) -> list[Tensor]:
        """Everything that is kept; some tensors share their memory."""
        found = list(self.mlp.tensors())
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name != "mlp":
                found += [] if value is None else [value] if isinstance(value, Tensor) else value
        return found
