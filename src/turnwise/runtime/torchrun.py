"""What torchrun tells the processes that it starts. Imports without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TorchrunWorld:
    """The processes that one `torchrun` has started, and which of them this one is."""

    rank: int
    size: int
    local_rank: int
    """The number of this process on its machine."""
    is_on_one_machine: bool
    num_restarts: int = 0
    """How often torchrun has started all of them again."""


def read_world(environment: Mapping[str, str] = os.environ) -> TorchrunWorld | None:
    """The world of this process; None if torchrun did not start it, or started it alone."""
    size = int(environment.get("WORLD_SIZE", "1"))
    if size == 1 or "TORCHELASTIC_RUN_ID" not in environment:
        return None
    return TorchrunWorld(
        rank=int(environment["RANK"]),
        size=size,
        local_rank=int(environment["LOCAL_RANK"]),
        is_on_one_machine=int(environment.get("LOCAL_WORLD_SIZE", size)) == size,
        num_restarts=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )
