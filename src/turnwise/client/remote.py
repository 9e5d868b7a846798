"""The client protocols for a service elsewhere (ours, hosted Tinker, or MinT), through the official SDK.

    service = RemoteServiceClient("http://127.0.0.1:8000")
    trainer = service.create_lora_training_client("Qwen/Qwen3-0.6B", rank=16)

The SDK (`pip install 'turnwise[remote]'`) makes the requests: sessions, retries, long polls. This module translates its
types, gives every wait a deadline, and names failures. What Tinker's wire cannot express is refused before it is sent
(`remote_wire.py`). A turnwise service, which identifies itself at `/healthz`, accepts everything. Tokenizers are read
from the base model's directory on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from turnwise.client.futures import in_thread
from turnwise.client.remote_clients import RemoteSamplingClient, RemoteTrainingClient
from turnwise.client.remote_connection import Connection, Sdk
from turnwise.client.remote_wire import CRITIC_METADATA, Dialect, to_seed
from turnwise.errors import ConfigError, ServiceError
from turnwise.types import GetServerCapabilitiesResponse, SupportedModel

__all__ = ["RemoteSamplingClient", "RemoteServiceClient", "RemoteTrainingClient"]

DEADLINE_S = 1800.0
CLOSE_S = 20.0


class RemoteServiceClient:
    """Creates remote clients. Use it as a context manager, like the local one."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        tokenizer: str | Path | None = None,
        dialect: Dialect | None = None,
        deadline_s: float = DEADLINE_S,
        user_metadata: Mapping[str, str] | None = None,
        needs_critics: bool = False,
    ) -> None:
        """Find out which kind of service answers at `base_url`.

        Args:
            api_key: Default: what the SDK finds (TINKER_API_KEY); none is needed for an open service on this machine.
            tokenizer: Name or directory of the model whose tokenizer is used; default: the base model's own name.
            dialect: What may be sent; default: everything to a service of ours, Tinker's columns to any other.
            deadline_s: The longest wait for one answer.
            needs_critics: Refuse a service without critics, before a session is opened.
        """
        self._connection = Connection(
            base_url, api_key=api_key, tokenizer=tokenizer, dialect=dialect, deadline_s=deadline_s
        )
        if needs_critics:
            self.check_critics()
        create = partial(
            self._connection.sdk.ServiceClient,
            user_metadata=dict(user_metadata or {}) or None,
            base_url=self._connection.base_url,
            api_key=self._connection.key,
        )
        self._sdk_client: Sdk = self._connection.call(create, "the first call").result()

    @property
    def base_url(self) -> str:
        return self._connection.base_url

    @property
    def sdk_name(self) -> str:
        """The SDK that carries the requests: tinker, or mint for a key of MinT's."""
        return self._connection.sdk.__name__

    @property
    def dialect(self) -> Dialect:
        """Which columns may be sent."""
        return self._connection.dialect

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        found = self._connection.call(self._sdk_client.get_server_capabilities, "get_server_capabilities").result()
        models = [
            SupportedModel(model_name=str(one.model_name), max_context_length=getattr(one, "max_context_length", None))
            for one in found.supported_models
        ]
        return GetServerCapabilitiesResponse(supported_models=models)

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
    ) -> RemoteTrainingClient:
        create = partial(
            self._sdk_client.create_lora_training_client,
            base_model,
            rank=rank,
            seed=to_seed(seed),
            train_mlp=train_mlp,
            train_attn=train_attn,
            train_unembed=train_unembed,
            user_metadata=dict(user_metadata or {}) or None,
        )
        created = self._connection.call(create, f"create_lora_training_client {base_model}").result()
        return RemoteTrainingClient(self._connection, created, base_model=base_model)

    create_lora_training_client_async = in_thread(create_lora_training_client)

    def create_full_training_client(
        self,
        base_model: str,
        user_metadata: Mapping[str, str] | None = None,  # noqa: ARG002
    ) -> RemoteTrainingClient:
        """Refuse: a service trains adapters, so that many users can share its base model."""
        raise ConfigError(
            f"the service at {self.base_url} trains LoRA adapters only; to train all weights of {base_model}, train in "
            "this process: turnwise.ServiceClient() without an address"
        )

    create_full_training_client_async = in_thread(create_full_training_client)

    def create_critic_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        user_metadata: Mapping[str, str] | None = None,
    ) -> RemoteTrainingClient:
        """Create a client that trains a new critic. Only a turnwise service can do this. The only loss is `value`."""
        self.check_critics()
        metadata = {**(user_metadata or {}), **CRITIC_METADATA}
        return self.create_lora_training_client(base_model, rank, seed, train_mlp, train_attn, False, metadata)

    create_critic_training_client_async = in_thread(create_critic_training_client)

    def check_critics(self) -> None:
        """Refuse a service that has no critics: Tinker's API does not know them."""
        if self.dialect != "turnwise":
            raise ConfigError(
                f"the service at {self.base_url} has no critics: they are an extension of services that `turnwise "
                "serve` runs, and this one does not say at /healthz that it is one; use a method without a critic "
                "(grpo, rloo, gigpo, ...), or train in this process"
            )

    def create_training_client_from_state(
        self, path: str, user_metadata: Mapping[str, str] | None = None, *, base_model: str | None = None
    ) -> RemoteTrainingClient:
        """Create a client that starts from a checkpoint's weights (a policy's or a critic's) with a fresh optimizer."""
        return self._from_state(self._sdk_client.create_training_client_from_state, path, user_metadata, base_model)

    create_training_client_from_state_async = in_thread(create_training_client_from_state)

    def create_training_client_from_state_with_optimizer(
        self, path: str, user_metadata: Mapping[str, str] | None = None, *, base_model: str | None = None
    ) -> RemoteTrainingClient:
        """Create a client that goes on where `save_state` left off."""
        create = self._sdk_client.create_training_client_from_state_with_optimizer
        return self._from_state(create, path, user_metadata, base_model)

    create_training_client_from_state_with_optimizer_async = in_thread(create_training_client_from_state_with_optimizer)

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: object = None,
    ) -> RemoteSamplingClient:
        """Create a client that samples from saved weights, or from a base model as it is."""
        if model_path is None and base_model is None:
            raise ConfigError("create_sampling_client needs model_path (saved weights) or base_model")
        more = {} if retry_config is None else {"retry_config": retry_config}
        what = {"base_model": base_model} if model_path is None else {"model_path": model_path}
        create = partial(self._sdk_client.create_sampling_client, **what, **more)
        created = self._connection.call(create, f"create_sampling_client {model_path or base_model}").result()
        name = base_model or str(self._connection.call(created.get_base_model, "get_base_model").result())
        return RemoteSamplingClient(self._connection, created, policy_version=0, base_model=name)

    create_sampling_client_async = in_thread(create_sampling_client)

    def delete_checkpoint(self, path: str) -> None:
        """Delete a `tinker://` checkpoint."""
        self._connection.future(
            self._rest.delete_checkpoint_from_tinker_path(path), _nothing, f"delete of {path}"
        ).result()

    @cached_property
    def _rest(self) -> Sdk:
        if hasattr(self._sdk_client, "close"):  # from SDK 0.36 on, a RestClient is created by itself
            return self._connection.sdk.RestClient(base_url=self.base_url, api_key=self._connection.key)
        return self._sdk_client.create_rest_client()

    def close(self) -> None:
        """End the session."""
        if hasattr(self._sdk_client, "close"):  # SDKs before 0.36 end the session with their process
            done = self._connection.future(self._sdk_client.close("success"), _nothing, "the end of the session")
            done.result(CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except (ServiceError, TimeoutError):
            if error is None:
                raise

    def _from_state(
        self, create: Callable[..., Any], path: str, metadata: Mapping[str, str] | None, base_model: str | None
    ) -> RemoteTrainingClient:
        sent = {**self._kind_of(path), **(metadata or {})} or None
        created = self._connection.call(partial(create, path, user_metadata=sent), f"load of {path}").result()
        name = base_model or self._connection.call(created.get_info, "get_info").result().model_data.model_name
        return RemoteTrainingClient(self._connection, created, base_model=str(name))

    def _kind_of(self, path: str) -> Mapping[str, str]:
        """Whether a checkpoint is a policy or a critic. A turnwise service knows it from the run that made it.

        You cannot ask about somebody else's run; for a critic that its owner published, say so in `user_metadata`.
        """
        if self.dialect != "turnwise":
            return {}
        run = self._rest.get_training_run_by_tinker_path(path)
        try:
            known = self._connection.future(run, _metadata_of, f"the run of {path}").result()
        except ServiceError as error:
            if getattr(error.__cause__, "status_code", None) == HTTPStatus.NOT_FOUND:
                return {}
            raise
        return CRITIC_METADATA if CRITIC_METADATA.items() <= known.items() else {}


def _metadata_of(run: Sdk) -> dict[str, str]:
    return dict(run.user_metadata or {})


def _nothing(_: object) -> None:
    return None
