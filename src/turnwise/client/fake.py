"""Test doubles for code that talks to clients: no model, no device, answers at once.

>>> sampler = ScriptedSampler([[5, 6], [7]])
>>> sampler.sample(ModelInput.from_ints([1, 2])).result().sequences[0].tokens
[5, 6]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from turnwise.client.base import CustomLossFn, LossFnConfig, SamplingClient, TrainingClient
from turnwise.client.futures import ApiFuture, completed
from turnwise.errors import ConfigError
from turnwise.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    GetInfoResponse,
    LoadWeightsResponse,
    ModelData,
    ModelInput,
    OptimStepResponse,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    TensorData,
)

Reply = Sequence[int] | SampledSequence


class ScriptedSampler(SamplingClient):
    """A `SamplingClient` that replies from a script: a list of replies in order, or a function of the prompt's ids.

    A reply of bare ids gets `logprob` for each id. Its stop reason is "stop", or "length" if `max_tokens` cuts it.
    A `SampledSequence` is returned unchanged.
    """

    def __init__(
        self,
        script: Sequence[Reply] | Callable[[list[int]], Reply],
        *,
        logprob: float = -1.0,
        policy_version: int = 1,
        tokenizer: Any = None,
        base_model: str = "scripted",
    ) -> None:
        self._script = script
        self._logprob = logprob
        self._policy_version = policy_version
        self._tokenizer = tokenizer
        self._base_model = base_model
        self._num_replies = 0
        self.prompts: list[list[int]] = []
        """Every prompt that was sampled from, in order."""

    def submit(self, request: SampleRequest) -> ApiFuture[SampleResponse]:
        """Reply from the script. `topk_prompt_logprobs` is ignored, because there is no distribution to rank."""
        prompt_ids = list(request.prompt)
        self.prompts.append(prompt_ids)
        future: Future[SampleResponse] = Future()
        try:
            sequences = [self._sequence(prompt_ids, request.sampling_params) for _ in range(request.num_samples)]
            prompt_logprobs = self._prompt_logprobs(prompt_ids) if request.include_prompt_logprobs else None
            future.set_result(SampleResponse(sequences, prompt_logprobs, policy_version=self._policy_version))
        except Exception as error:  # noqa: BLE001 - like the real one, errors wait for result()
            future.set_exception(error)
        return ApiFuture(future, "scripted sample")

    def compute_logprobs(self, prompt: ModelInput) -> ApiFuture[list[float | None]]:
        return completed(self._prompt_logprobs(prompt.to_ints()), "scripted compute_logprobs")

    def get_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise ConfigError("this ScriptedSampler has no tokenizer; pass tokenizer=...")
        return self._tokenizer

    def get_base_model(self) -> str:
        return self._base_model

    def _sequence(self, prompt_ids: list[int], params: SamplingParams) -> SampledSequence:
        reply = self._next_reply(prompt_ids)
        if isinstance(reply, SampledSequence):
            return reply
        tokens = list(reply)[: params.max_tokens]
        stop_reason = "stop" if len(tokens) == len(reply) else "length"
        return SampledSequence(stop_reason, tokens, [self._logprob] * len(tokens))

    def _next_reply(self, prompt_ids: list[int]) -> Reply:
        if callable(self._script):
            return self._script(prompt_ids)
        if self._num_replies == len(self._script):
            raise ConfigError(f"the script's {len(self._script)} replies are used up; add one for every sample")
        self._num_replies += 1
        return self._script[self._num_replies - 1]

    def _prompt_logprobs(self, prompt_ids: list[int]) -> list[float | None]:
        return [None, *[self._logprob] * (len(prompt_ids) - 1)] if prompt_ids else []


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of a `RecordingTrainer`: the method's name without `_async`, and its arguments by name."""

    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])


