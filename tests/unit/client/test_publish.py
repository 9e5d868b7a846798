"""Publishing: versions are stamped on what is sampled, whichever client samples."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest

from turnwise.backends import Publisher
from turnwise.client.base import SamplingClient, TrainingClient
from turnwise.client.fake import RecordingTrainer, ScriptedSampler
from turnwise.client.futures import ApiFuture
from turnwise.client.publish import NewestSampler
from turnwise.errors import ServiceError
from turnwise.types import ModelInput, SampleRequest, SampleResponse

PROMPT = ModelInput.from_ints([1, 2])


class SamplersInTurn(Publisher):
    def __init__(self, *samplers: SamplingClient) -> None:
        self._samplers = list(samplers)
        self.is_closed = False

    async def deliver(self, trainer: TrainingClient, version: int) -> SamplingClient:  # noqa: ARG002
        return self._samplers.pop(0)

    async def close(self) -> None:
        self.is_closed = True


class PendingSampler(ScriptedSampler):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__([])
        self.asked: list[Future[SampleResponse]] = []

    def submit(self, request: SampleRequest) -> ApiFuture[SampleResponse]:  # noqa: ARG002
        self.asked.append(Future())
        return ApiFuture(self.asked[-1], "a sample", on_abandoned=self.asked[-1].cancel, deadline_s=0.05)


async def test_what_is_sampled_carries_the_version_of_its_publication_and_not_the_clients_own() -> None:
    trainer = RecordingTrainer()
    async with SamplersInTurn(*(ScriptedSampler(lambda _: [7], policy_version=40) for _ in range(2))) as publisher:
        first, second = await publisher.publish(trainer, 3), await publisher.publish(trainer, 4)
        newest = NewestSampler(first.client, first.version)
        kept = newest.pinned()
        newest.follow(second)
        for sampler, version in ((first, 3), (second, 4), (newest, 4), (kept, 3)):
            assert sampler.sample(PROMPT).result().policy_version == version
            assert (await sampler.sample_async(PROMPT)).policy_version == version
    assert publisher.is_closed


async def test_a_request_under_way_keeps_the_version_that_it_was_asked_of() -> None:
    old = PendingSampler()
    async with SamplersInTurn(old, ScriptedSampler(lambda _: [7])) as publisher:
        first, second = [await publisher.publish(RecordingTrainer(), version) for version in (0, 1)]
    newest = NewestSampler(first.client, first.version)
    asked = newest.sample(PROMPT)
    newest.follow(second)
    old.asked[0].set_result(SampleResponse([]))
    assert asked.result().policy_version == 0


async def test_a_stamped_request_has_the_deadline_and_the_end_of_the_one_it_wraps() -> None:
    pending = PendingSampler()
    sampler = await SamplersInTurn(pending).publish(RecordingTrainer(), 0)
    with pytest.raises(ServiceError, match="no answer within"):
        await sampler.sample_async(PROMPT)
    task = asyncio.create_task(sampler.sample_async(PROMPT))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    asked = sampler.sample(PROMPT)
    asked.cancel()
    assert [one.cancelled() for one in pending.asked] == [False, True, True]
