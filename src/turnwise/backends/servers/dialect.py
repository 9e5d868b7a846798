"""What one kind of inference server understands.

A server that samples (vLLM, SGLang, ...) speaks HTTP in a dialect of its own. A `ServerDialect` says how one request
looks on the wire; everything else (which server gets a request, retries, health, publishing to all of them) is the
fleet's work and is the same for every kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from turnwise.client.shared_weights import SharedWeights
from turnwise.types import SampleRequest, SampleResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWeights:
    """One published version of the policy, as the servers know it."""

    version: int
    """The run's version; 0 is the base model or the adapter a run starts with."""
    adapter: Path | None = None
    """PEFT files, in a directory of this publication alone, whose name no other run or process uses. None: the weights
    that the server itself holds."""
    is_whole: bool = False
    """The directory holds a whole model in Hugging Face's layout, whose weights replace the server's own."""
    shared: SharedWeights | None = None
    """The whole weights in the trainer's memory, where the server reads them there; the directory is then a name alone,
    and nothing is written to it."""

    @property
    def name(self) -> str | None:
        """The publication's name, which is its directory's; None means the weights that the server was started with."""
        return None if self.adapter is None else self.adapter.name

    @property
    def adapter_name(self) -> str | None:
        """The adapter's name on the server; None means the server's own weights."""
        return None if self.is_whole else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server says about itself; compared with the run's model before anything is sampled."""

    model: str
    """The model's name or path."""
    context_length: int | None = None
    vocabulary: int | None = None


class ServerDialect(ABC):
    """Talks to one server. Every method has a deadline of its own and raises `ServiceError` with the server's words.

    Two kinds of error make a difference (`servers/http.py`). `ServerGoneError`: no answer, an answer that makes no
    sense, or an adapter that the server no longer has; the fleet checks the server, loads everything again and sends
    the request elsewhere. Any other `ServiceError`: the server refused; every server of this kind would, so the request
    fails. All methods are called in one event loop, which is not the run's own.

    A dialect may have the methods of `WeightReplacer`, `WeightReceiver` and `Sleeper` too; the plan refuses runs that
    need one that the servers' dialect lacks.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    @abstractmethod
    async def facts(self) -> ServerFacts:
        """Ask what the server serves. This is also the ready check."""

    @abstractmethod
    async def healthy(self) -> bool:
        """Say whether the server answers now; never raises."""

    @abstractmethod
    async def generate(self, request: SampleRequest, weights: ServedWeights) -> SampleResponse:
        """Sample by token ids; return token ids and logprobs of the distribution that was sampled from.

        The fleet sets the deadline here: it cancels the call, which must then end the request on the server too.
        """

    @abstractmethod
    async def load(self, weights: ServedWeights) -> None:
        """Make an adapter usable under its name. It is no error if the server has an adapter of that name already."""

    @abstractmethod
    async def unload(self, weights: ServedWeights) -> None:
        """Forget an adapter that no attempt uses any more. It is no error if the server does not have it."""

    @abstractmethod
    async def close(self) -> None:
        """Close connections. The server itself stays."""


@runtime_checkable
class WeightReplacer(Protocol):
    """What a dialect also has if its servers can read whole weights from files (`model.train=full`)."""

    async def replace_weights(self, files: Sequence[Path], version: int) -> None:
        """Replace the server's own weights by those of safetensors files, while its requests are paused."""
        ...


@runtime_checkable
class WeightReceiver(Protocol):
    """What a dialect also has if its servers can read the trainer's memory (`rollout.weight_transfer=ipc`)."""

    async def receive_weights(self, shared: SharedWeights, version: int) -> None:
        """Replace the server's own weights by those in the trainer's memory, while its requests are paused."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """What a dialect also has if its servers can share the trainer's device (`rollout.placement=colocated`)."""

    async def sleep(self) -> None:
        """Give the device's memory back, with no request under way. Adapters and weights come back with `wake`."""
        ...

    async def wake(self) -> None:
        """Take the device's memory again; returns when the server can sample."""
        ...


def as_sleeper(dialect: ServerDialect) -> Sleeper:
    """The dialect of a server that shares the trainer's device."""
    assert isinstance(dialect, Sleeper), f"{dialect.url} cannot sleep; the plan should refuse the run"
    return dialect


async def bring_weights(dialect: ServerDialect, weights: ServedWeights) -> None:
    """Load an adapter, or replace the whole weights."""
    if weights.shared is not None:
        assert isinstance(dialect, WeightReceiver), f"{dialect.url} reads files; the plan should refuse the run"
        await dialect.receive_weights(weights.shared, weights.version)
    elif weights.is_whole:
        assert isinstance(dialect, WeightReplacer), f"{dialect.url} takes adapters; the plan should refuse the run"
        assert weights.adapter is not None
        await dialect.replace_weights(sorted(weights.adapter.glob("*.safetensors")), weights.version)
    else:
        await dialect.load(weights)
