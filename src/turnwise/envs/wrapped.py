"""Base classes for a world that changes one thing about another world, such as its reward.

@dataclass(frozen=True, slots=True)
class MyWorld(WorldWrapper):
    inner: World
    def make_env(self, task, seed): return MyEnv(as_env(self.inner.make_env(task, seed)))

class MyEnv(EnvWrapper):
    async def step(self, reply): ...            # calls self._play(reply), then changes the answer
    def _wrap_fork(self, inner): ...            # the same wrapper around a fork of the env inside
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from turnwise.envs.base import Env, EnvStep, Split, Task, World
from turnwise.envs.sync import as_env
from turnwise.trajectory import Message


class WorldWrapper:
    """Everything of the world inside, except `make_env`, which a subclass writes."""

    __slots__ = ()
    inner: World

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

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        return self.inner.demonstrations(count, seed)


class EnvWrapper(ABC):
    """One attempt. It has optional methods such as `state_key` and `fork` exactly when the env inside has them."""

    def __init__(self, inner: Env) -> None:
        self._inner = inner
        self._dialogue: list[Message] = []

    async def start(self) -> Sequence[Message]:
        messages = await self._inner.start()
        self._dialogue = list(messages)
        return messages

    async def close(self) -> None:
        await self._inner.close()

    async def _play(self, reply: Message) -> EnvStep:
        """Pass a reply to the env inside, and record both sides of the dialogue."""
        step = await self._inner.step(reply)
        self._dialogue += [reply, *step.messages]
        return step

    @abstractmethod
    def _wrap_fork(self, inner: Env) -> EnvWrapper:
        """Return a wrapper of the same kind and state around a fork of the env inside."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle ask for private names before `_inner` is set; do not recurse
            raise AttributeError(name)
        value = getattr(self._inner, name)
        return (lambda: self._wrap_fork(as_env(value()))) if name == "fork" else value
