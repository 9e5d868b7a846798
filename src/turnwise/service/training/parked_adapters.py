"""Adapters and published weights that leave the device when others need the room, and come back when they are used.

Fields of both classes change on the engine's thread only; the event loop reads them to choose what to park.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from turnwise.client.checkpoints import verify, write_directory
from turnwise.types import LoraConfig

if TYPE_CHECKING:
    from turnwise.engine.engine import Engine
    from turnwise.engine.model.lora import Policy
    from turnwise.engine.training.trainable import Trainable


Resident = TypeVar("Resident")


@dataclass(frozen=True, slots=True)
class DeviceLimit:
    """How much may be on the device: number and bytes."""

    max_count: int
    max_bytes: int

    def choose_to_park(
        self, resident: Sequence[Resident], idle: Sequence[Resident], size_of: Callable[[Resident], int]
    ) -> list[Resident]:
        """Choose from the front of `idle` until the rest fits. What is in use stays, even beyond the limit."""
        count, size = len(resident), sum(map(size_of, resident))
        leaving: list[Resident] = []
        for each in idle:
            if count <= self.max_count and size <= self.max_bytes:
                break
            leaving.append(each)
            count, size = count - 1, size - size_of(each)
        return leaving


class ParkedAdapter:
    """One training adapter, on the device or parked as a snapshot."""

    def __init__(self, lora: LoraConfig, root: Path, snapshot: str | None, *, is_critic: bool) -> None:
        """`snapshot` is a name under `root`, or None for a new adapter. It is loaded or created when it is first
        needed."""
        self.lora = lora
        self.is_critic = is_critic
        self.root = root
        self.snapshot = snapshot
        self._adapter: Trainable | None = None

    @property
    def is_resident(self) -> bool:
        return self._adapter is not None

    @property
    def num_bytes(self) -> int:
        """What it takes on the device: weights, gradient and the optimizer's moments."""
        return 0 if self._adapter is None else self._adapter.num_bytes

    def load(self, engine: Engine) -> Trainable:
        """Return the adapter; load it to the device if it is not there."""
        if self._adapter is None:
            if self.snapshot is None:
                create = engine.create_critic if self.is_critic else engine.create_adapter
                self._adapter = create(self.lora)
            else:
                from turnwise.engine.training.snapshots import read_snapshot  # torch

                verify(self.root / self.snapshot)
                self._adapter = read_snapshot(engine, self.lora, self.root / self.snapshot)
        return self._adapter

    def save(self, engine: Engine) -> str:
        """Write a snapshot and return its name."""
        from turnwise.engine.training.snapshots import write_snapshot  # torch

        adapter = self.load(engine)
        name = uuid.uuid4().hex[:16]
        write_directory(self.root / name, lambda staged: write_snapshot(engine, adapter, staged))
        self.snapshot = name
        return name

    def park(self, engine: Engine) -> str:
        """Write a snapshot, free the device, and return the snapshot's name."""
        name = self.save(engine)
        if self._adapter is not None:
            engine.drop_adapter(self._adapter)
            self._adapter = None
        return name


class ParkedPolicy:
    """Weights to sample from: the base model's, a checkpoint's, or a copy published from training."""

    def __init__(self, directory: Path | None, *, policy: Policy | None = None, is_base: bool = False) -> None:
        self._directory = directory
        self._policy: Policy | None = policy
        self._is_base = is_base

    @property
    def is_resident(self) -> bool:
        """Whether it takes room that could be freed."""
        return self._policy is not None

    @property
    def num_bytes(self) -> int:
        policy = self._policy
        return 0 if policy is None else policy.flat.nbytes

    def resident(self, engine: Engine) -> Policy | None:
        """Return the weights if they are on the device, else None."""
        return engine.base_policy if self._is_base else self._policy

    def load(self, engine: Engine) -> Policy:
        """Return the weights; load them if necessary. Runs on the engine's thread."""
        if self._is_base:
            return engine.base_policy
        if self._policy is None:
            assert self._directory is not None
            verify(self._directory)
            self._policy = engine.load_policy(self._directory)
        return self._policy

    def write(self, engine: Engine, directory: Path) -> None:
        """Write a copy to disk, so that the device's copy can be freed."""
        policy = self._policy
        if self._is_base or self._directory is not None or policy is None:
            return
        write_directory(directory, lambda staged: engine.save_policy(policy, staged))
        self._directory = directory

    def park(self) -> None:
        """Free the device's copy; running requests keep it until they are done."""
        if self._directory is not None:
            self._policy = None
