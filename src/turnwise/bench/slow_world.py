"""A world whose env answers late, with the long tail of delays that browsers, sandboxes and people have."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.envs.base import EnvStep, Split, Task, user
from turnwise.trajectory import Message

P99_SIGMAS = 2.3263
"""Standard deviations from the median of a normal distribution to its 99th percentile."""
WANTED = "a"


@dataclass(frozen=True, slots=True)
class SlowWorld:
    """A reply should hold a given letter. Each answer takes a log-normal time, drawn from the attempt's seed."""

    name: str = "slow"
    max_turns: int = 3
    max_tokens: int = 4
    median_s: float = 0.1
    p99_s: float = 5.0

    def tasks(self, split: Split, count: int, seed: int) -> Sequence[Task]:  # noqa: ARG002
        return [Task(id=f"{split}-{index}", data={"index": index}) for index in range(count)]

    def make_env(self, task: Task, seed: int) -> SlowEnv:  # noqa: ARG002
        return SlowEnv(self, seed)

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:  # noqa: ARG002
        return []


class SlowEnv:
    def __init__(self, world: SlowWorld, seed: int) -> None:
        sigma = math.log(world.p99_s / world.median_s) / P99_SIGMAS
        rng = np.random.default_rng(seed)
        self._delays_s = iter(rng.lognormal(math.log(world.median_s), sigma, world.max_turns).tolist())
        self._num_left = world.max_turns
        self._num_right = 0
        self._num_turns = world.max_turns

    async def start(self) -> Sequence[Message]:
        return [user("say something")]

    async def step(self, reply: Message) -> EnvStep:
        await asyncio.sleep(next(self._delays_s))
        self._num_left -= 1
        is_right = WANTED in reply.content
        self._num_right += is_right
        is_over = self._num_left == 0
        return EnvStep(
            messages=() if is_over else [user("and more")],
            reward=is_right / self._num_turns,
            terminated=is_over,
            is_success=self._num_right == self._num_turns if is_over else None,
        )

    async def close(self) -> None:
        pass
