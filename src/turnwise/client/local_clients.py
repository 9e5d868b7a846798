"""The in-process clients: one trains an adapter, one samples from a published version of it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from turnwise.client.base import (
    CustomLossFn,
    LossFnConfig,
    SamplingClient,
    TrainingClient,
    datum_list,
    one_optim_params,
    prompt_tokens,
)
from turnwise.client.checkpoints import Checkpoint, CheckpointInfo, CheckpointPath, CheckpointStore, Kind, expiry
from turnwise.client.engines import LoadedModel
from turnwise.client.futures import ApiFuture, awaited, in_thread, waited
from turnwise.client.shared_weights import MakeBuffer, SharedWeights
from turnwise.engine.worker import EngineWorker
from turnwise.errors import CheckpointError, DataError
from turnwise.losses.outside import find_function, is_outside
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
    SampleRequest,
    SampleResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)

if TYPE_CHECKING:
    from turnwise.engine.engine import Engine
    from turnwise.engine.model.lora import Policy
    from turnwise.engine.training.trainable import Trainable

T = TypeVar("T")


class LocalSamplingClient(SamplingClient):
    """Draws tokens from one published version of the weights; training goes on without changing it.

    >>> client.sample(types.ModelInput.from_ints(ids), 8, types.SamplingParams(max_tokens=64)).result().sequences
    """

    def __init__(self, model: LoadedModel, policy: Policy) -> None:
        """Do not call this; use `save_weights_and_get_sampling_client` or `create_sampling_client`."""
        self._model = model
        self._policy = policy

    @property
    def policy_version(self) -> int:
        """The version of the weights that this client samples from; every `SampleResponse` carries it."""
        return self._policy.version

    def submit(self, request: SampleRequest) -> ApiFuture[SampleResponse]:
        """Begin to sample. This is `sample` with its arguments as one value."""
        future = self._model.worker.sample(request, self._policy)
        what = f"sample of {request.num_samples} from a prompt of {len(request.prompt)} tokens on {self._model.name}"
        return ApiFuture(future, what, on_abandoned=future.cancel)

    def compute_logprobs(self, prompt: ModelInput) -> ApiFuture[list[float | None]]:
        """Compute the logprob of each prompt token. The first one gets None, because nothing predicts it."""
        tokens = prompt_tokens(prompt)
        future = self._model.worker.compute_logprobs(tokens, self._policy)
        what = f"compute_logprobs of a prompt of {len(tokens)} tokens on {self._model.name}"
        return ApiFuture(future, what, on_abandoned=future.cancel)

    def warm_up(self, max_context: int = 4096) -> ApiFuture[int]:
        """Make the first requests as fast as the later ones, for dialogues of up to `max_context` tokens.

        On a GPU this captures the graphs that decoding replays, which takes a few seconds; you need not wait for it.
        Without it, each graph is captured when it is first needed. Returns the number of graphs: 0 on a CPU.
        """
        if max_context < 1:
            raise DataError(f"max_context={max_context}; expected at least 1 token")
        future = self._model.worker.run_steps("warm-up", lambda engine: engine.warm_up(self._policy, max_context))
        return ApiFuture(future, f"warm_up of {self._model.name}", on_abandoned=future.cancel)

    warm_up_async = awaited(warm_up)

    def get_tokenizer(self) -> Any:
        """Return the base model's transformers tokenizer."""
        return self._model.get_tokenizer()

    def get_base_model(self) -> str:
        return self._model.name


