"""One attempt at a world's task, played with given replies."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.envs.base import EnvStep, Task, World, assistant
from turnwise.trajectory import Message


async def play(world: World, replies: Sequence[str], task: Task | None = None) -> tuple[list[Message], list[EnvStep]]:
    """The first messages, and a step for each reply until it is over."""
    env = world.make_env(task or world.tasks("train", 1, 0)[0], 0)
    steps: list[EnvStep] = []
    try:
        start = list(await env.start())
        for reply in replies:
            steps.append(await env.step(assistant(reply)))
            if steps[-1].is_over:
                break
        return start, steps
    finally:
        await env.close()
