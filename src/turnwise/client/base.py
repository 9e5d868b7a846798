"""The seam between what trains and what computes: Tinker's two clients as Protocols.

Methods, their arguments and their order are Tinker's. A method that computes returns an `ApiFuture`; its `_async`
twin returns a `Submission`, or is a coroutine that gives the value (see `futures.py`, which says which and why). A
client inherits from these classes, implements the plain methods, and gets the twins from here. Each client spells out
Tinker's signatures again, so that editors and type checkers show them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

from turnwise.client.futures import ApiFuture, Submission, awaited, in_thread, submitted, waited
from turnwise.errors import ConfigError, DataError
from turnwise.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    GetInfoResponse,
    LoadWeightsResponse,
    ModelInput,
    OptimStepResponse,
    SampleRequest,
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

DEFAULT_SAMPLING_PARAMS = SamplingParams()


def one_optim_params(optim_params: AdamParams | None, adam_params: AdamParams | None) -> AdamParams:
    """Return the settings of `optim_step`, given under one of its two names."""
    params = optim_params if adam_params is None else adam_params
    if params is None or (optim_params is not None and adam_params is not None):
        raise ConfigError("optim_step takes one set of settings: optim_step(types.AdamParams(learning_rate=...))")
    if not isinstance(params, AdamParams):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"optim_step({params!r:.80}); expected types.AdamParams(learning_rate=...)")
    return params


def datum_list(data: object) -> list[Datum]:
    """Return the datums of a call as a list; refuse what is no list of datums, and an empty one."""
    if isinstance(data, Datum) or not isinstance(data, Iterable):
        raise DataError(f"data is a {type(data).__name__}; expected a list of types.Datum")
    datums = list(cast(Iterable[object], data))
    if not datums:
        raise DataError("data is empty; expected at least one Datum")
    for index, datum in enumerate(datums):
        if not isinstance(datum, Datum):
            raise DataError(f"data[{index}] is a {type(datum).__name__}; expected a types.Datum")
    return cast(list[Datum], datums)


class SamplingClient(Protocol):
    """Draws tokens from one fixed version of the weights.

    >>> import turnwise as tw
    >>> with tw.ServiceClient() as service:
    ...     sampler = service.create_sampling_client(base_model="tiny")
    ...     prompt = tw.types.ModelInput.from_ints(sampler.get_tokenizer().encode("hi"))
    ...     reply = sampler.sample(prompt, 1, tw.types.SamplingParams(max_tokens=3)).result()
    >>> len(reply.sequences[0].tokens) <= 3
    True
    """

    @abstractmethod
    def submit(self, request: SampleRequest) -> ApiFuture[SampleResponse]:
        """Begin to sample. This is `sample` with its arguments as one value."""
        ...

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int = 1,
        sampling_params: SamplingParams = DEFAULT_SAMPLING_PARAMS,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> ApiFuture[SampleResponse]:
        """Draw `num_samples` continuations of one prompt; cancelling the future stops the sampling."""
        tokens = prompt_tokens(prompt)
        return self.submit(
            SampleRequest(tokens, sampling_params, num_samples, include_prompt_logprobs, topk_prompt_logprobs)
        )

    sample_async = awaited(sample)

    @abstractmethod
    def compute_logprobs(self, prompt: ModelInput) -> ApiFuture[list[float | None]]:
        """Compute the logprob of each prompt token. The first one gets None, because nothing predicts it."""
        ...

    compute_logprobs_async = awaited(compute_logprobs)

    @abstractmethod
    def get_tokenizer(self) -> Any:
        """Return the base model's transformers tokenizer."""
        ...

    @abstractmethod
    def get_base_model(self) -> str:
        """Return the base model's name."""
        ...

    get_base_model_async = in_thread(get_base_model)


class TrainingClient(Protocol):
    """Trains one adapter. Its operations run in the order of the calls, whether or not you wait for them.

    >>> import turnwise as tw
    >>> with tw.ServiceClient() as service:
    ...     trainer = service.create_lora_training_client("tiny", rank=4, seed=0)
    ...     ids = trainer.get_tokenizer().encode("one two three")
    ...     datum = tw.types.Datum(
    ...         model_input=tw.types.ModelInput.from_ints(ids[:-1]),
    ...         loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
    ...     )
    ...     trainer.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"] > 0
    True
    """

    @property
    @abstractmethod
    def model_id(self) -> str:
        """The adapter's name in checkpoint paths; unique across processes."""
        ...

    @abstractmethod
    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> ApiFuture[ForwardBackwardOutput]:
        """Compute a loss and its logprobs without a gradient."""
        ...

    forward_async = submitted(forward)

    @abstractmethod
    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> ApiFuture[ForwardBackwardOutput]:
        """Compute a loss and add its gradient to those of earlier calls; `optim_step` uses the sum and clears it."""
        ...

    forward_backward_async = submitted(forward_backward)

    @abstractmethod
    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: CustomLossFn) -> ApiFuture[ForwardBackwardOutput]:
        """Compute `forward_backward` with a loss of your own: `(datums, logprobs) -> (loss, metrics)`."""
        ...

    forward_backward_custom_async = submitted(forward_backward_custom)

    @abstractmethod
    def optim_step(
        self, optim_params: AdamParams | None = None, *, adam_params: AdamParams | None = None
    ) -> ApiFuture[OptimStepResponse]:
        """Take one AdamW step on the gradients collected so far. Tinker spells the argument in two ways."""
        ...

    optim_step_async = submitted(optim_step)

    @abstractmethod
    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> ApiFuture[SaveWeightsResponse]:
        """Write the adapter and its optimizer state, so that training can go on; may be deleted after `ttl_seconds`."""
        ...

    save_state_async = submitted(save_state)

    @abstractmethod
    def load_state(self, path: str) -> ApiFuture[LoadWeightsResponse]:
        """Load a checkpoint's weights and start with a fresh optimizer."""
        ...

    load_state_async = submitted(load_state)

    @abstractmethod
    def load_state_with_optimizer(self, path: str) -> ApiFuture[LoadWeightsResponse]:
        """Load a checkpoint's weights and optimizer state: training goes on as if it had not stopped."""
        ...

    load_state_with_optimizer_async = submitted(load_state_with_optimizer)

    @abstractmethod
    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> ApiFuture[SaveWeightsForSamplerResponse]:
        """Write the adapter as PEFT files, to sample from: `create_sampling_client(model_path=...)`."""
        ...

    save_weights_for_sampler_async = submitted(save_weights_for_sampler)

    @abstractmethod
    def save_weights_and_get_sampling_client_submit(
        self, name: str | None = None, retry_config: object = None
    ) -> ApiFuture[SamplingClient]:
        """Publish the weights that the operations before this call leave; with a `name`, write them to disk too."""
        ...

    save_weights_and_get_sampling_client = waited(save_weights_and_get_sampling_client_submit)
    save_weights_and_get_sampling_client_async = awaited(save_weights_and_get_sampling_client_submit)

    @abstractmethod
    def get_info(self) -> GetInfoResponse:
        """Return the base model's name and the adapter's rank."""
        ...

    get_info_async = in_thread(get_info)

    @abstractmethod
    def get_tokenizer(self) -> Any:
        """Return the base model's transformers tokenizer."""
        ...


def prompt_tokens(prompt: object) -> list[int]:
    """Return a prompt's token ids; refuse what is not a `ModelInput`."""
    if not isinstance(prompt, ModelInput):
        raise DataError(f"prompt is a {type(prompt).__name__}; expected a ModelInput: ModelInput.from_ints(token_ids)")
    return prompt.to_ints()
