"""The engines of this process: one per model directory and config, loaded on first use, shared by all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.engine.config import ClusterConfig, EngineConfig
from turnwise.engine.worker import EngineWorker
from turnwise.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from turnwise.engine.engine import Engine

ONE_LEARNER = ClusterConfig()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A base model and the worker that runs it."""

    name: str
    """The name that the user gave the model."""
    stored_model: str
    """The model that the name stands for; it differs from `name` if that is an alias."""
    directory: Path
    worker: EngineWorker

    def get_tokenizer(self) -> Any:
        return load_tokenizer(self.directory)


class EnginePool:
    """Counts the users of each engine; the last user closes it."""

    def __init__(self, load: Callable[[Path, EngineConfig, ClusterConfig, str], Engine]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._slots: dict[tuple[Path, EngineConfig, ClusterConfig], _Slot] = {}

    def acquire(
        self, directory: Path, config: EngineConfig, name: str, cluster: ClusterConfig = ONE_LEARNER
    ) -> EngineWorker:
        """Return the worker of a model; start it if it is not running. The caller gives it back with `release`."""
        with self._lock:
            slot = self._slots.setdefault((directory.resolve(), config, cluster), _Slot())
        with slot.lock:  # if two callers ask at the same time, the model is loaded once
            if slot.worker is None or slot.worker.is_stopped:
                slot.worker = EngineWorker(lambda: self._load(directory, config, cluster, name), name=name)
                slot.num_users = 0
            slot.num_users += 1
            return slot.worker

    @property
    def num_running(self) -> int:
        """Number of engines that are loaded."""
        with self._lock:
            return sum(slot.worker is not None for slot in self._slots.values())

    def release(self, worker: EngineWorker) -> None:
        with self._lock:
            slots = list(self._slots.values())
        for slot in slots:
            with slot.lock:
                if slot.worker is not worker:
                    continue
                slot.num_users -= 1
                if slot.num_users == 0:
                    slot.worker = None
                    worker.close()


@dataclass(slots=True)
class _Slot:
    lock: threading.Lock = field(default_factory=threading.Lock)
    worker: EngineWorker | None = None
    num_users: int = 0


def _load_engine(directory: Path, config: EngineConfig, cluster: ClusterConfig, name: str) -> Engine:
    from turnwise.engine.engine import Engine  # torch

    if cluster.shard:
        from turnwise.engine.learners.sharded import ShardedEngine

        return ShardedEngine(directory, config, cluster, name=name)
    if cluster.learners > 1:
        from turnwise.engine.learners.replicated import ReplicatedEngine

        return ReplicatedEngine(directory, config, cluster, name=name)
    return Engine(directory, config, name=name)


POOL = EnginePool(_load_engine)
