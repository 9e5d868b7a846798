"""A world in which 20 % of steps hang, 10 % crash and 5 % return garbage, and whose rewards know nothing of that."""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.envs.base import EnvStep, Split, Task, user
from turnwise.trajectory import Message

HANG, CRASH, GARBAGE = 0.20, 0.10, 0.05
PLAIN_HANG_S = 3.0
"""A plain step that hangs comes back after this; a coroutine never does."""
REWARDS = (1.0, 2.0)
"""Equally likely."""
MARK = "31557600.25"
"""Seconds that an env's own process would sleep: nobody else's does."""
NUM_TURNS = 2


@dataclass(frozen=True, slots=True)
class ChaosWorld:
    """Two replies, then a reward of 1 or 2. Half of the envs have plain methods, half coroutines."""

    name: str = "chaos"
    max_turns: int = NUM_TURNS
    max_tokens: int = 3

    def tasks(self, split: Split, count: int, seed: int) -> Sequence[Task]:  # noqa: ARG002
        return [Task(id=f"{split}-{index}") for index in range(count)]

    def make_env(self, task: Task, seed: int) -> Any:  # noqa: ARG002
        return PlainEnv(seed) if seed % 2 else AsyncEnv(seed)

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:  # noqa: ARG002
        return []


class _Attempt:
    """What both kinds of env share: a process of their own, and two streams of random numbers."""

    def __init__(self, seed: int) -> None:
        self.reward = random.Random(f"reward {seed}").choice(REWARDS)
        self.chaos = random.Random(f"chaos {seed}")
        self.num_steps = 0
        self.process: subprocess.Popen[bytes] | None = None

    def open(self) -> Sequence[Message]:
        self.process = subprocess.Popen(["sleep", MARK])
        return [user("go")]

    def fate(self) -> str:
        drawn = self.chaos.random()
        bounds = {"hang": HANG, "crash": HANG + CRASH, "garbage": HANG + CRASH + GARBAGE}
        return next((fate for fate, bound in bounds.items() if drawn < bound), "answer")

    def answer(self, fate: str) -> Any:
        if fate == "crash":
            raise OSError("the sandbox died")
        if fate == "garbage":
            return self.chaos.choice([None, {"reward": "much"}, (1.0, None, True)])
        self.num_steps += 1
        if self.num_steps < NUM_TURNS:
            return EnvStep(messages=[user("go on")])
        return EnvStep(reward=self.reward, terminated=True, is_success=self.reward == max(REWARDS))

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class PlainEnv(_Attempt):
    def start(self) -> Sequence[Message]:
        return self.open()

    def step(self, reply: Message) -> Any:  # noqa: ARG002
        fate = self.fate()
        if fate == "hang":
            time.sleep(PLAIN_HANG_S)
        return self.answer(fate)

    def close(self) -> None:
        self.end()


class AsyncEnv(_Attempt):
    async def start(self) -> Sequence[Message]:
        return self.open()

    async def step(self, reply: Message) -> Any:  # noqa: ARG002
        fate = self.fate()
        if fate == "hang":
            await asyncio.Event().wait()
        return self.answer(fate)

    async def close(self) -> None:
        self.end()