class RecordingTrainer(TrainingClient):
    """A `TrainingClient` that computes nothing and records every call.

    Losses and logprobs are nan, so that nobody mistakes them for results.
    """

    def __init__(self, sampler: SamplingClient | None = None, *, model_id: str = "recorded", tokenizer: Any = None):
        self._sampler = sampler
        self._model_id = model_id
        self._tokenizer = tokenizer
        self.calls: list[RecordedCall] = []

    @property
    def model_id(self) -> str:
        return self._model_id

    @property
    def datums(self) -> list[Datum]:
        """All datums that were trained on, in order."""
        trained = [call for call in self.calls if call.method.startswith("forward_backward")]
        return [datum for call in trained for datum in call.arguments["data"]]

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> ApiFuture[ForwardBackwardOutput]:
        self._record("forward", data=list(data), loss_fn=loss_fn, loss_fn_config=loss_fn_config)
        return completed(_no_output(data), "recorded forward")

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> ApiFuture[ForwardBackwardOutput]:
        self._record("forward_backward", data=list(data), loss_fn=loss_fn, loss_fn_config=loss_fn_config)
        return completed(_no_output(data), "recorded forward_backward")

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: CustomLossFn) -> ApiFuture[ForwardBackwardOutput]:
        self._record("forward_backward_custom", data=list(data), loss_fn=loss_fn)
        return completed(_no_output(data), "recorded forward_backward_custom")

    def optim_step(
        self, optim_params: AdamParams | None = None, *, adam_params: AdamParams | None = None
    ) -> ApiFuture[OptimStepResponse]:
        self._record("optim_step", adam_params=optim_params or adam_params)
        return completed(OptimStepResponse(), "recorded optim_step")

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> ApiFuture[SaveWeightsResponse]:
        self._record("save_state", name=name, ttl_seconds=ttl_seconds, overwrite=overwrite, user_metadata=user_metadata)
        return completed(SaveWeightsResponse(f"tinker://{self._model_id}/weights/{name}"), "recorded save_state")

    def load_state(self, path: str) -> ApiFuture[LoadWeightsResponse]:
        self._record("load_state", path=path)
        return completed(LoadWeightsResponse(path), "recorded load_state")

    def load_state_with_optimizer(self, path: str) -> ApiFuture[LoadWeightsResponse]:
        self._record("load_state_with_optimizer", path=path)
        return completed(LoadWeightsResponse(path), "recorded load_state_with_optimizer")

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> ApiFuture[SaveWeightsForSamplerResponse]:
        self._record("save_weights_for_sampler", name=name, ttl_seconds=ttl_seconds, user_metadata=user_metadata)
        path = f"tinker://{self._model_id}/sampler_weights/{name}"
        return completed(SaveWeightsForSamplerResponse(path), "recorded save_weights_for_sampler")

    def save_weights_and_get_sampling_client_submit(
        self,
        name: str | None = None,
        retry_config: object = None,  # noqa: ARG002 - nothing is lost on the way
    ) -> ApiFuture[SamplingClient]:
        self._record("save_weights_and_get_sampling_client", name=name)
        if self._sampler is None:
            raise ConfigError("this RecordingTrainer has no sampler; pass RecordingTrainer(ScriptedSampler(...))")
        return completed(self._sampler, "recorded save_weights_and_get_sampling_client")

    def get_info(self) -> GetInfoResponse:
        return GetInfoResponse(ModelData("recorded", "recorded", "recorded"), self._model_id, model_name="recorded")

    def get_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise ConfigError("this RecordingTrainer has no tokenizer; pass tokenizer=...")
        return self._tokenizer

    def _record(self, method: str, **arguments: Any) -> None:
        self.calls.append(RecordedCall(method, arguments))


def _no_output(data: Sequence[Datum]) -> ForwardBackwardOutput:
    lengths = [len(datum.loss_fn_inputs["target_tokens"]) for datum in data]
    return ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[{"logprobs": TensorData([math.nan] * n), "mask": TensorData([0.0] * n)} for n in lengths],
        metrics={"loss:sum": math.nan, "num_trained_tokens:sum": 0.0},
    )
