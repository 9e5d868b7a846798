"""The in-process training client: one adapter, its operations in the order of the calls."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from turnwise.client.base import CustomLossFn, LossFnConfig, one_optim_params
from turnwise.client.checkpoints import Checkpoint, CheckpointInfo, CheckpointPath, CheckpointStore, Kind, expiry
from turnwise.client.engines import LoadedModel
from turnwise.client.futures import ApiFuture, Submission
from turnwise.client.sampling import SamplingClient
from turnwise.engine.worker import EngineWorker
from turnwise.errors import CheckpointError, DataError
from turnwise.types import (
    AdamParams,
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    GetInfoResponse,
    LoadWeightsResponse,
    ModelData,
    ModelInput,
    OptimStepResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)

if TYPE_CHECKING:
    from turnwise.engine.engine import Engine
    from turnwise.engine.training.trainable import Trainable

T = TypeVar("T")


class TrainingClient:
    """Trains one LoRA adapter. Operations run in the order of the calls, waited for or not.

    >>> client.forward_backward(datums, "importance_sampling")
    >>> client.optim_step(types.AdamParams(learning_rate=2e-5)).result()
    """

    def __init__(
        self,
        model: LoadedModel,
        adapter: Trainable,
        store: CheckpointStore,
        *,
        model_id: str,
        user_metadata: Mapping[str, str],
    ) -> None:
        """`ServiceClient` creates these."""
        self._model = model
        self._adapter = adapter
        self._store = store
        self._model_id = model_id
        self._user_metadata = user_metadata
        # The adapter and its optimizer state leave the device with the client, after what is still queued.
        weakref.finalize(self, _drop_adapter, model.worker, model_id, adapter).atexit = False

    @property
    def model_id(self) -> str:
        """Names the adapter in checkpoint paths; unique across processes."""
        return self._model_id

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> ApiFuture[ForwardBackwardOutput]:
        """Compute a loss and its logprobs, and no gradient."""
        adapter, datums, config = self._adapter, copy_datums(data), self._loss_config(loss_fn_config)
        future = self._model.worker.run_steps(
            self._model_id, lambda engine: engine.forward(adapter, datums, loss_fn, config)
        )
        return self._api_future(future, f"forward of {len(datums)} datums")

    def forward_async(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> Submission[ForwardBackwardOutput]:
        return Submission(self.forward(data, loss_fn, loss_fn_config))

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> ApiFuture[ForwardBackwardOutput]:
        """Compute a loss and add its gradient to what earlier calls left; `optim_step` uses the sum and clears it."""
        adapter, datums, config = self._adapter, copy_datums(data), self._loss_config(loss_fn_config)
        future = self._model.worker.run_steps(
            self._model_id, lambda engine: engine.forward_backward(adapter, datums, loss_fn, config)
        )
        return self._api_future(future, f"forward_backward of {len(datums)} datums")

    def forward_backward_async(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> Submission[ForwardBackwardOutput]:
        return Submission(self.forward_backward(data, loss_fn, loss_fn_config))

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: CustomLossFn) -> ApiFuture[ForwardBackwardOutput]:
        """`forward_backward` with a loss of your own, `(datums, logprobs) -> (loss, metrics)` on torch tensors.

        It runs on the engine's thread: what it needs from this engine is computed before and passed in.
        """
        adapter, datums = self._adapter, copy_datums(data)
        future = self._model.worker.run_steps(
            self._model_id, lambda engine: engine.forward_backward_custom(adapter, datums, loss_fn)
        )
        return self._api_future(future, f"forward_backward_custom of {len(datums)} datums")

    def forward_backward_custom_async(
        self, data: Sequence[Datum], loss_fn: CustomLossFn
    ) -> Submission[ForwardBackwardOutput]:
        return Submission(self.forward_backward_custom(data, loss_fn))

    def optim_step(
        self, optim_params: AdamParams | None = None, *, adam_params: AdamParams | None = None
    ) -> ApiFuture[OptimStepResponse]:
        """One AdamW step on the gradients collected so far. The two names are Tinker's newer and older spelling."""
        params = one_optim_params(optim_params, adam_params)
        adapter = self._adapter
        return self._run(lambda engine: OptimStepResponse(metrics=engine.optim_step(adapter, params)), "optim_step")

    def optim_step_async(
        self, optim_params: AdamParams | None = None, *, adam_params: AdamParams | None = None
    ) -> Submission[OptimStepResponse]:
        return Submission(self.optim_step(optim_params, adam_params=adam_params))

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> ApiFuture[SaveWeightsResponse]:
        """Write the adapter and its optimizer state, to train on from; `ttl_seconds` later it may be deleted."""
        adapter = self._adapter

        def fill(engine: Engine, directory: Path) -> None:
            engine.save_adapter(adapter, directory, with_optimizer=True)

        save = self._saving(
            "weights", name, self._info(ttl_seconds, user_metadata, has_optimizer=True), fill, overwrite
        )
        return self._run(lambda engine: SaveWeightsResponse(path=save(engine)), f"save_state {name}")

    def save_state_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> Submission[SaveWeightsResponse]:
        return Submission(self.save_state(name, ttl_seconds, overwrite, user_metadata))

    def load_state(self, path: str) -> ApiFuture[LoadWeightsResponse]:
        """Take over a checkpoint's weights and start with a fresh optimizer."""
        return self._load(path, with_optimizer=False)

    def load_state_async(self, path: str) -> Submission[LoadWeightsResponse]:
        return Submission(self.load_state(path))

    def load_state_with_optimizer(self, path: str) -> ApiFuture[LoadWeightsResponse]:
        """Take over a checkpoint's weights and optimizer state: training goes on as if it had not stopped."""
        return self._load(path, with_optimizer=True)

    def load_state_with_optimizer_async(self, path: str) -> Submission[LoadWeightsResponse]:
        return Submission(self.load_state_with_optimizer(path))

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> ApiFuture[SaveWeightsForSamplerResponse]:
        """Write the adapter as PEFT files, to sample from: `create_sampling_client(model_path=...)`."""
        adapter = self._adapter

        def fill(engine: Engine, directory: Path) -> None:
            engine.save_adapter(adapter, directory, with_optimizer=False)

        info = self._info(ttl_seconds, user_metadata, has_optimizer=False)
        save = self._saving("sampler_weights", name, info, fill, overwrite=False)
        return self._run(
            lambda engine: SaveWeightsForSamplerResponse(path=save(engine)), f"save_weights_for_sampler {name}"
        )

    def save_weights_for_sampler_async(
        self, name: str, ttl_seconds: int | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> Submission[SaveWeightsForSamplerResponse]:
        return Submission(self.save_weights_for_sampler(name, ttl_seconds, user_metadata))

    def save_weights_and_get_sampling_client_submit(
        self,
        name: str | None = None,
        retry_config: object = None,  # noqa: ARG002
    ) -> ApiFuture[SamplingClient]:
        """Publish the weights as they are when the operations before are done.

        The client samples from a copy in memory. With a `name` the copy is also written as sampler weights, over
        those of an earlier call with that name. There is nothing to retry in process.
        """
        adapter, model = self._adapter, self._model
        info = self._info(None, None, has_optimizer=False)
        place = CheckpointPath(self._model_id, "sampler_weights", name) if name is not None else None
        store = self._store

        def publish(engine: Engine) -> SamplingClient:
            policy = engine.publish(adapter)
            if place is not None:
                store.save(place, info, lambda directory: engine.save_policy(policy, directory), overwrite=True)
            return SamplingClient(model, policy)

        return self._run(publish, "save_weights_and_get_sampling_client")

    def save_weights_and_get_sampling_client(
        self, name: str | None = None, retry_config: object = None
    ) -> SamplingClient:
        """`save_weights_and_get_sampling_client_submit`, waited for."""
        return self.save_weights_and_get_sampling_client_submit(name, retry_config).result()

    async def save_weights_and_get_sampling_client_async(
        self, name: str | None = None, retry_config: object = None
    ) -> SamplingClient:
        return await self.save_weights_and_get_sampling_client_submit(name, retry_config)

    def create_sampling_client(self, model_path: str, retry_config: object = None) -> SamplingClient:  # noqa: ARG002
        """A client for saved weights of the same base model."""
        return self._sampling_from(model_path).result()

    async def create_sampling_client_async(
        self,
        model_path: str,
        retry_config: object = None,  # noqa: ARG002
    ) -> SamplingClient:
        return await self._sampling_from(model_path)

    def get_info(self) -> GetInfoResponse:
        return GetInfoResponse(
            model_data=ModelData(
                arch=self._model.worker.engine.arch,
                model_name=self._model.name,
                tokenizer_id=str(self._model.directory),
            ),
            model_id=self._model_id,
            is_lora=True,
            lora_rank=self._adapter.lora.rank,
            model_name=self._model.name,
        )

    async def get_info_async(self) -> GetInfoResponse:
        return self.get_info()

    def get_tokenizer(self) -> Any:
        """The base model's transformers tokenizer."""
        return self._model.get_tokenizer()

    def _api_future(self, future: Future[T], what: str) -> ApiFuture[T]:
        return ApiFuture(future, f"{what} on {self._model_id}")

    def _loss_config(self, loss_fn_config: LossFnConfig | None) -> dict[str, float | str]:
        """The caller's settings, copied; a checkpoint path as `kl_reference` becomes its directory."""
        config = dict(loss_fn_config or {})
        reference = config.get("kl_reference", "base")
        if isinstance(reference, str) and reference != "base":
            checkpoint = self._store.find(reference)
            check_loadable(checkpoint, self._model, with_optimizer=False)
            config["kl_reference"] = str(checkpoint.directory)
        return config

    def _run(self, work: Callable[[Engine], T], what: str) -> ApiFuture[T]:
        return self._api_future(self._model.worker.run(self._model_id, work), what)

    def _saving(
        self, kind: Kind, name: str, info: CheckpointInfo, fill: Callable[[Engine, Path], None], overwrite: bool
    ) -> Callable[[Engine], str]:
        """What saves a checkpoint on the engine's thread and gives its path; a bad name is refused here and now."""
        store, place = self._store, CheckpointPath(self._model_id, kind, name)
        return lambda engine: store.save(place, info, lambda directory: fill(engine, directory), overwrite=overwrite)

    def _info(
        self, ttl_seconds: int | None, user_metadata: Mapping[str, str] | None, *, has_optimizer: bool
    ) -> CheckpointInfo:
        return CheckpointInfo(
            base_model=self._model.name,
            stored_model=self._model.stored_model,
            model_directory=str(self._model.directory),
            lora=self._adapter.lora,
            has_optimizer=has_optimizer,
            created_at=datetime.now(UTC).isoformat(),
            expires_at=expiry(ttl_seconds),
            user_metadata={**self._user_metadata, **(user_metadata or {})},
        )

    def _load(self, path: str, *, with_optimizer: bool) -> ApiFuture[LoadWeightsResponse]:
        adapter, store, model = self._adapter, self._store, self._model

        def load(engine: Engine) -> LoadWeightsResponse:
            checkpoint = store.find(path)
            check_loadable(checkpoint, model, with_optimizer=with_optimizer)
            engine.load_adapter(adapter, checkpoint.directory, with_optimizer=with_optimizer)
            return LoadWeightsResponse(path=path)

        return self._run(load, f"load of {path}")

    def _sampling_from(self, path: str) -> ApiFuture[SamplingClient]:
        store, model = self._store, self._model

        def load(engine: Engine) -> SamplingClient:
            checkpoint = store.find(path)
            check_loadable(checkpoint, model, with_optimizer=False)
            return SamplingClient(model, engine.load_policy(checkpoint.directory))

        return self._run(load, f"create_sampling_client {path}")


def copy_datums(data: Sequence[Datum]) -> list[Datum]:
    """Datums that stay as they are when the caller goes on to change its lists and arrays."""
    datums = list(data)
    if not datums:
        raise DataError("data is empty; expected at least one Datum")
    for index, datum in enumerate(datums):
        if not isinstance(datum, Datum):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(f"data[{index}] is a {type(datum).__name__}; expected a types.Datum")
    return [_copy_datum(datum) for datum in datums]


def _copy_datum(datum: Datum) -> Datum:
    chunks = [EncodedTextChunk(tokens=copy.copy(chunk.tokens)) for chunk in datum.model_input.chunks]
    inputs = {key: tensor.copy() for key, tensor in datum.loss_fn_inputs.items()}
    return Datum(model_input=ModelInput(chunks=chunks), loss_fn_inputs=inputs)


def check_loadable(checkpoint: Checkpoint, model: LoadedModel, *, with_optimizer: bool) -> None:
    """Refuse a checkpoint of another base model, or one without the optimizer state that was asked for."""
    info = checkpoint.info
    if info is None:
        return  # a plain PEFT directory names no base for certain; the engine compares its shapes
    if info.stored_model != model.stored_model and Path(info.model_directory) != model.directory:
        raise CheckpointError(
            f"{checkpoint.path} belongs to the base model {info.base_model}, not to {model.name}; "
            "create a client from it: service.create_training_client_from_state(path)"
        )
    if with_optimizer and not info.has_optimizer:
        raise CheckpointError(f"{checkpoint.path} has no optimizer state; load it without, or save with save_state")


def _drop_adapter(worker: EngineWorker, model_id: str, adapter: Trainable) -> None:
    if not worker.is_stopped:
        worker.run(model_id, lambda engine: engine.drop_adapter(adapter))
