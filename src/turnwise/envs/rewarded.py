"""Any world with another reward: a function that reads the task and the whole conversation.

    def short(task, messages):
        return 1.0 if len(messages[-1].content) < 80 else 0.0

    turnwise.train("twenty_questions", reward=short)

The function is called once, when the env ends an attempt. Its result replaces every reward that the env gave. If a
limit of the rollout cuts an attempt short, the function is not called and the attempt has no reward. The env still
decides what counts as a success.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence

from turnwise.envs.base import Env, EnvStep, Task, World
from turnwise.envs.sync import as_env
from turnwise.envs.wrapped import EnvWrapper, WorldWrapper
from turnwise.errors import AttemptFailed, ConfigError, DataError, Party
from turnwise.runtime.raised_at import describe_error
from turnwise.trajectory import Message

Reward = float | Mapping[str, float]
RewardFunction = Callable[[Task, Sequence[Message]], Reward | Awaitable[Reward]]
"""Takes the task and the conversation. Returns a number, or named parts like `EnvStep.reward`. May be async."""


@dataclasses.dataclass(frozen=True, slots=True)
class RewardedWorld(WorldWrapper):
    """A world whose attempts are scored by a function."""

    inner: World
    reward: RewardFunction

    def __post_init__(self) -> None:
        if not callable(self.reward):
            raise ConfigError(f"reward={self.reward!r}; expected a function of (task, messages) that returns a number")
        try:
            signature = inspect.signature(self.reward)
        except (TypeError, ValueError):  # a function written in C may have no signature that Python can read
            return
        try:
            signature.bind("task", "messages")
        except TypeError as cause:
            name = getattr(self.reward, "__name__", type(self.reward).__name__)
            raise ConfigError(
                f"reward {name}{signature} cannot be called with (task, messages): {cause}; expected a function of "
                "(task, messages) that returns a number"
            ) from None

    def make_env(self, task: Task, seed: int) -> Env:
        return RewardedEnv(as_env(self.inner.make_env(task, seed)), task, self.reward)


class RewardedEnv(EnvWrapper):
    """One attempt, scored by the function when the env ends it."""

    def __init__(self, inner: Env, task: Task, reward: RewardFunction) -> None:
        super().__init__(inner)
        self._task = task
        self._reward = reward

    async def step(self, reply: Message) -> EnvStep:
        step = await self._play(reply)
        if not step.is_over:
            return dataclasses.replace(step, reward=0.0)
        name = getattr(self._reward, "__name__", type(self._reward).__name__)
        try:
            reward = self._reward(self._task, tuple(self._dialogue))
            reward = await reward if inspect.isawaitable(reward) else reward
        except AttemptFailed:
            raise
        except (Exception, SystemExit) as cause:
            raise AttemptFailed(Party.REWARD, f"{name}: {describe_error(cause)}") from cause
        try:
            return dataclasses.replace(step, reward=reward)
        except DataError as cause:
            raise AttemptFailed(
                Party.REWARD, f"{name} returned {reward!r:.60}; expected a finite number, or named parts of them"
            ) from cause

    def _wrap_fork(self, inner: Env) -> RewardedEnv:
        fork = RewardedEnv(inner, self._task, self._reward)
        fork._dialogue = list(self._dialogue)
        return fork
