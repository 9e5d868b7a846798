"""How new weights reach the sampler.

The loop trains; a `Publisher` brings the trainer's weights to a sampler and returns a client for them:

    sampler = await publisher.publish(trainer, version)

`version` counts the updates of the run: it means the same after the run was resumed, which an engine's own numbers do
not. It is written on every response here, and nowhere else. A publisher that samples elsewhere (a server, a fleet) is
one file: `turnwise/backends/__init__.py` says how it is found.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from turnwise.client.base import SamplingClient, TrainingClient
from turnwise.client.futures import ApiFuture
from turnwise.errors import ConfigError
from turnwise.types import ModelInput, SampleRequest, SampleResponse

if TYPE_CHECKING:
    from turnwise.backends import BackendSetup


class VersionedSampler(SamplingClient):
    """A `SamplingClient` whose responses carry the run's version of the weights."""

    def __init__(self, client: SamplingClient, version: int) -> None:
        """Do not call this; use `Publisher.publish`."""
        self.client = client
        self.version = version

    def submit(self, request: SampleRequest) -> ApiFuture[SampleResponse]:
        version = self.version  # at the time of the request; another one may be published before the answer
        return self.client.submit(request).then(lambda response: _stamped(response, version))

    def compute_logprobs(self, prompt: ModelInput) -> ApiFuture[list[float | None]]:
        return self.client.compute_logprobs(prompt)

    def get_tokenizer(self) -> Any:
        return self.client.get_tokenizer()

    def get_base_model(self) -> str:
        return self.client.get_base_model()


def _stamped(response: SampleResponse, version: int) -> SampleResponse:
    """The response with the version of its oldest token; what says its versions token by token keeps them."""
    drawn = [set(sequence.versions) for sequence in response.sequences if sequence.versions is not None]
    if not drawn:
        return replace(response, policy_version=version)
    versions = set[int]().union(*drawn)
    oldest = min(versions)
    if versions == {oldest}:
        plain = [replace(sequence, versions=None) for sequence in response.sequences]
        return replace(response, policy_version=oldest, sequences=plain)
    return replace(response, policy_version=oldest)


class NewestSampler(VersionedSampler):
    """Samples from whatever version is newest at the time of a request.

    A dialogue that goes on over an update draws its next turn with the new weights; each turn carries the version of
    the weights that drew it.
    """

    def follow(self, sampler: VersionedSampler) -> None:
        """Sample from these weights from now on."""
        self.client, self.version = sampler.client, sampler.version

    def pinned(self) -> VersionedSampler:
        """Return the newest version as it is now, for a dialogue that keeps it to its end."""
        return VersionedSampler(self.client, self.version)

    def until_update(self) -> UntilUpdate:
        """Return a sampler for one dialogue that ends when newer weights come."""
        return UntilUpdate(self)


class UntilUpdate(VersionedSampler):
    """Samples from the weights that are newest at its first request, and says when they are no longer the newest."""

    def __init__(self, newest: NewestSampler) -> None:
        """Do not call this; use `NewestSampler.until_update`."""
        super().__init__(newest.client, newest.version)
        self._newest = newest
        self._is_used = False

    def submit(self, request: SampleRequest) -> ApiFuture[SampleResponse]:
        if not self._is_used:
            self.client, self.version, self._is_used = self._newest.client, self._newest.version, True
        return super().submit(request)

    @property
    def is_outdated(self) -> bool:
        """Newer weights were published after the first request."""
        return self._is_used and self._newest.version != self.version


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
    def check_options(cls, rollout: Any) -> None:  # noqa: ARG003
        """Refuse options that the backend cannot work with; called before anything is spent."""
        return

    @classmethod
    def describe(cls, rollout: Any) -> str:
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
