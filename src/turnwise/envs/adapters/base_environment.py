"""Runs env classes that have `step(response, ground_truth) -> (reward, observation, done)` and `reset()`.

    from turnwise.envs.adapters.base_environment import BaseEnvironment, BaseEnvironmentWorld

    class Capital(BaseEnvironment):
        max_turns = 3

        def step(self, response, ground_truth):
            if ground_truth["city"] in response:
                return 1.0, None, True
            return 0.0, "Try again.", False

    world = BaseEnvironmentWorld(Capital, [{"prompt": "Capital of France?", "ground_truth": {"city": "Paris"}}, ...])

The reward of a step is the reward of that turn, so final-only, turn-level and progress rewards all work. The attempt
ends with `done`, or after the env's `max_turns` turns, because that limit is part of the task in such classes. If a
class reads `current_turn` but never changes it, the adapter counts it: in `step` it is the number of the turn that is
being judged, from 1, just as in a class that begins its `step` with `self.current_turn += 1`.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, cast, get_args

from turnwise.envs.base import Env, EnvStep, Split, Task, user
from turnwise.envs.rows import Row, read_rows, split_row_tasks
from turnwise.envs.scripted import has_demonstrations, play_demonstrations
from turnwise.envs.splits import draw, random_for
from turnwise.envs.sync import as_env
from turnwise.errors import ConfigError, DataError
from turnwise.trajectory import Message, Role

DEFAULT_MAX_TURNS = 10
DEFAULT_MAX_TOKENS = 256


class BaseEnvironment(ABC):
    """Subclass it and write `step`. `reset` is called once, before the first turn."""

    @abstractmethod
    def step(self, response: str, ground_truth: Any) -> tuple[Any, ...]:
        """Judge one reply: return `(reward, observation, done)`. The observation is None at the end."""

    def reset(self) -> Any:
        """Prepare for a new attempt."""
        return None

    # Optional: `demonstrate(self, ground_truth)`, or without the argument, returns the reply that an expert would give
    # now. With it, the world has demonstrations for a warm-up.


class BaseEnvironmentWorld:
    """A `World` made of such a class and its dataset."""

    def __init__(
        self,
        env_class: type[BaseEnvironment],
        dataset: Sequence[Row] | str | Path,
        *,
        test_dataset: Sequence[Row] | str | Path | None = None,
        row_key: str = "",
        name: str | None = None,
        max_turns: int | None = None,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        success_reward: float = 1.0,
        env_options: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            dataset: Rows with `prompt` (text, or messages as dicts) and `ground_truth`, or a JSON or JSON lines file.
            test_dataset: Held-out rows. Without them, one row of `dataset` in five is held out, by hash.
            row_key: The fields that identify a task, `prompt` or `prompt,ground_truth`: rows that are equal in them are
                in one split. Empty: `prompt`, unless all prompts are the same.
            max_turns: Passed to the class's constructor if it takes it. The default is the class's own number.
            success_reward: An attempt is a success if its last reward is at least this.
            env_options: More arguments for the constructor of the class.
        """
        self.name = name or env_class.__name__
        self.max_tokens = max_tokens
        self._env_class = env_class
        self._env_options = dict(env_options or {})
        self._success_reward = success_reward
        if max_turns is not None and "max_turns" in inspect.signature(env_class).parameters:
            self._env_options.setdefault("max_turns", max_turns)
        own = getattr(self._make(), "max_turns", None)
        self.max_turns: int = max_turns or (own if isinstance(own, int) else DEFAULT_MAX_TURNS)
        test = None if test_dataset is None else [_make_task(row) for row in _load(test_dataset)]
        self._tasks = split_row_tasks([_make_task(row) for row in _load(dataset)], test, row_key=row_key)

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        if not self._tasks[split]:
            raise ConfigError(
                f"{self.name} has no {split} rows; give it more rows, or a test_dataset of their own, or "
                "row_key=prompt,ground_truth if rows with one prompt are tasks of their own"
            )
        return draw(self._tasks[split], count, random_for(self.name, split, seed))

    def make_env(self, task: Task, seed: int) -> Env:  # noqa: ARG002 - these classes know no seed
        env = BaseEnvironmentEnv(
            self._make(),
            task.data["prompt"],
            task.data["ground_truth"],
            max_turns=self.max_turns,
            success_reward=self._success_reward,
        )
        return as_env(env)

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        """What the envs demonstrate; none if the class has no `demonstrate`."""
        return play_demonstrations(self, lambda _: None, count, seed) if has_demonstrations(self._env_class) else []

    def _make(self) -> BaseEnvironment:
        return self._env_class(**self._env_options)


