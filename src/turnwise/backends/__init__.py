"""Who samples, and how new weights get there: one file per backend, found by its name.

The loop trains; a `Publisher` brings the trainer's weights to a sampler and returns a client for them:

    sampler = await publisher.publish(trainer, version)

`rollout.backend=NAME` loads `turnwise/backends/NAME.py` and takes the `Publisher` that the file defines. So a new
backend is one new file here, and nothing else changes. A backend of your own needs no place in the package:
`rollout.backend=my_module:MyPublisher` or `path/to/file.py:MyPublisher`. Either way the class is created once per run,
with a `BackendSetup`, and closed at the run's end.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from turnwise.client.base import SamplingClient, TrainingClient
from turnwise.client.publish import VersionedSampler
from turnwise.engine.config import ClusterConfig, EngineConfig
from turnwise.errors import ConfigError
from turnwise.rollout.config import RolloutConfig
from turnwise.runtime.import_path import load_attribute
from turnwise.runtime.suggest import did_you_mean

LOCAL = "local"
"""The backend of our own engine."""
ONE_PROCESS = ClusterConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSetup:
    """What a run tells the backend that samples for it."""

    rollout: RolloutConfig
    """The section `rollout`, with the limits of the run's world filled in: turns, tokens, temperature, concurrency."""
    model_directory: Path
    """The base model's files, in Hugging Face's layout."""
    run_directory: Path
    """The run's directory; a backend may keep files of its own below it."""
    engine: EngineConfig
    """The section `engine`: device, dtype and memory, for a backend that shares the device with the trainer."""
    cluster: ClusterConfig = ONE_PROCESS
    """The section `cluster`: how many engines sample, and where."""
    lora_rank: int = 0
    """The rank of the adapters that are published; 0: it is not known, or whole weights are."""
    weight_transfer: Literal["disk", "ipc"] = "disk"
    """How whole weights reach the servers: as files, or read in the trainer's memory."""
    service: Any = None
    """What makes clients of stored weights where there is no trainer: a `ServiceClient`. A training run leaves it out.
    """


class Publisher(ABC):
    """Brings a trainer's weights to a sampler.

    Attempts that are under way when new weights are published keep their client; a client must stay usable until the
    publisher is closed, or for as long as somebody holds it.
    """

    takes_full_weights = False
    """Whether it can bring over weights that are all trained (`model.train=full`), not only an adapter."""

    dtype: str | None = None
    """The type that the sampler computes in, such as `bfloat16`, where it differs from the trainer's. The certificate
    allows for its rounding."""

    def __init__(self, setup: BackendSetup | None = None) -> None:
        """Start nothing yet.

        Args:
            setup: What the run tells its backend: how it plays, where the model and the run are. A run always passes
                it.
        """
        self.setup = setup

    @classmethod
    def check_options(cls, rollout: RolloutConfig) -> None:  # noqa: ARG003
        """Refuse options that the backend cannot work with; called before anything is spent."""
        return

    @classmethod
    def describe(cls, rollout: RolloutConfig) -> str:
        """Say in a line who samples, for the plan of a run."""
        return rollout.backend

    async def publish(self, trainer: TrainingClient, version: int) -> VersionedSampler:
        """Bring over the trainer's weights as they are now, and return a client that samples from them."""
        return VersionedSampler(await self.deliver(trainer, version), version)

    @abstractmethod
    async def deliver(self, trainer: TrainingClient, version: int) -> SamplingClient:
        """Bring the weights to the sampler. A backend implements this; `publish` puts the version on the client."""

    async def serve(self, adapter: Path | None, version: int = 0) -> VersionedSampler:
        """Sample from files, without a trainer: PEFT files in a directory, or None for the base model as it is."""
        return VersionedSampler(await self.deliver_files(adapter, version), version)

    async def deliver_files(self, adapter: Path | None, version: int) -> SamplingClient:  # noqa: ARG002
        """Bring files to the sampler. A backend that can sample without a trainer implements this."""
        raise ConfigError(
            f"{type(self).__name__} samples for a trainer only: it has no deliver_files(adapter, version); "
            "expected rollout.backend=local, or a backend that has it"
        )

    async def rest(self) -> None:
        """Give the sampler's memory back before a training pass, if it can; the next request takes it again."""
        return

    def take_metrics(self) -> dict[str, float]:
        """Return what the sampler counted since the last call; the loop writes it down with every step."""
        return {}

    async def close(self) -> None:
        """Stop what the publisher started (a server, connections). A run calls it once, at its end."""
        return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def backend_names() -> list[str]:
    """Return the names of the shipped backends."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg)


def find_publisher(backend: str) -> type[Publisher]:
    """Return the publisher that `rollout.backend` names; refuse one that does not exist, before anything is spent."""
    names = backend_names()
    if ":" in backend:
        found = load_attribute(backend)
    elif backend in names:
        found = _publisher_of(f"{__name__}.{backend}")
    else:
        near = did_you_mean(backend, names)
        raise ConfigError(
            f"rollout.backend={backend!r} is no backend{near}; expected one of {', '.join(names)}, or your own as "
            "module:Class or path/to/file.py:Class"
        )
    if not (isinstance(found, type) and issubclass(found, Publisher)):
        raise ConfigError(
            f"rollout.backend={backend} is a {type(found).__name__}; expected a class that inherits from "
            "turnwise.backends.Publisher and has deliver(trainer, version)"
        )
    return found


def make_publisher(setup: BackendSetup) -> Publisher:
    """Create the publisher that `rollout.backend` names; for `local` with `cluster.samplers`, one for all of them."""
    if setup.rollout.backend == LOCAL and setup.cluster.has_fleet:
        kind = "SeparateSamplers" if setup.cluster.has_own_samplers else "LearnersThatSample"
        return load_attribute(f"{__name__}.samplers.publisher:{kind}")(setup)
    return find_publisher(setup.rollout.backend)(setup)


def _publisher_of(module_name: str) -> object:
    """Return the one publisher that a file of this folder defines."""
    module = import_module(module_name)
    own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module_name]
    found = [value for value in own if isinstance(value, type) and issubclass(value, Publisher)]
    assert len(found) == 1, f"{module_name} defines {len(found)} publishers; a backend is one"
    return found[0]
