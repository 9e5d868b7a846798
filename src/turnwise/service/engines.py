"""What is served, by the names that clients use: base models, each with its worker and its training queue, and the
policies that were trained on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.client.engines import POOL, LoadedModel
from turnwise.engine.config import EngineConfig
from turnwise.models import store as model_store
from turnwise.service.failures import HttpFailure
from turnwise.service.futures import Promises
from turnwise.service.named_policies import NamedPolicy
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
    """Looks base models up by name or directory, and policies by name."""

    def __init__(
        self,
        models: Mapping[str, LoadedModel],
        promises: Promises,
        *,
        gap_s: float,
        policies: Sequence[NamedPolicy] = (),
    ) -> None:
        self._models = [
            ServedModel(name, loaded, TrainingQueue(loaded.worker, promises, gap_s=gap_s))
            for name, loaded in models.items()
        ]
        self.policies = {policy.name: policy for policy in policies}

    def __iter__(self):
        return iter(self._models)

    def find(self, name: str) -> ServedModel:
        for model in self._models:
            if name in (model.name, str(model.directory)) or Path(name) == model.directory:
                return model
        if name in self.policies:
            raise HttpFailure(
                400,
                f"{name} is a trained policy, which is only sampled from; its base model is "
                f"{self.policies[name].base_model}",
            )
        known = ", ".join(model.name for model in self._models)
        raise HttpFailure(400, f"base model {name[:200]!r} is not served here; served: {known}")

    def find_policy(self, identity: str) -> NamedPolicy:
        """The policy of exactly these weights."""
        for policy in self.policies.values():
            if policy.identity == identity:
                return policy
        raise HttpFailure(410, f"the policy {identity.rpartition('-')[0]} is served no more, or with other weights")

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
