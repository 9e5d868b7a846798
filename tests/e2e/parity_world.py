"""A world for tests of the flywheel: an untrained model succeeds about half of the time, and no task is hard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from turnwise.envs.base import EnvStep, Split, Task, user
from turnwise.trajectory import Message


@dataclass(frozen=True, kw_only=True)
class ParityWorld:
    """Say a text whose letters sum up to an even number; `size` is the dial."""

    name: ClassVar[str] = "parity"
    max_turns: ClassVar[int] = 2
    max_tokens: ClassVar[int] = 3
    difficulties: ClassVar[tuple[dict[str, Any], ...]] = ({"size": 10}, {"size": 20})
    size: int = 10

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        first = 2 * (seed % 50) + (split == "test")
        return [
            Task(id=f"{self.size}-{n}", data={"n": n, "size": self.size}) for n in range(first, first + 2 * count, 2)
        ]

    def make_env(self, task: Task, seed: int) -> ParityEnv:  # noqa: ARG002
        return ParityEnv(task.data["n"])

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:  # noqa: ARG002
        return []


class ParityEnv:
    def __init__(self, number: int) -> None:
        self._number = number
        self._turn = 0

    async def start(self) -> list[Message]:
        return [user(f"Task {self._number}.")]

    async def step(self, reply: Message) -> EnvStep:
        self._turn += 1
        if self._turn == 1:
            return EnvStep(messages=[user("Once more.")])
        is_even = sum(map(ord, reply.content)) % 2 == 0
        return EnvStep(reward=float(is_even), terminated=True, is_success=is_even)

    async def close(self) -> None:
        pass
