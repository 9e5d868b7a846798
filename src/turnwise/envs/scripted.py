"""Dialogues played by a script: demonstrations come out of the env itself, so they cannot drift away from it."""

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
"""The conversation so far to the next reply."""


class TaskSource(Protocol):
    """The part of a `World` that a script needs."""

    @property
    def max_turns(self) -> int: ...

    def tasks(self, split: Split, count: int, seed: int) -> Sequence[Task]: ...

    def make_env(self, task: Task, seed: int) -> Env: ...


async def play_script(env: Env, player: ScriptedPlayer, max_turns: int) -> list[Message]:
    """Play one attempt to its end: the first messages, then replies and answers, up to the last reply."""
    env = as_env(env)
    try:
        dialogue = list(await env.start())
        for _ in range(max_turns):
            dialogue.append(assistant(player(tuple(dialogue))))
            step = await env.step(dialogue[-1])
            if step.is_over:
                break
            dialogue.extend(step.messages)
        while dialogue[-1].role != "assistant":  # cut by max_turns: what was said after the last reply teaches nothing
            dialogue.pop()
        return dialogue
    finally:
        await env.close()


def play_demonstrations(
    world: TaskSource, player_of: Callable[[Task], ScriptedPlayer], count: int, seed: int, *, concurrency: int = 1
) -> list[list[Message]]:
    """Dialogue i is `player_of(task)` in an env of task i of `world.tasks("train", count, seed)`.

    Args:
        concurrency: Dialogues at once; more than one pays where the env waits for something outside.
    """

    async def play_all() -> list[list[Message]]:
        free = asyncio.Semaphore(concurrency)

        async def play_one(task: Task) -> list[Message]:
            async with free:
                return await play_script(world.make_env(task, seed), player_of(task), world.max_turns)

        return await asyncio.gather(*(play_one(task) for task in world.tasks("train", count, seed)))

    return run_coroutine(play_all())


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from plain code, also where an event loop is already running (then that loop waits)."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001 - raised again where the result is wanted
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="turnwise-script", daemon=True)
    thread.start()
    return outcome.result()
