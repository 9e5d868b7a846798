"""Training and sampling clients of a service elsewhere: our types in and out, the SDK in between."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from turnwise.client.base import (
    CustomLossFn,
    LossFnConfig,
    SamplingClient,
    TrainingClient,
    datum_list,
    one_optim_params,
)
from turnwise.client.futures import ApiFuture, awaited, waited
from turnwise.client.remote_connection import Connection, Sdk
from turnwise.client.remote_wire import Dialect, mask_of, to_columns, to_seed, to_stop
from turnwise.errors import ConfigError, ServiceError
from turnwise.losses.table import VALUE_LOSS
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
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    TensorData,
)


class RemoteSamplingClient(SamplingClient):
    """Draws tokens from weights that live elsewhere."""

    def __init__(self, connection: Connection, sdk_client: Sdk, *, policy_version: int, base_model: str) -> None:
        """Do not call this; `RemoteServiceClient` and `RemoteTrainingClient` create sampling clients."""
        self._connection = connection
        self._sdk_client = sdk_client
        self._base_model = base_model
        self.policy_version = policy_version
        """Counted by the client in the order of publication, because the wire has no version number."""

    def submit(self, request: SampleRequest) -> ApiFuture[SampleResponse]:
        """Begin to sample. This is `sample` with its arguments as one value."""
        types, asked = self._connection.sdk.types, request.sampling_params
        if asked.min_p:
            raise ConfigError(f"min_p={asked.min_p} cannot be sent: Tinker's wire does not have it")
        if request.prompt_alt_tokens_k:
            raise ConfigError(
                f"prompt_alt_tokens_k={request.prompt_alt_tokens_k}: a client of a service elsewhere does not ask for "
                "alternatives to prompt tokens; sample in this process, or call the SDK's own client"
            )
        params = types.SamplingParams(
            max_tokens=asked.max_tokens,
            seed=to_seed(asked.seed),
            stop=to_stop(asked),
            temperature=asked.temperature,
            top_k=asked.top_k or -1,
            top_p=asked.top_p,
        )
        source = self._sdk_client.sample(
            types.ModelInput.from_ints(list(request.prompt)),
            request.num_samples,
            params,
            request.include_prompt_logprobs,
            request.topk_prompt_logprobs,
        )
        what = f"sample of {request.num_samples} from a prompt of {len(request.prompt)} tokens"
        return self._connection.future(source, self._to_response, what)

    def compute_logprobs(self, prompt: ModelInput) -> ApiFuture[list[float | None]]:
        source = self._sdk_client.compute_logprobs(self._connection.sdk.types.ModelInput.from_ints(prompt.to_ints()))
        return self._connection.future(source, list, f"compute_logprobs of a prompt of {prompt.length} tokens")

    def get_tokenizer(self) -> Any:
        """The tokenizer in the base model's directory on this machine."""
        return self._connection.tokenizer_of(self._base_model)

    def get_base_model(self) -> str:
        return self._base_model

    def _to_response(self, response: Sdk) -> SampleResponse:
        sequences = [
            SampledSequence(
                str(getattr(one.stop_reason, "value", one.stop_reason)),  # pyright: ignore[reportArgumentType]
                [int(token) for token in one.tokens],
                None if one.logprobs is None else [float(value) for value in one.logprobs],
            )
            for one in response.sequences
        ]
        topk = response.topk_prompt_logprobs
        return SampleResponse(
            sequences=sequences,
            prompt_logprobs=response.prompt_logprobs,
            topk_prompt_logprobs=topk,
            policy_version=self.policy_version,
            num_cached_prompt_tokens=int(getattr(response, "prompt_cache_hit_tokens", 0) or 0),
        )


