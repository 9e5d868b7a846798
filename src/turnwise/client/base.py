"""The seam between what trains and what computes: Tinker's two clients as Protocols.

Methods, their arguments and their order are Tinker's. A method that computes returns an `ApiFuture`; its `_async`
twin returns a `Submission`, or is a coroutine that gives the value (see `futures.py`, which says which and why).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from turnwise.client.futures import ApiFuture, Submission
from turnwise.errors import ConfigError
from turnwise.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    GetInfoResponse,
    LoadWeightsResponse,
    ModelInput,
    OptimStepResponse,
    SampleResponse,
    SamplingParams,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)

__all__ = ["ApiFuture", "CustomLossFn", "LossFnConfig", "SamplingClient", "Submission", "TrainingClient"]

LossFnConfig = Mapping[str, float | str]
"""A loss function's settings, such as `{"clip_low_threshold": 0.8}`."""

CustomLossFn = Callable[[list[Datum], list[Any]], tuple[Any, Mapping[str, float]]]
"""`(datums, logprobs)`, one torch tensor of logprobs per datum, to `(loss, metrics)`."""


def one_optim_params(optim_params: AdamParams | None, adam_params: AdamParams | None) -> AdamParams:
    """The settings of `optim_step`, under whichever of its two names they came."""
    params = optim_params if adam_params is None else adam_params
    if params is None or (optim_params is not None and adam_params is not None):
        raise ConfigError("optim_step takes one set of settings: optim_step(types.AdamParams(learning_rate=...))")
    return params


class SamplingClient(Protocol):
    """Draws tokens from one fixed version of the weights."""

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int = 1,
        sampling_params: SamplingParams = ...,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> ApiFuture[SampleResponse]: ...

    async def sample_async(
        self,
        prompt: ModelInput,
        num_samples: int = 1,
        sampling_params: SamplingParams = ...,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> SampleResponse:
        """`sample`, awaited; cancelling the task that awaits it stops the sampling."""
        ...

    def compute_logprobs(self, prompt: ModelInput) -> ApiFuture[list[float | None]]:
        """The logprob of each prompt token; None for the first, which nothing predicts."""
        ...

    async def compute_logprobs_async(self, prompt: ModelInput) -> list[float | None]: ...

    def get_tokenizer(self) -> Any:
        """The base model's transformers tokenizer."""
        ...

    def get_base_model(self) -> str: ...

    async def get_base_model_async(self) -> str: ...


class TrainingClient(Protocol):
    """Trains one adapter. Its operations run in the order of the calls, waited for or not."""

    @property
    def model_id(self) -> str:
        """Names the adapter in checkpoint paths; unique across processes."""
        ...

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> ApiFuture[ForwardBackwardOutput]:
        """Compute a loss and its logprobs, and no gradient."""
        ...

    def forward_async(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> Submission[ForwardBackwardOutput]: ...

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> ApiFuture[ForwardBackwardOutput]:
        """Compute a loss and add its gradient to what earlier calls left; `optim_step` uses the sum and clears it."""
        ...

    def forward_backward_async(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> Submission[ForwardBackwardOutput]: ...

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: CustomLossFn) -> ApiFuture[ForwardBackwardOutput]:
        """`forward_backward` with a loss of your own; it runs on the engine's thread and must not wait for it."""
        ...

    def forward_backward_custom_async(
        self, data: Sequence[Datum], loss_fn: CustomLossFn
    ) -> Submission[ForwardBackwardOutput]: ...

    def optim_step(
        self, optim_params: AdamParams | None = None, *, adam_params: AdamParams | None = None
    ) -> ApiFuture[OptimStepResponse]:
        """One AdamW step on the gradients collected so far. The two names are Tinker's newer and older spelling."""
        ...

    def optim_step_async(
        self, optim_params: AdamParams | None = None, *, adam_params: AdamParams | None = None
    ) -> Submission[OptimStepResponse]: ...

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> ApiFuture[SaveWeightsResponse]:
        """Write the adapter and its optimizer state, to train on from."""
        ...

    def save_state_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> Submission[SaveWeightsResponse]: ...

    def load_state(self, path: str) -> ApiFuture[LoadWeightsResponse]:
        """Take over a checkpoint's weights and start with a fresh optimizer."""
        ...

    def load_state_async(self, path: str) -> Submission[LoadWeightsResponse]: ...

    def load_state_with_optimizer(self, path: str) -> ApiFuture[LoadWeightsResponse]: ...

    def load_state_with_optimizer_async(self, path: str) -> Submission[LoadWeightsResponse]: ...

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> ApiFuture[SaveWeightsForSamplerResponse]:
        """Write the adapter as PEFT files, to sample from."""
        ...

    def save_weights_for_sampler_async(
        self, name: str, ttl_seconds: int | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> Submission[SaveWeightsForSamplerResponse]: ...

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> SamplingClient:
        """Publish the weights as they are now; written to disk too when there is a `name`."""
        ...

    async def save_weights_and_get_sampling_client_async(self, name: str | None = None) -> SamplingClient: ...

    def get_info(self) -> GetInfoResponse: ...

    async def get_info_async(self) -> GetInfoResponse: ...

    def get_tokenizer(self) -> Any: ...
