"""Drives an engine directly, without a worker or clients."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from typing import TypeVar

from turnwise.engine.engine import Engine
from turnwise.engine.model.lora import Policy
from turnwise.types import SampledSequence, SampleRequest, SampleResponse, SamplingParams

T = TypeVar("T")


def finish(work: Generator[None, None, T]) -> T:
    """Run a generator of the engine to its end, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value


def sample_sequences(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    policies: Sequence[Policy],
    *,
    num_samples: int = 1,
) -> list[SampledSequence]:
    """Sample `num_samples` continuations of every prompt, each prompt with its own policy. Return them in order.

    They run together, and none stops early.
    """
    replies: dict[int, Sequence[SampledSequence]] = {}
    params = SamplingParams(max_tokens=new_tokens, stop=[])
    for index, (prompt, policy) in enumerate(zip(prompts, policies, strict=True)):

        def keep(reply: SampleResponse | BaseException, index: int = index) -> None:
            if isinstance(reply, BaseException):
                raise reply
            replies[index] = reply.sequences

        engine.sampler.submit(SampleRequest(prompt, params, num_samples), policy, on_done=keep)
    while engine.sampler.has_work:
        engine.sampler.step()
    return list(itertools.chain.from_iterable(replies[index] for index in range(len(prompts))))
