"""Any world with another reward: a function of the task and the whole conversation.

    def short(task, messages):
        return 1.0 if len(messages[-1].content) < 80 else 0.0

    turnwise.train("twenty_questions", reward=short)

The function is called once, when the env ends an attempt, and takes the place of every reward that the env gave. An
attempt that a limit of the rollout cuts short never reaches it, and has no reward. What the env calls a success stays.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from turnwise.envs.base import Env, EnvStep, Split, Task, World
from turnwise.envs.sync import as_env
from turnwise.errors import ConfigError
from turnwise.trajectory import Message

Reward = float | Mapping[str, float]
RewardFunction = Callable[[Task, Sequence[Message]], Reward | Awaitable[Reward]]
"""Takes the task and the conversation; gives a number, or named parts as `EnvStep.reward` does. May be a coroutine."""


@dataclasses.dataclass(frozen=True, slots=True)
class RewardedWorld:
    """A world whose attempts are scored by a function."""

    inner: World
    reward: RewardFunction

    def __post_init__(self) -> None:
        if not callable(self.reward):
            raise ConfigError(f"reward={self.reward!r}; expected a function of (task, messages) that returns a number")

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def max_turns(self) -> int:
        return self.inner.max_turns

    @property
    def max_tokens(self) -> int:
        return self.inner.max_tokens

    def tasks(self, split: Split, count: int, seed: int) -> Sequence[Task]:
        return self.inner.tasks(split, count, seed)

    def make_env(self, task: Task, seed: int) -> Env:
        return cast(Env, RewardedEnv(as_env(self.inner.make_env(task, seed)), task, self.reward))

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        return self.inner.demonstrations(count, seed)


class RewardedEnv:
    """One attempt; `state_key`, `fork` and the like are there exactly when the env inside has them."""

    def __init__(self, inner: Env, task: Task, reward: RewardFunction, dialogue: Sequence[Message] = ()) -> None:
        self._inner = inner
        self._task = task
        self._reward = reward
        self._dialogue = list(dialogue)

    async def start(self) -> Sequence[Message]:
        messages = await self._inner.start()
        self._dialogue = list(messages)
        return messages

    async def step(self, reply: Message) -> EnvStep:
        step = await self._inner.step(reply)
        self._dialogue += [reply, *step.messages]
        if not step.is_over:
            return dataclasses.replace(step, reward=0.0)
        reward = self._reward(self._task, tuple(self._dialogue))
        return dataclasses.replace(step, reward=await reward if inspect.isawaitable(reward) else reward)

    async def close(self) -> None:
        await self._inner.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also keeps copy and pickle from looking for `_inner` in itself
            raise AttributeError(name)
        value = getattr(self._inner, name)
        if name != "fork":
            return value
        return lambda: RewardedEnv(as_env(value()), self._task, self._reward, self._dialogue)
