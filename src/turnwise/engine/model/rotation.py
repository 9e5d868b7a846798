"""Rotations whose angles depend on the length of a sequence, within the length where they do not.

LongRoPE has one set of factors up to the length of its first training, and another beyond it; dynamic NTK grows its
base beyond the model's context. transformers picks by the longest sequence of a pass, so that a dialogue would change
with its neighbours. Here the context of such a model ends where its angles would change (`families.context_length`),
and the angles of every position are computed once. So are those of a family whose code computes them on the host in
every pass (`Family.rotates_on_host`): a captured graph cannot copy from there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from turnwise.errors import ModelError

ROTATION = "rotary_emb"


class FixedRotation(nn.Module):
    """cos and sin of every position, whatever else is in the pass."""

    cos: Tensor
    sin: Tensor

    def __init__(self, rotation: nn.Module, num_positions: int, device: torch.device) -> None:
        super().__init__()
        like = torch.empty(0, dtype=torch.float32, device=device)
        cos, sin = rotation(like, torch.arange(num_positions, device=device)[None])
        self.register_buffer("cos", cos[0], persistent=False)
        self.register_buffer("sin", sin[0], persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[position_ids].to(x.dtype), self.sin[position_ids].to(x.dtype)


def fix_rotation(body: nn.Module, num_positions: int, device: torch.device) -> None:
    """Replace the rotation of a body of transformers."""
    rotation = getattr(body, ROTATION, None)
    if not isinstance(rotation, nn.Module):
        raise ModelError(
            f"{type(body).__name__} has no module {ROTATION!r}, so its rotation by length is not supported"
        )
    setattr(body, ROTATION, FixedRotation(rotation, num_positions, device))
