"""Runs against a service elsewhere (`model.base_url`): its client, and what a run must know about it."""

from __future__ import annotations

from pathlib import Path

from turnwise.client.local import ServiceClient
from turnwise.client.remote import RemoteServiceClient
from turnwise.config.config import Config
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
