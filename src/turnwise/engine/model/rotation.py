"""Rotations whose angles depend on the length of a sequence, as tables of the angles of every position.

transformers chooses such angles by the longest sequence of a pass, so that a dialogue would change with its neighbours.
Here they depend on the sequence alone.

LongRoPE has one set of angles up to the length of its first training, and another beyond it. A token is predicted with
the angles for the sequence that ends before it, which is what transformers computes for that sequence alone. So a
sequence of more tokens than `switch` is run twice where all its logprobs are asked: its beginning with the first
angles, and all of it with the second. The table has the first angles of `switch` positions and then the second angles
of all positions: position p of a long sequence is row `switch + p`.

Dynamic NTK has other angles for every length beyond the model's own. Such a context has the angles of its longest
sequence for all sequences.

A family whose code computes its angles on the host in every pass (`Family.rotates_on_host`) has a table too: a captured
graph cannot copy from there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from turnwise.errors import ModelError

ROTATION = "rotary_emb"


class FixedRotation(nn.Module):
    """cos and sin of every position, whatever else is in the pass."""

    cos: Tensor
    sin: Tensor

    def __init__(self, rotation: nn.Module, lengths: Sequence[int], device: torch.device) -> None:
        """`lengths` are those of sequences: for each, the table has the angles of all its positions."""
        super().__init__()
        like = torch.empty(0, dtype=torch.float32, device=device)
        parts = [rotation(like, torch.arange(length, device=device)[None]) for length in lengths]
        self.register_buffer("cos", torch.cat([cos[0] for cos, _ in parts]), persistent=False)
        self.register_buffer("sin", torch.cat([sin[0] for _, sin in parts]), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[position_ids].to(x.dtype), self.sin[position_ids].to(x.dtype)


def fix_rotation(body: nn.Module, lengths: Sequence[int], device: torch.device) -> None:
    """Replace the rotation of a body of transformers."""
    rotation = getattr(body, ROTATION, None)
    if not isinstance(rotation, nn.Module):
        raise ModelError(
            f"{type(body).__name__} has no module {ROTATION!r}, so its rotation by length is not supported"
        )
    setattr(body, ROTATION, FixedRotation(rotation, lengths, device))


def num_table_rows(rotation: nn.Module) -> int | None:
    """Rows of a table of angles; None for a rotation that computes the angles of any position."""
    return len(rotation.cos) if isinstance(rotation, FixedRotation) else None
