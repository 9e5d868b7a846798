"""A data set of prompts and reward functions as a world of one turn, in the form that TRL's users know.

    def short(completions, **columns):
        return [float(len(text) < 80) for text in completions]

    turnwise.run_grpo([{"prompt": "Say hello."}, ...], reward_funcs=[short], model="smollm2")

A row has `prompt`: a text, or messages (`{"role": ..., "content": ...}`). Its other columns go to the functions.
A function takes `prompts`, `completions` and the columns as lists, and returns a list with one number per completion;
it may leave out what it does not read, and it may be async. Each completion is scored by itself, so the lists have one
entry. A completion is a text if its prompt is one, and a list with one assistant message if the prompt is messages.
None means that a function does not apply to a row. The reward is the weighted sum; `rollout/env_NAME_mean` has the mean
of each function.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from turnwise.envs.base import EnvStep, Split, Task, user
from turnwise.envs.rows import Row, read_rows
from turnwise.envs.splits import draw, random_for, split_of
from turnwise.errors import AttemptFailed, ConfigError, Party
from turnwise.runtime.raised_at import describe_error
from turnwise.trajectory import Message

RewardFunc = Callable[..., Any]
PROMPT = "prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptWorld:
    """Prompts of a data set, scored by functions."""

    rows: Iterable[Row] | Path | str = field(repr=False)
    """The data set: a list of dicts, a `datasets.Dataset`, or a file (JSON lines, JSON, parquet)."""
    reward_funcs: Sequence[RewardFunc]
    reward_weights: Sequence[float] | None = None
    """One weight per function; None weighs them equally."""
    test_rows: Iterable[Row] | Path | str | None = field(default=None, repr=False)
    """Rows for evaluations; None holds out a fifth of the prompts of `rows`. A prompt of theirs is not trained on."""
    name: str = "prompts"
    max_turns: int = 1
    max_tokens: int = 256
    _tasks: Mapping[Split, Sequence[Task]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        functions = [self.reward_funcs] if callable(self.reward_funcs) else list(self.reward_funcs)
        _check_functions(functions, self.reward_weights)
        object.__setattr__(self, "reward_funcs", tuple(functions))
        rows = _tasks_of(self.rows)
        if self.test_rows is None:
            splits: dict[Split, list[Task]] = {"train": [], "test": []}
            for task in rows:
                splits[split_of(_asked_in(task))].append(task)
        else:
            test = _tasks_of(self.test_rows)
            held_out = {_asked_in(task) for task in test}
            splits = {"train": [task for task in rows if _asked_in(task) not in held_out], "test": test}
        object.__setattr__(self, "_tasks", splits)

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        if count and not self._tasks[split]:
            raise ConfigError(f"no row of the data set is in the {split} split; give more rows, or test_rows=...")
        return draw(self._tasks[split], count, random_for(self.name, split, seed)) if count else []

    def make_env(self, task: Task, seed: int) -> PromptEnv:  # noqa: ARG002 - a prompt has no randomness
        return PromptEnv(task.data["row"], self)

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:  # noqa: ARG002 - there is no script
        return []


class PromptEnv:
    """One completion of one prompt."""

    def __init__(self, row: Row, world: PromptWorld) -> None:
        self._row = row
        self._world = world

    async def start(self) -> list[Message]:
        return _messages_of(self._row[PROMPT])

    async def step(self, reply: Message) -> EnvStep:
        values: dict[str, float] = {}
        total = 0.0
        functions = self._world.reward_funcs
        weights = self._world.reward_weights or [1.0] * len(functions)
        for function, weight in zip(functions, weights, strict=True):
            value = await self._score(function, reply)
            if value is not None:
                values[_name_of(function)] = value
                total += weight * value
        return EnvStep(reward=total, terminated=True, info=values)

    async def close(self) -> None:
        pass

    async def _score(self, function: RewardFunc, reply: Message) -> float | None:
        is_text = isinstance(self._row[PROMPT], str)
        completion = reply.content if is_text else [{"role": "assistant", "content": reply.content}]
        columns = {name: [value] for name, value in self._row.items() if name != PROMPT}
        given = {"prompts": [self._row[PROMPT]], "completions": [completion], **columns}
        try:
            scores = function(**_accepted(function, given))
            if inspect.isawaitable(scores):
                scores = await scores
        except Exception as error:
            raise AttemptFailed(Party.REWARD, f"{_name_of(function)} raised {describe_error(error)}") from error
        return _only_number(_name_of(function), scores)


def _accepted(function: RewardFunc, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a function names; all of them if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(given)
    return {parameter.name: given[parameter.name] for parameter in parameters if parameter.name in given}


def _only_number(name: str, scores: Any) -> float | None:
    values = [scores] if isinstance(scores, int | float) else list(scores)
    if len(values) != 1 or not (values[0] is None or isinstance(values[0], int | float)):
        detail = f"{name} returned {scores!r:.200} for one completion; expected a list with one number"
        raise AttemptFailed(Party.REWARD, detail)
    return None if values[0] is None else float(values[0])


def _name_of(function: RewardFunc) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _check_functions(functions: Sequence[Any], weights: Sequence[float] | None) -> None:
    wrong = [function for function in functions if not callable(function)]
    if wrong or not functions:
        came = repr(wrong[0]) if wrong else "none"
        raise ConfigError(
            f"reward_funcs: {came}; expected functions of (prompts, completions, and columns of the data set) that "
            "return a list of numbers"
        )
    names = [_name_of(function) for function in functions]
    if len(set(names)) < len(names):
        raise ConfigError(f"reward_funcs: two functions are called alike ({', '.join(names)}); rename one")
    if weights is not None and len(weights) != len(functions):
        raise ConfigError(f"reward_weights has {len(weights)} numbers for {len(functions)} reward functions")


def _asked_in(task: Task) -> str:
    """The prompt of a row: rows that ask the same, and differ in an index or an answer, belong to one split."""
    return json.dumps(task.data["row"][PROMPT], sort_keys=True)


def _tasks_of(rows: Iterable[Row] | Path | str) -> list[Task]:
    found = read_rows(rows) if isinstance(rows, Path | str) else list(rows)
    tasks: dict[str, Task] = {}
    for number, row in enumerate(cast(list[Any], found), start=1):
        if not isinstance(row, Mapping) or PROMPT not in row:
            columns = ", ".join(map(str, cast(Iterable[Any], row))) if isinstance(row, Mapping) else repr(row)[:80]
            raise ConfigError(f"row {number} of the data set has no column {PROMPT!r}; it has {columns}")
        _messages_of(row[PROMPT])
        row = dict(cast(Row, row))
        text = json.dumps(row, sort_keys=True, default=str)
        identity = hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
        tasks[identity] = Task(id=identity, data={"row": row})
    if not tasks:
        raise ConfigError("the data set holds no rows")
    return list(tasks.values())


def _messages_of(prompt: Any) -> list[Message]:
    if isinstance(prompt, str):
        return [user(prompt)]
    parts = cast(Sequence[Any], prompt) if isinstance(prompt, Sequence) else ()
    if parts and all(_is_message(part) for part in parts):
        return [Message(role=part["role"], content=part["content"]) for part in parts]
    raise ConfigError(
        f'prompt {prompt!r:.200}; expected a text, or messages like [{{"role": "user", "content": "Hello."}}]'
    )


def _is_message(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    message = cast(Mapping[str, Any], part)
    return message.get("role") in ("system", "user", "assistant") and isinstance(message.get("content"), str)
