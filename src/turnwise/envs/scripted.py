"""Dialogues played by a script. They are played in the env itself, so they always match what the env says today.

A script is a function of the dialogue so far, or the env's own method `demonstrate() -> str`: the reply that an expert
would give now. The method may be async. It sees what the policy does not see, such as the hidden number.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, cast

from turnwise.envs.base import Env, Split, Task, assistant
from turnwise.envs.sync import as_env
from turnwise.errors import DataError
from turnwise.runtime.blocking import run_to_end
from turnwise.trajectory import Message

ScriptedPlayer = Callable[[Sequence[Message]], str]
"""Takes the conversation so far and returns the next reply."""
DEMONSTRATE = "demonstrate"
"""The method of an env that gives the next reply of an expert."""


class TaskSource(Protocol):
    """The part of a `World` that a script needs."""

    @property
    def max_turns(self) -> int: ...

    def tasks(self, split: Split, count: int, seed: int) -> Sequence[Task]: ...

    def make_env(self, task: Task, seed: int) -> Env: ...


def has_demonstrations(env_class: object) -> bool:
    """Whether envs of this class demonstrate."""
    return callable(getattr(env_class, DEMONSTRATE, None))


async def play_script(env: Env, player: ScriptedPlayer | None, max_turns: int) -> list[Message]:
    """Play one attempt and return the dialogue: the first messages, then replies and answers, up to the last reply.

    Args:
        player: None plays what the env demonstrates.
    """
    env = as_env(env)
    try:
        dialogue = list(await env.start())
        for _ in range(max_turns):
            said = await _demonstrated(env) if player is None else player(tuple(dialogue))
            dialogue.append(assistant(said))
            step = await env.step(dialogue[-1])
            if step.is_over:
                break
            dialogue.extend(step.messages)
        while dialogue[-1].role != "assistant":  # max_turns cut it; drop what followed the last reply
            dialogue.pop()
        return dialogue
    finally:
        await env.close()


async def _demonstrated(env: Env) -> str:
    """What an expert would say now, by the env's own method."""
    said: object = getattr(env, DEMONSTRATE)()
    if inspect.isawaitable(said):
        said = await cast(Awaitable[object], said)
    if not isinstance(said, str):
        raise DataError(f"{DEMONSTRATE}() returned {said!r:.60}; expected the text of the next reply")
    return said


def play_demonstrations(
    world: TaskSource,
    player_of: Callable[[Task], ScriptedPlayer | None],
    count: int,
    seed: int,
    *,
    concurrency: int = 1,
) -> list[list[Message]]:
    """Play every task of `world.tasks("train", count, seed)` with `player_of(task)`, and return the dialogues.

    Args:
        player_of: Gives the script of a task; None plays what the env demonstrates.
        concurrency: Number of dialogues at the same time. More than one helps if the env waits for other services.
    """

    async def play_all() -> list[list[Message]]:
        free = asyncio.Semaphore(concurrency)

        async def play_one(task: Task) -> list[Message]:
            async with free:
                return await play_script(world.make_env(task, seed), player_of(task), world.max_turns)

        return await asyncio.gather(*(play_one(task) for task in world.tasks("train", count, seed)))

    return run_to_end(play_all())
