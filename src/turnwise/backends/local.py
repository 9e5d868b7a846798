"""The trainer's own service samples: the engine in this process, or the one at `model.base_url`."""

from __future__ import annotations

from turnwise.client.base import SamplingClient, TrainingClient
from turnwise.client.publish import Publisher


class LocalPublisher(Publisher):
    """Publishes a copy of the weights inside the engine that trains them; no files, nothing to start or stop."""

    takes_full_weights = True

    async def deliver(self, trainer: TrainingClient, version: int) -> SamplingClient:  # noqa: ARG002
        return await trainer.save_weights_and_get_sampling_client_async()
