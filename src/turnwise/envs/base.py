"""A world: tasks, and single-use envs that play them, in messages.

    class Echo:
        async def start(self): return [user("Say hi")]
        async def step(self, reply): return EnvStep(reward=1.0 if "hi" in reply.content else 0.0, terminated=True)
        async def close(self): ...

`terminated` means the task reached an end, good or bad. `truncated` means it was cut short: the return is unknown
from there on. A limit that belongs to the task (five guesses, then the game is lost) is the env's own and terminates;
limits on the turns, tokens and time of a run belong to the rollout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, Protocol, cast, runtime_checkable

from turnwise.errors import DataError
from turnwise.trajectory import REWARD_PARTS, Message

Split = Literal["train", "test"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem of a world; the same seed gives the same tasks.

    >>> import turnwise as tw
    >>> tw.Task(id="sum-1", data={"a": 2, "b": 3}).data["a"]
    2
    """

    id: str
    """Unique in its world; train and test ids never meet."""
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """JSON values alone, so that a task can be stored and replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStep:
    """What the world answers to one reply.

    >>> import turnwise as tw
    >>> tw.EnvStep(reward=1.0, terminated=True, is_success=True).is_over
    True
    >>> tw.EnvStep(messages=[tw.user("Guess again.")]).is_over
    False
    """

    messages: Sequence[Message] = ()
    """What the policy sees next; may be empty when the attempt is over."""
    reward: float | Mapping[str, float] = 0.0
    """A number (all of it `outcome`) or named parts: outcome, format, shaping, penalty, judge."""
    terminated: bool = False
    truncated: bool = False
    is_success: bool | None = None
    """Of the whole attempt, said with its last step."""
    is_unparsable: bool = False
    """The reply could not be read as an action; the rollout's policy decides what that costs."""
    info: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers to log."""

    def __post_init__(self) -> None:
        _check_messages(self.messages)
        _check_reward(self.reward)
        if self.terminated and self.truncated:
            raise DataError("EnvStep is both terminated and truncated; the task reached an end, or it was cut short")
        if not self.messages and not self.is_over:
            raise DataError("EnvStep.messages is empty but the attempt goes on; say something, or end it")

    @property
    def is_over(self) -> bool:
        return self.terminated or self.truncated

    @property
    def reward_parts(self) -> Mapping[str, float]:
        return self.reward if isinstance(self.reward, Mapping) else {"outcome": float(self.reward)}


def _check_messages(messages: object) -> None:
    """A bare string is a sequence too, and dicts are what other libraries use: neither gets through."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    items = cast(Sequence[object], messages if is_list else [None])
    if not all(isinstance(item, Message) for item in items):
        raise DataError(f"EnvStep.messages holds {messages!r:.60}; expected a list, such as [user('Guess again.')]")


def _check_reward(reward: object) -> None:
    parts = cast(Mapping[object, object], reward) if isinstance(reward, Mapping) else {"outcome": reward}
    for part, value in parts.items():
        if part not in REWARD_PARTS:
            raise DataError(f"EnvStep.reward has an unknown part {part!r}; expected {', '.join(REWARD_PARTS)}")
        if not isinstance(value, Real) or not math.isfinite(value):
            raise DataError(f"EnvStep.reward: {part}={value!r}; expected a finite number")


@runtime_checkable
class Env(Protocol):
    """One attempt at one task; used once. Methods may be plain functions: `turnwise.envs.sync.as_env` runs them.

    Optional: `state_key() -> str` names the state before the next reply (equal keys, same state); `fork() -> Env`
    gives an independent copy of an env in the middle of its task; `reseed(seed)` gives an env in the middle of its
    task other randomness from there on, and changes nothing else; `potential() -> float` says how good the state is,
    for shaping.

    >>> import turnwise as tw
    >>> class Polite:
    ...     def __init__(self, seed):
    ...         self.seed = seed
    ...     def start(self):
    ...         return [tw.user("Say please.")]
    ...     def step(self, reply):
    ...         return tw.EnvStep(reward=float("please" in reply.content), terminated=True)
    ...     def close(self):
    ...         pass
    >>> isinstance(Polite(seed=0), tw.Env)
    True
    """

    async def start(self) -> Sequence[Message]:
        """The first messages."""
        ...

    async def step(self, reply: Message) -> EnvStep:
        """The world's answer to the policy's reply."""
        ...

    async def close(self) -> None:
        """Free everything; called whatever happened, also before `start` and after a crash. Twice does no harm."""
        ...


class World(Protocol):
    """Where tasks and envs come from: what `turnwise train NAME` names.

    >>> from turnwise.envs.registry import get_world
    >>> world = get_world("guess_number", high=8)
    >>> [task.id for task in world.tasks("train", 2, seed=0)] == [task.id for task in world.tasks("train", 2, seed=0)]
    True
    """

    @property
    def name(self) -> str: ...

    @property
    def max_turns(self) -> int:
        """A sensible limit for this world; the config may say otherwise."""
        ...

    @property
    def max_tokens(self) -> int:
        """Likewise: sampled tokens per turn."""
        ...

    def tasks(self, split: Split, count: int, seed: int) -> Sequence[Task]:
        """`count` tasks; the same arguments give the same tasks, and splits share none.

        A world with fewer than `count` different tasks goes through them again, in another order.
        """
        ...

    def make_env(self, task: Task, seed: int) -> Env:
        """A fresh env for one attempt; `seed` drives all of its randomness."""
        ...

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        """Scripted dialogues of `tasks("train", count, seed)`, played well, for a warm-up; empty when there are none.

        Each begins with the env's first messages and ends with the policy's last reply.
        """
        ...


def system(content: str) -> Message:
    """A message of the system.

    >>> import turnwise as tw
    >>> tw.system("Hello.").role
    'system'
    """
    return Message(role="system", content=content)


def user(content: str) -> Message:
    """A message of the user.

    >>> import turnwise as tw
    >>> tw.user("Hello.").role
    'user'
    """
    return Message(role="user", content=content)


def assistant(content: str) -> Message:
    """A message of the assistant.

    >>> import turnwise as tw
    >>> tw.assistant("Hello.").role
    'assistant'
    """
    return Message(role="assistant", content=content)
