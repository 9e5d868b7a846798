"""What torchrun tells the processes that it starts. Imports without torch."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from turnwise.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TorchrunWorld:
    """The processes that one `torchrun` has started, and which of them this one is."""

    rank: int
    size: int
    local_rank: int
    """The number of this process on its machine."""
    local_size: int
    """Processes on this process's machine."""
    num_restarts: int = 0
    """How often torchrun has started all of them again."""

    @property
    def is_on_one_machine(self) -> bool:
        return self.local_size == self.size


def read_world(environment: Mapping[str, str] = os.environ) -> TorchrunWorld | None:
    """The world of this process; None if torchrun did not start it, or started it alone."""
    size = int(environment.get("WORLD_SIZE", "1"))
    if size == 1 or "TORCHELASTIC_RUN_ID" not in environment:
        return None
    return TorchrunWorld(
        rank=int(environment["RANK"]),
        size=size,
        local_rank=int(environment["LOCAL_RANK"]),
        local_size=int(environment.get("LOCAL_WORLD_SIZE", size)),
        num_restarts=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


_is_led = False
"""Whether this process leads a run, and the other ranks are its learners."""


@contextmanager
def leading() -> Generator[None]:
    """In the block, a run of this process has the other ranks as its learners."""
    global _is_led  # noqa: PLW0603 - torchrun's processes belong to the process, not to a caller
    _is_led = True
    try:
        yield
    finally:
        _is_led = False


def refuse_torchrun(what: str, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse work that each of torchrun's processes would do once more, where `turnwise train` does not lead them."""
    world = read_world(environment)
    if world is not None and not _is_led:
        raise ConfigError(
            f"{what} under torchrun: each of its {world.size} processes would do the whole work once more; only "
            "torchrun ... -m turnwise.cli train makes learners of them. Start it without torchrun, and set "
            f"cluster.learners={world.size}"
        )