class RemoteTrainingClient(TrainingClient):
    """Trains one adapter that lives elsewhere. Operations run in the order of the calls."""

    def __init__(self, connection: Connection, sdk_client: Sdk, *, base_model: str) -> None:
        """Do not call this; use `RemoteServiceClient.create_lora_training_client`."""
        self._connection = connection
        self._sdk_client = sdk_client
        self._base_model = base_model
        self._num_published = 0

    @property
    def model_id(self) -> str:
        return str(self._sdk_client.model_id)

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> ApiFuture[ForwardBackwardOutput]:
        return self._train(self._sdk_client.forward, "forward", data, loss_fn, loss_fn_config)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> ApiFuture[ForwardBackwardOutput]:
        return self._train(self._sdk_client.forward_backward, "forward_backward", data, loss_fn, loss_fn_config)

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: CustomLossFn) -> ApiFuture[ForwardBackwardOutput]:
        """Compute `forward_backward` with a loss of your own, which runs on this machine.

        The call waits for a forward pass, because the gradient can be sent only when the loss is known. Later calls
        stay after it.
        """
        datums = list(data)
        sent = self._to_sdk(datums, [{"target_tokens": one.loss_fn_inputs["target_tokens"].to_numpy()} for one in data])

        def loss(_: object, logprobs: list[Any]) -> tuple[Any, Any]:
            return loss_fn(datums, logprobs)

        what = f"forward_backward_custom of {len(datums)} datums"
        submit = partial(self._sdk_client.forward_backward_custom, sent, loss)
        combined = self._connection.call(submit, what).result()
        return self._connection.future(
            self._connection.call(combined.result, what), partial(_to_output, datums, self._connection.dialect), what
        )

    def optim_step(
        self, optim_params: AdamParams | None = None, *, adam_params: AdamParams | None = None
    ) -> ApiFuture[OptimStepResponse]:
        params = one_optim_params(optim_params, adam_params)
        names = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
        sent = self._connection.sdk.types.AdamParams(**{name: getattr(params, name) for name in names})
        source = self._sdk_client.optim_step(sent)
        return self._connection.future(
            source, lambda done: OptimStepResponse(metrics=dict(done.metrics or {})), "optim_step"
        )

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> ApiFuture[SaveWeightsResponse]:
        save = self._sdk_client.save_state
        source = save(name, ttl_seconds, overwrite, **_metadata(save, user_metadata))
        return self._connection.future(source, lambda done: SaveWeightsResponse(path=done.path), f"save_state {name}")

    def load_state(self, path: str) -> ApiFuture[LoadWeightsResponse]:
        source = _without_advice(self._sdk_client.load_state, path)
        return self._connection.future(source, lambda _: LoadWeightsResponse(path=path), f"load of {path}")

    def load_state_with_optimizer(self, path: str) -> ApiFuture[LoadWeightsResponse]:
        source = _without_advice(self._sdk_client.load_state_with_optimizer, path)
        return self._connection.future(source, lambda _: LoadWeightsResponse(path=path), f"load of {path}")

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> ApiFuture[SaveWeightsForSamplerResponse]:
        save = self._sdk_client.save_weights_for_sampler
        source = save(name, ttl_seconds, **_metadata(save, user_metadata))
        what = f"save_weights_for_sampler {name}"
        return self._connection.future(source, lambda done: SaveWeightsForSamplerResponse(path=done.path), what)

    def save_weights_and_get_sampling_client_submit(
        self,
        name: str | None = None,
        retry_config: object = None,  # noqa: ARG002 - the SDK retries by itself
    ) -> ApiFuture[RemoteSamplingClient]:
        """Publish the weights as they are now; with a `name`, also save them under that name."""
        self._num_published += 1
        version = self._num_published

        def publish() -> Sdk:
            if name is None:
                return self._sdk_client.save_weights_and_get_sampling_client()
            path = self._sdk_client.save_weights_for_sampler(name).result(self._connection.deadline_s).path
            return self._sdk_client.create_sampling_client(path)

        def wrap(sdk_client: Sdk) -> RemoteSamplingClient:
            return RemoteSamplingClient(
                self._connection, sdk_client, policy_version=version, base_model=self._base_model
            )

        # The SDK's own coroutine for this blocks the event loop, so it runs in a thread.
        return self._connection.future(
            self._connection.call(publish, "publish"), wrap, "save_weights_and_get_sampling_client"
        )

    save_weights_and_get_sampling_client = waited(save_weights_and_get_sampling_client_submit)
    save_weights_and_get_sampling_client_async = awaited(save_weights_and_get_sampling_client_submit)

    def get_info(self) -> GetInfoResponse:
        """Return the base model's name and the adapter's rank."""
        asked = self._connection.call(self._sdk_client.get_info, "get_info")
        return self._connection.future(asked, _to_info, "get_info").result()

    def get_tokenizer(self) -> Any:
        """The tokenizer in the base model's directory on this machine."""
        return self._connection.tokenizer_of(self._base_model)

    def _train(
        self, submit: Callable[..., Any], verb: str, data: Sequence[Datum], loss_fn: str, config: LossFnConfig | None
    ) -> ApiFuture[ForwardBackwardOutput]:
        datums = datum_list(data)
        columns, settings = to_columns(datums, loss_fn, dict(config or {}), self._connection.dialect)
        source = submit(self._to_sdk(datums, columns), loss_fn, settings or None)
        translate = _to_values if loss_fn == VALUE_LOSS.name else partial(_to_output, datums, self._connection.dialect)
        return self._connection.future(source, translate, f"{verb} of {len(datums)} datums")

    def _to_sdk(self, datums: Sequence[Datum], columns: Sequence[Mapping[str, Any]]) -> list[Sdk]:
        types = self._connection.sdk.types
        return [
            types.Datum(
                model_input=types.ModelInput.from_ints(datum.model_input.to_ints()), loss_fn_inputs=dict(inputs)
            )
            for datum, inputs in zip(datums, columns, strict=True)
        ]


