"""The in-process service: Tinker's `ServiceClient` with the engine in the same process and no HTTP.

    service = ServiceClient()
    trainer = service.create_lora_training_client("Qwen/Qwen3-0.6B", rank=16)

Importing this module loads neither torch nor transformers; the first client that is created does.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from turnwise.client import engines
from turnwise.client.checkpoints import Checkpoint, CheckpointStore, new_model_id
from turnwise.client.engines import LoadedModel
from turnwise.client.futures import in_thread
from turnwise.client.local_clients import LocalSamplingClient, LocalTrainingClient, check_loadable
from turnwise.engine.config import ClusterConfig, EngineConfig
from turnwise.engine.worker import EngineWorker
from turnwise.errors import CheckpointError, ConfigError, EngineStoppedError
from turnwise.models import store as model_store
from turnwise.models.directories import ADAPTER_CONFIG
from turnwise.runtime.closing import ClosedOnExit
from turnwise.types import GetServerCapabilitiesResponse, LoraConfig, SupportedModel

if TYPE_CHECKING:
    from turnwise.engine.engine import Engine
    from turnwise.engine.training.trainable import Trainable

__all__ = ["LocalSamplingClient", "LocalTrainingClient", "ServiceClient"]


class ServiceClient(ClosedOnExit):
    """Creates training and sampling clients.

    Clients of one base model share its engine, across services too. The first client loads it. Use the service as a
    context manager, or call `close`, to free the device before the process ends.

    >>> import turnwise as tw
    >>> with tw.ServiceClient() as service:
    ...     trainer = service.create_lora_training_client("tiny", rank=4)
    ...     trainer.get_tokenizer().decode(trainer.get_tokenizer().encode("hi"))
    'hi'
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        data_dir: str | Path | None = None,
        engine: EngineConfig | None = None,
        cluster: ClusterConfig | None = None,
        aliases: Mapping[str, str] | None = None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            data_dir: Checkpoints are kept in `<data_dir>/checkpoints`; default: the model store's home.
            cluster: How many processes train together; default: this one alone.
            aliases: `{asked: used}`, base models that stand in for others; on top of `TURNWISE_ALIASES`.
            user_metadata: Written into every checkpoint.
        """
        if base_url is not None:
            raise ConfigError(
                f"base_url={base_url!r}; ServiceClient() trains and samples in this process. For a service elsewhere: "
                "turnwise.client.remote.RemoteServiceClient(base_url)"
            )
        self._config = engine or EngineConfig()
        self._cluster = cluster or ClusterConfig()
        self._aliases = dict(aliases or {})
        self._user_metadata = dict(user_metadata or {})
        root = Path(data_dir).expanduser().absolute() if data_dir is not None else model_store.home()
        self._store = CheckpointStore(root)
        self._store.remove_expired()
        self._pool = engines.POOL
        self._lock = threading.Lock()
        self._workers: dict[Path, EngineWorker] = {}
        self._is_closed = False

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """List the models that are stored here; a model directory or a hub name works as `base_model` too."""
        ready = {row.name: row.context_length for row in model_store.list_models() if row.is_ready}
        aliases = {**model_store.aliases_from_environment(), **self._aliases}
        lengths = {**ready, **{name: ready.get(target) for name, target in aliases.items()}}
        return GetServerCapabilitiesResponse(
            supported_models=[SupportedModel(model_name=name, max_context_length=n) for name, n in lengths.items()]
        )

    get_server_capabilities_async = in_thread(get_server_capabilities)

    # Tinker's signatures, spelled out here and in the other service client for editors and type checkers.
    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Mapping[str, str] | None = None,
        *,
        train_router: bool = False,
        expert_rank: int = 0,
    ) -> LocalTrainingClient:
        """Create a client that trains a new adapter on `base_model`.

        `train_router` and `expert_rank` are for a mixture of experts (docs/experts.md).
        """
        lora = LoraConfig(
            rank=rank,
            seed=seed,
            train_mlp=train_mlp,
            train_attn=train_attn,
            train_unembed=train_unembed,
            train_router=train_router,
            expert_rank=expert_rank,
        )
        return self._create(base_model, lambda engine: engine.create_adapter(lora), user_metadata)

    create_lora_training_client_async = in_thread(create_lora_training_client)

    def create_full_training_client(
        self, base_model: str, user_metadata: Mapping[str, str] | None = None
    ) -> LocalTrainingClient:
        """Create a client that trains all weights of `base_model`; the base itself stays as it is.

        On a GPU the engine has to leave memory for it: `ServiceClient(engine=EngineConfig(full_weights=True))`.
        """
        return self._create(base_model, lambda engine: engine.create_full(), user_metadata)

    create_full_training_client_async = in_thread(create_full_training_client)

    def create_critic_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        user_metadata: Mapping[str, str] | None = None,
    ) -> LocalTrainingClient:
        """Create a client that trains a new critic on `base_model`: its own adapter with a value head.

        Its one loss is `value`: `forward(datums, "value")` answers with the value of each position whose `mask` is 1,
        and `forward_backward(datums, "value", {"value_clip": 0.2})` learns `returns`.
        """
        lora = LoraConfig(rank=rank, seed=seed, train_mlp=train_mlp, train_attn=train_attn, train_unembed=False)
        return self._create(base_model, lambda engine: engine.create_critic(lora), user_metadata)

    create_critic_training_client_async = in_thread(create_critic_training_client)

    def create_training_client_from_state(
        self, path: str, user_metadata: Mapping[str, str] | None = None, *, base_model: str | None = None
    ) -> LocalTrainingClient:
        """Create a client that starts from a checkpoint's weights (a policy's or a critic's) with a fresh optimizer.

        Args:
            base_model: For adapters that do not say which base model they were made for.
        """
        return self._from_state(path, user_metadata, base_model, with_optimizer=False)

    create_training_client_from_state_async = in_thread(create_training_client_from_state)

    def create_training_client_from_state_with_optimizer(
        self, path: str, user_metadata: Mapping[str, str] | None = None, *, base_model: str | None = None
    ) -> LocalTrainingClient:
        """Create a client that goes on where `save_state` left off."""
        return self._from_state(path, user_metadata, base_model, with_optimizer=True)

    create_training_client_from_state_with_optimizer_async = in_thread(create_training_client_from_state_with_optimizer)

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: object = None,  # noqa: ARG002 - nothing is lost on the way in process
    ) -> LocalSamplingClient:
        """Create a client that samples from saved weights, or from a base model as it is."""
        if model_path is not None:
            checkpoint = self._store.find(model_path)
            model = self._base_of(checkpoint, base_model)
            check_loadable(checkpoint, model, with_optimizer=False)
            directory = checkpoint.directory
            policy = model.worker.run(new_model_id(), lambda engine: engine.load_policy(directory)).result()
            return LocalSamplingClient(model, policy)
        if base_model is not None:
            model = self._resolve(base_model)
            return LocalSamplingClient(model, model.worker.engine.base_policy)
        raise ConfigError("create_sampling_client needs model_path (saved weights) or base_model")

    create_sampling_client_async = in_thread(create_sampling_client)

    def keeping_checkpoints_in(self, data_dir: str | Path) -> ServiceClient:
        """Return the same service, with the same loaded models, that saves and finds checkpoints in another directory.

        Closing either of the two leaves the engines of both.
        """
        other = copy.copy(self)
        other._store = CheckpointStore(Path(data_dir).expanduser().absolute())
        return other

    def delete_checkpoint(self, path: str) -> None:
        """Delete a `tinker://` checkpoint; do nothing if it does not exist."""
        self._store.delete(path)

    def close(self) -> None:
        """Release the engines. An engine that no other service uses is closed, and its waiting requests fail."""
        with self._lock:
            self._is_closed = True
            workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            self._pool.release(worker)

    def _resolve(self, base_model: str) -> LoadedModel:
        self._check_open()
        found = model_store.resolve_model(base_model, self._aliases)
        return self._load(base_model, found.aliased_to or base_model, found.directory)

    def _load(self, name: str, stored_model: str, directory: Path) -> LoadedModel:
        with self._lock:
            self._check_open()
            worker = self._workers.get(directory)
            if worker is None or worker.is_stopped:
                worker = self._workers[directory] = self._pool.acquire(
                    directory, self._config, stored_model, self._cluster
                )
        return LoadedModel(name, stored_model, directory, worker)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineStoppedError("this ServiceClient is closed; create another one")

    def _base_of(self, checkpoint: Checkpoint, base_model: str | None) -> LoadedModel:
        """The base model that a checkpoint names; if it names none, the one that the caller gives."""
        if base_model is not None:
            return self._resolve(base_model)
        info = checkpoint.info
        if info is None:
            return self._resolve(_peft_base_model(checkpoint))
        directory = Path(info.model_directory)
        if directory.is_dir():
            return self._load(info.base_model, info.stored_model, directory)
        return self._resolve(info.stored_model)

    def _from_state(
        self, path: str, user_metadata: Mapping[str, str] | None, base_model: str | None, *, with_optimizer: bool
    ) -> LocalTrainingClient:
        checkpoint = self._store.find(path)
        model, model_id = self._base_of(checkpoint, base_model), new_model_id()
        check_loadable(checkpoint, model, with_optimizer=with_optimizer)

        def create(engine: Engine) -> Trainable:
            adapter = engine.create_saved(checkpoint.directory, _lora_of(checkpoint))
            try:
                engine.load_adapter(adapter, checkpoint.directory, with_optimizer=with_optimizer)
            except BaseException:
                engine.drop_adapter(adapter)
                raise
            return adapter

        adapter = model.worker.run(model_id, create).result()
        return self._training_client(model, adapter, model_id, user_metadata)

    def _create(
        self, base_model: str, make: Callable[[Engine], Trainable], user_metadata: Mapping[str, str] | None
    ) -> LocalTrainingClient:
        model, model_id = self._resolve(base_model), new_model_id()
        adapter = model.worker.run(model_id, make).result()
        return self._training_client(model, adapter, model_id, user_metadata)

    def _training_client(
        self, model: LoadedModel, adapter: Trainable, model_id: str, user_metadata: Mapping[str, str] | None
    ) -> LocalTrainingClient:
        metadata = {**self._user_metadata, **(user_metadata or {})}
        return LocalTrainingClient(model, adapter, self._store, model_id=model_id, user_metadata=metadata)


def _lora_of(checkpoint: Checkpoint) -> LoraConfig | None:
    if checkpoint.info is not None:
        return checkpoint.info.lora
    from turnwise.engine.training.adapter_files import read_lora_config  # torch

    return read_lora_config(checkpoint.directory)


def _peft_base_model(checkpoint: Checkpoint) -> str:
    config = json.loads((checkpoint.directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    name = config.get("base_model_name_or_path")
    if not name:
        raise CheckpointError(f"{checkpoint.path} does not say which base model it is for; pass base_model=...")
    return str(name)
