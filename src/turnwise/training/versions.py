"""Samplers by version: the weights after so many updates of the run.

What is drawn is labelled with that version, which means the same after the run was resumed; an engine's own numbers
do not.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from turnwise.client.base import SamplingClient
from turnwise.client.futures import ApiFuture
from turnwise.types import ModelInput, SampleResponse, SamplingParams

_DEFAULT_PARAMS = SamplingParams()


class VersionedSampler:
    """A `SamplingClient` whose responses carry the run's version of the weights."""

    def __init__(self, client: SamplingClient, version: int) -> None:
        self.client = client
        self.version = version

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int = 1,
        sampling_params: SamplingParams = _DEFAULT_PARAMS,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> ApiFuture[SampleResponse]:
        asked = self.client.sample(
            prompt, num_samples, sampling_params, include_prompt_logprobs, topk_prompt_logprobs
        ).future()
        labelled: Future[SampleResponse] = Future()

        def pass_on(done: Future[SampleResponse]) -> None:
            if done.cancelled():
                labelled.cancel()
            elif (error := done.exception()) is not None:
                labelled.set_exception(error)
            else:
                labelled.set_result(self._labelled(done.result()))

        asked.add_done_callback(pass_on)
        return ApiFuture(labelled, f"sample with version {self.version}", on_abandoned=asked.cancel)

    async def sample_async(
        self,
        prompt: ModelInput,
        num_samples: int = 1,
        sampling_params: SamplingParams = _DEFAULT_PARAMS,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> SampleResponse:
        response = await self.client.sample_async(
            prompt, num_samples, sampling_params, include_prompt_logprobs, topk_prompt_logprobs
        )
        return self._labelled(response)

    def compute_logprobs(self, prompt: ModelInput) -> ApiFuture[list[float | None]]:
        return self.client.compute_logprobs(prompt)

    async def compute_logprobs_async(self, prompt: ModelInput) -> list[float | None]:
        return await self.client.compute_logprobs_async(prompt)

    def get_tokenizer(self) -> Any:
        return self.client.get_tokenizer()

    def get_base_model(self) -> str:
        return self.client.get_base_model()

    async def get_base_model_async(self) -> str:
        return await self.client.get_base_model_async()

    def _labelled(self, response: SampleResponse) -> SampleResponse:
        return replace(response, policy_version=self.version)


class NewestSampler(VersionedSampler):
    """The sampler of whatever version is newest when it is asked: a dialogue that goes on over an update draws its
    next turn with the new weights, and every turn is labelled with the weights that drew it.
    """

    def publish(self, sampler: VersionedSampler) -> None:
        self.client, self.version = sampler.client, sampler.version

    def pinned(self) -> VersionedSampler:
        """The newest version as it is now, for a dialogue that keeps it to its end."""
        return VersionedSampler(self.client, self.version)

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int = 1,
        sampling_params: SamplingParams = _DEFAULT_PARAMS,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> ApiFuture[SampleResponse]:
        return self.pinned().sample(prompt, num_samples, sampling_params, include_prompt_logprobs, topk_prompt_logprobs)

    async def sample_async(
        self,
        prompt: ModelInput,
        num_samples: int = 1,
        sampling_params: SamplingParams = _DEFAULT_PARAMS,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> SampleResponse:
        return await self.pinned().sample_async(  # the label is that of the weights that were asked
            prompt, num_samples, sampling_params, include_prompt_logprobs, topk_prompt_logprobs
        )
