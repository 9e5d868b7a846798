"""The trainer's own service samples: the engine in this process, or the one at `model.base_url`."""

from __future__ import annotations

from pathlib import Path

from turnwise.backends import Publisher
from turnwise.client.base import SamplingClient, TrainingClient
from turnwise.errors import ConfigError


class LocalPublisher(Publisher):
    """Publishes a copy of the weights inside the engine that trains them; no files, nothing to start or stop."""

    takes_full_weights = True

    async def deliver(self, trainer: TrainingClient, version: int) -> SamplingClient:  # noqa: ARG002
        return await trainer.save_weights_and_get_sampling_client_async()

    async def deliver_files(self, adapter: Path | None, version: int) -> SamplingClient:  # noqa: ARG002
        setup = self.setup
        if setup is None or setup.service is None:
            raise ConfigError("the local backend serves files through a service; expected BackendSetup(service=...)")
        if adapter is None:
            return await setup.service.create_sampling_client_async(base_model=str(setup.model_directory))
        return await setup.service.create_sampling_client_async(model_path=str(adapter))