class BaseEnvironmentEnv:
    """One attempt. Its methods are plain functions; `as_env` runs them."""

    def __init__(
        self, inner: BaseEnvironment, prompt: object, ground_truth: object, *, max_turns: int, success_reward: float
    ) -> None:
        self._inner = cast(Any, inner)
        self._prompt = prompt
        self._ground_truth = ground_truth
        self._max_turns = max_turns
        self._success_reward = success_reward
        self._turn = 0
        self._counts_for_it = not _stores_attribute(type(inner), "current_turn")

    def start(self) -> list[Message]:
        self._inner.reset()
        return observation_to_messages(self._prompt)

    def step(self, reply: Message) -> EnvStep:
        self._turn += 1
        if self._counts_for_it and hasattr(self._inner, "current_turn"):
            self._inner.current_turn = self._turn
        reward, observation, done = _check_result(self._inner.step(reply.content, self._ground_truth))
        is_over = done or self._turn >= self._max_turns
        if observation is None and not is_over:
            raise DataError("step returned no observation but done=False; say something, or return done=True")
        return EnvStep(
            messages=[] if observation is None else observation_to_messages(observation),
            reward=reward,
            terminated=is_over,
            is_success=reward >= self._success_reward if is_over else None,
        )

    def demonstrate(self) -> Any:
        """The reply that the class's own expert would give now."""
        method = self._inner.demonstrate
        return method(self._ground_truth) if inspect.signature(method).parameters else method()

    def close(self) -> None:
        close = getattr(self._inner, "close", None)
        if callable(close):
            close()


def observation_to_messages(observation: object) -> list[Message]:
    """Convert text, a message, a dict with role and content, or a list of messages or dicts."""
    if isinstance(observation, str):
        return [user(observation)]
    items = cast(Iterable[object], observation) if isinstance(observation, list | tuple) else [observation]
    return [_to_message(item) for item in items]


def _to_message(item: object) -> Message:
    if isinstance(item, Message):
        return item
    row = cast(Mapping[str, Any], item if isinstance(item, Mapping) else {})
    if row.get("role") not in get_args(Role) or not isinstance(row.get("content"), str):
        raise DataError(f"{item!r:.60} is not a message; expected text, or a dict with role and content")
    return Message(role=row["role"], content=row["content"])


def _check_result(result: object) -> tuple[float, object, bool]:
    parts = cast(tuple[Any, ...], result) if isinstance(result, tuple) else ()
    if len(parts) != 3:
        raise DataError(f"step returned {result!r:.60}; expected (reward, observation, done)")
    reward, observation, done = parts
    if not isinstance(reward, Real) or not isinstance(done, bool):
        raise DataError(f"step returned reward={reward!r:.40}, done={done!r:.40}; expected a number and True or False")
    return float(reward), observation, done


def _stores_attribute(env_class: type, name: str) -> bool:
    """Whether some method of the class, other than its constructor and `reset`, assigns `self.<name>`."""
    for method in dir(env_class):
        if method in ("__init__", "reset"):
            continue
        for owner in env_class.__mro__:
            function = vars(owner).get(method)
            if not inspect.isfunction(function):
                continue
            if any(i.opname == "STORE_ATTR" and i.argval == name for i in dis.get_instructions(function)):
                return True
            if "super" not in function.__code__.co_names:
                break  # the methods that it overrides never run
    return False


def _load(dataset: Sequence[Row] | str | Path) -> Sequence[Row]:
    return read_rows(dataset) if isinstance(dataset, str | Path) else dataset


def _make_task(row: Row) -> Task:
    if "prompt" not in row or "ground_truth" not in row:
        raise ConfigError(f"a row with {', '.join(map(repr, row)) or 'nothing'}; expected 'prompt' and 'ground_truth'")
    data = {"prompt": row["prompt"], "ground_truth": row["ground_truth"]}
    observation_to_messages(data["prompt"])
    try:
        text = json.dumps(data, sort_keys=True)
    except (TypeError, ValueError) as cause:
        raise ConfigError(f"the row of {row['prompt']!r:.60} is not JSON: {cause}") from cause
    return Task(id=f"row-{hashlib.sha256(text.encode('utf-8')).hexdigest()[:16]}", data=data)