def _without_advice(load: Callable[[str], Any], path: str) -> Any:
    """Silence a warning: SDKs from 0.36 on advise to create a new client from the checkpoint, but that client would
    have another id.
    """
    logger = logging.getLogger("tinker.lib.public_interfaces.training_client")
    logger.addFilter(_is_no_advice)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return load(path)
    finally:
        logger.removeFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("DEPRECATED")


def _metadata(save: Callable[..., Any], user_metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """Leave out the metadata with SDKs before 0.36, which have none for checkpoints."""
    is_taken = bool(user_metadata) and "user_metadata" in inspect.signature(save).parameters
    return {"user_metadata": dict(user_metadata or {})} if is_taken else {}


def _to_output(datums: Sequence[Datum], dialect: Dialect, output: Sdk) -> ForwardBackwardOutput:
    """The SDK's output as ours. Tinker computes every logprob; a turnwise service only those that the mask selects."""
    if len(output.loss_fn_outputs) != len(datums):
        raise ServiceError(f"{len(output.loss_fn_outputs)} outputs came back for {len(datums)} datums")
    outputs: list[dict[str, TensorData]] = []
    num_trained = 0
    for datum, entry in zip(datums, output.loss_fn_outputs, strict=True):
        arrays = {str(key): np.asarray(value.to_numpy()) for key, value in entry.items()}
        mask = mask_of(datum)
        outputs.append(
            {
                **{key: TensorData.from_numpy(array) for key, array in arrays.items()},
                "mask": TensorData.from_numpy(
                    (mask if dialect == "turnwise" else np.ones_like(mask)).astype(np.float32)
                ),
            }
        )
        num_trained += int(mask.sum())
    metrics = {str(key): float(value) for key, value in output.metrics.items()}
    return ForwardBackwardOutput(
        loss_fn_output_type=str(output.loss_fn_output_type),
        loss_fn_outputs=outputs,
        metrics={**metrics, "num_trained_tokens:sum": float(num_trained)},
    )


def _to_values(output: Sdk) -> ForwardBackwardOutput:
    """A critic's answer: values and their mask, one per input position."""
    outputs = [
        {str(key): TensorData.from_numpy(np.asarray(value.to_numpy())) for key, value in entry.items()}
        for entry in output.loss_fn_outputs
    ]
    if not outputs or any("values" not in entry for entry in outputs):
        raise ServiceError("no values came back; this service does not train critics")
    return ForwardBackwardOutput(
        loss_fn_output_type=str(output.loss_fn_output_type),
        loss_fn_outputs=outputs,
        metrics={str(key): float(value) for key, value in output.metrics.items()},
    )


def _to_info(info: Sdk) -> GetInfoResponse:
    data = info.model_data
    name = str(data.model_name or getattr(info, "model_name", None) or "")
    return GetInfoResponse(
        model_data=ModelData(
            arch=str(data.arch or ""), model_name=name, tokenizer_id=str(getattr(data, "tokenizer_id", None) or name)
        ),
        model_id=str(info.model_id),
        is_lora=bool(getattr(info, "is_lora", True)),
        lora_rank=getattr(info, "lora_rank", None),
        model_name=name,
    )
