"""Who samples: one file per backend, found by its name.

`rollout.backend=NAME` loads `turnwise/backends/NAME.py` and takes the `Publisher` that the file defines. So a new
backend is one new file here, and nothing else changes. A backend of your own needs no place in the package:
`rollout.backend=my_module:MyPublisher` or `path/to/file.py:MyPublisher`. Either way the class is created once per run,
with a `BackendSetup`, and closed at the run's end.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from turnwise.client.publish import Publisher
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
            "turnwise.client.publish.Publisher and has deliver(trainer, version)"
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
