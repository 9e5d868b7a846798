"""Attempts for tests: played with given replies, or made up with given rewards."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.envs.base import Env, EnvStep, Task, World, assistant
from turnwise.trajectory import EndReason, Message, Trajectory, Turn


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


async def play_replies(env: Env, *replies: str) -> list[EnvStep]:
    """A step for each reply, in an env that has been started."""
    return [await env.step(assistant(reply)) for reply in replies]


def said(steps: Sequence[EnvStep]) -> list[str]:
    """The texts of all that an env answered."""
    return [message.content for step in steps for message in step.messages]


def rewarded(rewards: Sequence[float], *, is_trained: bool = True, attempt: int = 0) -> Trajectory:
    """An attempt with a turn of two tokens for each reward; every prompt goes on where the last reply ended."""
    turns: list[Turn] = []
    ids = (1, 2)
    for index, reward in enumerate(rewards):
        turn = Turn(
            prompt_ids=ids,
            sampled_ids=(10 + index, 11 + index),
            sampler_logprobs=(-1.0, -1.0),
            policy_version=0,
            reply=Message(role="assistant", content="x"),
            reward_parts={"outcome": reward},
            is_trained=is_trained,
        )
        turns.append(turn)
        ids = (*ids, *turn.sampled_ids, 3)
    return Trajectory(task_id="t", attempt=attempt, seed=0, turns=tuple(turns), end_reason=EndReason.TERMINATED)
