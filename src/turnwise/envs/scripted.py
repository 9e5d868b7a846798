"""Dialogues played by a script. They are played in the env itself, so they always match what the env says today."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from turnwise.envs.base import Env, Split, Task, assistant
from turnwise.envs.sync import as_env
from turnwise.trajectory import Message

T = TypeVar("T")

ScriptedPlayer = Callable[[Sequence[Message]], str]
"""Takes the conversation so far and returns the next reply."""


class TaskSource(Protocol):
    """The part of a `World` that a script needs."""

    @property
    def max_turns(self) -> int: ...

    def tasks(self, split: Split, count: int, seed: int) -> Sequence[Task]: ...

    def make_env(self, task: Task, seed: int) -> Env: ...


async def play_script(env: Env, player: ScriptedPlayer, max_turns: int) -> list[Message]:
    """Play one attempt and return the dialogue: the first messages, then replies and answers, up to the last reply."""
    env = as_env(env)
    try:
        dialogue = list(await env.start())
        for _ in range(max_turns):
            dialogue.append(assistant(player(tuple(dialogue))))
            step = await env.step(dialogue[-1])
            if step.is_over:
                break
            dialogue.extend(step.messages)
        while dialogue[-1].role != "assistant":  # max_turns cut it; drop what followed the last reply
            dialogue.pop()
        return dialogue
    finally:
        await env.close()


def play_demonstrations(
    world: TaskSource, player_of: Callable[[Task], ScriptedPlayer], count: int, seed: int, *, concurrency: int = 1
) -> list[list[Message]]:
    """Play every task of `world.tasks("train", count, seed)` with `player_of(task)`, and return the dialogues.

    Args:
        concurrency: Number of dialogues at the same time. More than one helps if the env waits for other services.
    """

    async def play_all() -> list[list[Message]]:
        free = asyncio.Semaphore(concurrency)

        async def play_one(task: Task) -> list[Message]:
            async with free:
                return await play_script(world.make_env(task, seed), player_of(task), world.max_turns)

        return await asyncio.gather(*(play_one(task) for task in world.tasks("train", count, seed)))

    return run_coroutine(play_all())


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from plain code. If an event loop is running in this thread, it is blocked meanwhile."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001 - `outcome.result()` raises it again
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="turnwise-script", daemon=True)
    thread.start()
    return outcome.result()
