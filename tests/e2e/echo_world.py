"""A world for runs of a few steps: any reply is worth something, so that every group has something to teach."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.envs.base import EnvStep, Split, Task, assistant, user
from turnwise.trajectory import Message

NUM_TURNS = 3


@dataclass(frozen=True, slots=True)
class EchoWorld:
    """Three replies, each worth what its letters add up to."""

    name: str = "echo"
    max_turns: int = NUM_TURNS
    max_tokens: int = 4

    def tasks(self, split: Split, count: int, seed: int) -> Sequence[Task]:  # noqa: ARG002
        return [Task(id=f"{split}-{index}", data={"index": index}) for index in range(count)]

    def make_env(self, task: Task, seed: int) -> EchoEnv:  # noqa: ARG002
        return EchoEnv()

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:  # noqa: ARG002
        return [[user("go"), assistant(f"reply {index}"), user("go on"), assistant("done")] for index in range(count)]


class EchoEnv:
    def __init__(self) -> None:
        self._worth: list[float] = []

    async def start(self) -> Sequence[Message]:
        return [user("go")]

    async def step(self, reply: Message) -> EnvStep:
        self._worth.append(sum(map(ord, reply.content)) % 7 / 7)
        is_over = len(self._worth) == NUM_TURNS
        return EnvStep(
            messages=() if is_over else [user("go on")],
            reward=self._worth[-1],
            terminated=is_over,
            is_success=sum(self._worth) > 1.5 if is_over else None,
        )

    async def close(self) -> None:
        pass

    def state_key(self) -> str:
        return f"turn {len(self._worth)}"

    def potential(self) -> float:
        return 0.1 * len(self._worth)

    def fork(self) -> EchoEnv:
        return copy.deepcopy(self)
