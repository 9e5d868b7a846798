"""The types of a world: its tasks, and the envs that play one attempt each, in messages.

    class Echo:
        async def start(self): return [user("Say hi")]
        async def step(self, reply): return EnvStep(reward=1.0 if "hi" in reply.content else 0.0, terminated=True)
        async def close(self): ...

`terminated` means that the task reached an end, good or bad. `truncated` means that it was cut short, so that nobody
knows what reward would have followed. If a limit is part of the task (five guesses, then the game is lost), the env
applies it and sets `terminated`. The rollout applies the run's limits on turns, tokens and time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """Unique in its world. No id is in both the train and the test split."""
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """JSON values only, so that a task can be stored and replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStep:
    """The env's answer to one reply.

    >>> import turnwise as tw
    >>> tw.EnvStep(reward=1.0, terminated=True, is_success=True).is_over
    True
    >>> tw.EnvStep(messages=[tw.user("Guess again.")]).is_over
    False
    """

    messages: Sequence[Message] = ()
    """What the policy sees next. May be empty when the attempt is over."""
    reward: float | Mapping[str, float] = 0.0
    """A number, which counts as `outcome`, or named parts: outcome, format, shaping, penalty, judge."""
    terminated: bool = False
    truncated: bool = False
    is_success: bool | None = None
    """Whether the whole attempt succeeded. Set it in the last step only."""
    is_unparsable: bool = False
    """The reply could not be read as an action. The option `on_unparsable` decides what that costs."""
    is_action: bool = False
    """The reply was read as a command, a query or a call, and not as text for somebody; `as_action` marks it. The
    entropy of actions is logged beside that of text."""
    info: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers to log."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Words to record with the attempt, such as who its opponent was."""
    max_tokens: int = 0
    """Most tokens of the next reply, in place of `rollout.max_tokens_per_turn`; 0: that limit."""

    def __post_init__(self) -> None:
        _check_messages(self.messages)
        _check_reward(self.reward)
        if self.terminated and self.truncated:
            raise DataError("EnvStep is both terminated and truncated; set the one that is true: the end, or a cut")
        if self.max_tokens < 0:
            raise DataError(f"EnvStep.max_tokens={self.max_tokens}; expected 1 or more, or 0 for the run's limit")
        if not self.messages and not self.is_over:
            raise DataError("EnvStep.messages is empty but the attempt goes on; say something, or end it")

    @property
    def is_over(self) -> bool:
        return self.terminated or self.truncated

    @property
    def reward_parts(self) -> Mapping[str, float]:
        return self.reward if isinstance(self.reward, Mapping) else {"outcome": float(self.reward)}


def _check_messages(messages: object) -> None:
    """Refuse a bare string, which is a sequence too, and dicts, which other libraries use for messages."""
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
    """One attempt at one task. An env is used once. Methods may be plain functions; `envs.sync.as_env` runs them.

    An env class by itself is a world for `turnwise.train`. Its constructor takes `seed`, an int that names the task; or
    `task`, a `Task` whose `data["seed"]` is that int; or both, and `seed` is then for the randomness of the attempt.
    Other arguments are options: `env={"options": {"high": 16}}`. A `World` of yours makes its envs as it likes.

    Optional methods: `state_key() -> str` names the state before the next reply; two states with equal keys are the
    same. `fork() -> Env` returns an independent copy in the middle of a task. `reseed(seed)` changes the randomness
    from here on and nothing else. `potential() -> float` says how good the state is, for reward shaping.
    `demonstrate() -> str` gives the reply that an expert would give now; a warm-up learns from it. Optional attribute:
    `waits_for`, the `Party` that a call is waiting for, or None; it is to blame if the call's time runs out.

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
        """Return the first messages."""
        ...

    async def step(self, reply: Message) -> EnvStep:
        """Return the env's answer to the policy's reply."""
        ...

    async def close(self) -> None:
        """Free everything. It is always called, even without `start` or after a crash, and may be called twice."""
        ...


class World(Protocol):
    """Makes tasks and envs. `turnwise train NAME` takes the name of a world.

    >>> from turnwise.envs.registry import get_world
    >>> world = get_world("guess_number", high=8)
    >>> [task.id for task in world.tasks("train", 2, seed=0)] == [task.id for task in world.tasks("train", 2, seed=0)]
    True
    """

    @property
    def name(self) -> str: ...

    @property
    def max_turns(self) -> int:
        """A sensible limit on the turns of an attempt. The config may set another one."""
        ...

    @property
    def max_tokens(self) -> int:
        """A sensible limit on the sampled tokens of a turn. The config may set another one."""
        ...

    def tasks(self, split: Split, count: int, seed: int) -> Sequence[Task]:
        """Return `count` tasks. The same arguments give the same tasks; the two splits share no task.

        A world with fewer than `count` different tasks repeats them, in another order.
        """
        ...

    def make_env(self, task: Task, seed: int) -> Env:
        """Make a new env for one attempt. All of its randomness comes from `seed`."""
        ...

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        """Return scripted, well-played dialogues of `tasks("train", count, seed)` for a warm-up, or an empty list.

        Each begins with the env's first messages and ends with the policy's last reply.
        """
        ...


def system(content: str) -> Message:
    """Make a system message.

    >>> import turnwise as tw
    >>> tw.system("Hello.").role
    'system'
    """
    return Message(role="system", content=content)


def as_action(step: EnvStep) -> EnvStep:
    """The same answer, to a reply that was a command, a query or a call."""
    return replace(step, is_action=True)


def env_answer(
    text: str, info: Mapping[str, float], *, is_last: bool, reward: float = 0.0, is_unparsable: bool = False
) -> EnvStep:
    """What an env says next. If this was the last turn, the attempt ends without success, and its numbers are told."""
    return EnvStep(
        messages=[user(text)],
        reward=reward,
        terminated=is_last,
        is_success=False if is_last else None,
        is_unparsable=is_unparsable,
        info=info if is_last else {},
    )


def user(content: str) -> Message:
    """Make a user message.

    >>> import turnwise as tw
    >>> tw.user("Hello.").role
    'user'
    """
    return Message(role="user", content=content)


def assistant(content: str) -> Message:
    """Make an assistant message.

    >>> import turnwise as tw
    >>> tw.assistant("Hello.").role
    'assistant'
    """
    return Message(role="assistant", content=content)
