"""Runs against a service elsewhere (`model.base_url`): its client, and what a run must know about it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from turnwise.client.local import ServiceClient
from turnwise.client.remote import RemoteServiceClient
from turnwise.config.config import Config
from turnwise.errors import ServiceError
from turnwise.training.critic_config import CRITIC_METHODS

AnyService = ServiceClient | RemoteServiceClient


def connect(config: Config, model_dir: Path) -> RemoteServiceClient:
    """The service that the config names; tokenizers are read from `model_dir`."""
    return RemoteServiceClient(
        config.model.base_url,
        tokenizer=model_dir,
        user_metadata={"run": config.run.name},
        needs_critics=config.method.name in CRITIC_METHODS,
    )


def delete_checkpoint(service: AnyService, path: str) -> None:
    """Delete a checkpoint that a service elsewhere keeps; one that stays costs room there, not the run."""
    if isinstance(service, RemoteServiceClient):
        with contextlib.suppress(ServiceError):
            service.delete_checkpoint(path)