class LocalTrainingClient(TrainingClient):
    """Trains one LoRA adapter, or all weights. Operations run in the order of the calls, also if you do not wait.

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
        """Do not call this; use `ServiceClient.create_lora_training_client`."""
        self._model = model
        self._adapter = adapter
        self._store = store
        self._model_id = model_id
        self._user_metadata = user_metadata
        # When the client is freed, its adapter and optimizer state leave the device, after the queued operations.
        weakref.finalize(self, _drop_adapter, model.worker, model_id, adapter).atexit = False

    @property
    def worker(self) -> EngineWorker:
        """The thread that owns the engine which trains these weights."""
        return self._model.worker

    @property
    def model_id(self) -> str:
        """The adapter's name in checkpoint paths; unique across processes."""
        return self._model_id

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> ApiFuture[ForwardBackwardOutput]:
        """Compute a loss and its logprobs without a gradient."""
        adapter, datums, config = self._adapter, copy_datums(data), self._loss_config(loss_fn_config)
        loss = find_function(loss_fn) if is_outside(loss_fn) else loss_fn
        future = self._model.worker.run_steps(
            self._model_id, lambda engine: engine.forward(adapter, datums, loss, config)
        )
        return self._api_future(future, f"forward of {len(datums)} datums")

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> ApiFuture[ForwardBackwardOutput]:
        """Compute a loss and add its gradient to those of earlier calls; `optim_step` uses the sum and clears it."""
        adapter, datums, config = self._adapter, copy_datums(data), self._loss_config(loss_fn_config)
        loss = find_function(loss_fn) if is_outside(loss_fn) else loss_fn
        future = self._model.worker.run_steps(
            self._model_id, lambda engine: engine.forward_backward(adapter, datums, loss, config)
        )
        return self._api_future(future, f"forward_backward of {len(datums)} datums")

    def forward_backward_custom(self, data: Sequence[Datum], loss_fn: CustomLossFn) -> ApiFuture[ForwardBackwardOutput]:
        """Compute `forward_backward` with a loss of your own, `(datums, logprobs) -> (loss, metrics)` on torch tensors.

        The loss runs on the engine's thread and cannot call this engine: compute what it needs before, and pass it in.
        """
        adapter, datums = self._adapter, copy_datums(data)
        future = self._model.worker.run_steps(
            self._model_id, lambda engine: engine.forward_backward_custom(adapter, datums, loss_fn)
        )
        return self._api_future(future, f"forward_backward_custom of {len(datums)} datums")

    def optim_step(
        self, optim_params: AdamParams | None = None, *, adam_params: AdamParams | None = None
    ) -> ApiFuture[OptimStepResponse]:
        """Take one AdamW step on the gradients collected so far. Tinker spells the argument in two ways."""
        params = one_optim_params(optim_params, adam_params)
        adapter = self._adapter
        return self._run(lambda engine: OptimStepResponse(metrics=engine.optim_step(adapter, params)), "optim_step")

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> ApiFuture[SaveWeightsResponse]:
        """Write the adapter and its optimizer state, so that training can go on; may be deleted after `ttl_seconds`."""
        adapter = self._adapter

        def fill(engine: Engine, directory: Path) -> None:
            engine.save_adapter(adapter, directory, with_optimizer=True)

        save = self._saving(
            "weights", name, self._info(ttl_seconds, user_metadata, has_optimizer=True), fill, overwrite
        )
        return self._run(lambda engine: SaveWeightsResponse(path=save(engine)), f"save_state {name}")

    def load_state(self, path: str) -> ApiFuture[LoadWeightsResponse]:
        """Load a checkpoint's weights and start with a fresh optimizer."""
        return self._load(path, with_optimizer=False)

    def load_state_with_optimizer(self, path: str) -> ApiFuture[LoadWeightsResponse]:
        """Load a checkpoint's weights and optimizer state: training goes on as if it had not stopped."""
        return self._load(path, with_optimizer=True)

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

    def save_weights_and_get_sampling_client_submit(
        self,
        name: str | None = None,
        retry_config: object = None,  # noqa: ARG002
    ) -> ApiFuture[LocalSamplingClient]:
        """Publish the weights that the operations before this call leave.

        The new client samples from a copy in memory. With a `name`, the copy is also written to disk as sampler
        weights and replaces those of an earlier call with that name. `retry_config` has no effect in this process.
        """
        adapter, model = self._adapter, self._model
        info = self._info(None, None, has_optimizer=False)
        place = CheckpointPath(self._model_id, "sampler_weights", name) if name is not None else None
        store = self._store

        def publish(engine: Engine) -> LocalSamplingClient:
            policy = engine.publish(adapter)
            if place is not None:
                store.save(place, info, lambda directory: engine.save_policy(policy, directory), overwrite=True)
            return LocalSamplingClient(model, policy)

        return self._run(publish, "save_weights_and_get_sampling_client")

    # Repeats the base class, because these return the local client, which has more methods.
    save_weights_and_get_sampling_client = waited(save_weights_and_get_sampling_client_submit)
    save_weights_and_get_sampling_client_async = awaited(save_weights_and_get_sampling_client_submit)

    def share_weights(self, make_buffer: MakeBuffer | None = None) -> ApiFuture[SharedWeights]:
        """Freeze the whole weights that the operations before this call leave, for another process on the same GPU."""
        adapter, worker, model_id = self._adapter, self._model.worker, self._model_id
        return self._run(
            lambda engine: SharedWeights(worker, model_id, engine.publish_whole(adapter), make_buffer), "share_weights"
        )

    def create_sampling_client(self, model_path: str, retry_config: object = None) -> LocalSamplingClient:  # noqa: ARG002
        """Create a client for saved weights of the same base model."""
        return self._sampling_from(model_path).result()

    create_sampling_client_async = in_thread(create_sampling_client)

    def get_info(self) -> GetInfoResponse:
        """Return the base model's name and the adapter's rank; 0 if all weights are trained."""
        lora = self._adapter.lora
        return GetInfoResponse(
            model_data=ModelData(
                arch=self._model.worker.engine.arch,
                model_name=self._model.name,
                tokenizer_id=str(self._model.directory),
            ),
            model_id=self._model_id,
            is_lora=lora is not None,
            lora_rank=0 if lora is None else lora.rank,
            model_name=self._model.name,
        )

    def get_tokenizer(self) -> Any:
        """Return the base model's transformers tokenizer."""
        return self._model.get_tokenizer()

    def _api_future(self, future: Future[T], what: str) -> ApiFuture[T]:
        return ApiFuture(future, f"{what} on {self._model_id}")

    def _loss_config(self, loss_fn_config: LossFnConfig | None) -> dict[str, float | str]:
        """A copy of the caller's settings. If `kl_reference` is a checkpoint path, it becomes the checkpoint's
        directory."""
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
        """Return the operation that saves a checkpoint on the engine's thread. A bad name is refused at once."""
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

    def _sampling_from(self, path: str) -> ApiFuture[LocalSamplingClient]:
        store, model = self._store, self._model

        def load(engine: Engine) -> LocalSamplingClient:
            checkpoint = store.find(path)
            check_loadable(checkpoint, model, with_optimizer=False)
            return LocalSamplingClient(model, engine.load_policy(checkpoint.directory))

        return self._run(load, f"create_sampling_client {path}")


def copy_datums(data: Sequence[Datum]) -> list[Datum]:
    """Copy datums, so that they do not change when the caller changes its lists and arrays."""
    return [_copy_datum(datum) for datum in datum_list(data)]


def _copy_datum(datum: Datum) -> Datum:
    chunks = [EncodedTextChunk(tokens=copy.copy(chunk.tokens)) for chunk in datum.model_input.chunks]
    inputs = {key: tensor.copy() for key, tensor in datum.loss_fn_inputs.items()}
    return Datum(model_input=ModelInput(chunks=chunks), loss_fn_inputs=inputs)


def check_loadable(checkpoint: Checkpoint, model: LoadedModel, *, with_optimizer: bool) -> None:
    """Refuse a checkpoint of another base model, or one without the optimizer state that was asked for."""
    info = checkpoint.info
    if info is None:
        return  # a plain PEFT directory may not name its base model; the engine compares the shapes instead
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
