"""The base models that are served, by the names that clients use, each with its worker and its training queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.client.engines import POOL, LoadedModel
from turnwise.engine.config import EngineConfig
from turnwise.models import store as model_store
from turnwise.service.failures import HttpFailure
from turnwise.service.futures import Promises
from turnwise.service.training.queue import TrainingQueue


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One base model."""

    name: str
    """The name that the service was started with."""
    loaded: LoadedModel
    queue: TrainingQueue

    @property
    def directory(self) -> Path:
        return self.loaded.directory

    @property
    def max_context_length(self) -> int:
        return self.loaded.worker.engine.max_context_length

    def check_alive(self) -> None:
        """Refuse work if the engine has stopped; after a restart the same request works."""
        if self.loaded.worker.is_stopped:
            raise HttpFailure(
                503,
                f"the engine of {self.name} has stopped and the server must be restarted; nothing was changed",
                headers={"retry-after": "5"},
            )

    def tokenizer_name(self, *, is_local: bool) -> str:
        """Return where a client can load the tokenizer: the directory if the client is local, else the hub name."""
        is_hub_name = self.name.count("/") == 1 and not Path(self.name).is_dir()
        return self.name if is_hub_name or not is_local else str(self.directory)


class ServedModels:
    """Looks models up by name or directory; loads them once, at start."""

    def __init__(self, models: Mapping[str, LoadedModel], promises: Promises, *, gap_s: float) -> None:
        self._models = [
            ServedModel(name, loaded, TrainingQueue(loaded.worker, promises, gap_s=gap_s))
            for name, loaded in models.items()
        ]

    def __iter__(self):
        return iter(self._models)

    def find(self, name: str) -> ServedModel:
        for model in self._models:
            if name in (model.name, str(model.directory)) or Path(name) == model.directory:
                return model
        known = ", ".join(model.name for model in self._models)
        raise HttpFailure(400, f"base model {name[:200]!r} is not served here; served: {known}")

    def close(self) -> None:
        for model in self._models:
            POOL.release(model.loaded.worker)


def load_models(names: Sequence[str], config: EngineConfig) -> dict[str, LoadedModel]:
    """Load every served model. This is slow and happens before the first answer."""
    loaded: dict[str, LoadedModel] = {}
    for name in dict.fromkeys(names):
        found = model_store.resolve_model(name)
        stored = found.aliased_to or name
        worker = POOL.acquire(found.directory, config, stored)
        loaded[name] = LoadedModel(name, stored, found.directory, worker)
    return loaded
