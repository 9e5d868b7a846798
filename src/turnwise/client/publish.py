"""Sampling clients that know which version of a run's weights they sample from.

A version counts the updates of the run: it means the same after the run was resumed, which an engine's own numbers do
not. It is written on every response here, and nowhere else. `backends.Publisher` makes these clients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from turnwise.client.base import SamplingClient
from turnwise.client.futures import ApiFuture
from turnwise.types import ModelInput, SampleRequest, SampleResponse


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
