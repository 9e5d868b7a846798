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


def submit(
    engine: Engine, request: SampleRequest, policy: Policy, replies: dict[int, SampleResponse], index: int
) -> None:
    """Begin a request; the sampler's steps put its reply into `replies[index]`, or raise its error."""

    def keep(reply: SampleResponse | BaseException) -> None:
        if isinstance(reply, BaseException):
            raise reply
        replies[index] = reply

    engine.sampler.submit(request, policy, on_done=keep)


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
    replies: dict[int, SampleResponse] = {}
    params = SamplingParams(max_tokens=new_tokens, stop=[])
    for index, (prompt, policy) in enumerate(zip(prompts, policies, strict=True)):
        submit(engine, SampleRequest(prompt, params, num_samples), policy, replies, index)
    while engine.sampler.has_work:
        engine.sampler.step()
    return list(itertools.chain.from_iterable(replies[index].sequences for index in range(len(prompts))))
