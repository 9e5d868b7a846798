"""Envs of verifiers' older kind as worlds: `SingleTurnEnv`, `MultiTurnEnv`, `ToolEnv` and their subclasses.

    turnwise train env=verifiers_classic:my_env               # an installed package with load_environment(**args)
    turnwise train env=verifiers_classic:sums.py:load_environment

Such an env plays a rollout by itself and calls a model through a client. Here the client belongs to the attempt: each
call is a turn, and the policy's reply is the answer (`turnwise.envs.agents`). A call that goes on where an earlier one
ended continues its token ids, tools included; an env that rewrites earlier messages starts a new datum. The rubric's
weighted sum at the end is the reward, its single functions are logged.

Releases 0.1.10 to 0.3 of verifiers have these envs; `verifiers:` is for the interface of later ones.
"""

# pyright: basic
# Strict checks would only report the peer package, which has no types.

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turnwise.envs.adapters.peers import import_peer, numbers_of
from turnwise.envs.agents import AgentEnv
from turnwise.envs.base import Env, EnvStep, Split, Task
from turnwise.envs.splits import draw, in_split, random_for
from turnwise.errors import ConfigError, DataError
from turnwise.runtime.import_path import add_current_folder, load_attribute
from turnwise.trajectory import Message

DEFAULT_MAX_TURNS = 10
EXTRA = "verifiers-classic"
MODEL = "policy"


class ClassicVerifiersWorld:
    """One env of the older kind, with the rows of its data set as tasks."""

    def __init__(
        self,
        env_id: str,
        *,
        args: dict[str, Any] | None = None,
        num_tasks: int = 1000,
        max_turns: int | None = None,
        max_tokens: int = 256,
        success_reward: float = 1.0,
    ) -> None:
        """
        Args:
            args: Arguments of the env's `load_environment`.
            num_tasks: The largest number of rows to read from each of its data sets.
            max_turns: Turns of the policy; then the attempt is truncated. The default is the env's own, else 10.
            success_reward: An attempt is a success when its reward is at least this.
        """
        self._clients = import_peer("verifiers.clients", extra=EXTRA)
        self.name = f"verifiers_classic:{env_id}"
        self.max_tokens = max_tokens
        self._success_reward = success_reward
        add_current_folder()
        with _signals_kept():
            self._env = _load(env_id, args or {})
        own = getattr(self._env, "max_turns", 0)
        self.max_turns: int = max_turns or (own if isinstance(own, int) and own > 0 else DEFAULT_MAX_TURNS)
        self._rows: dict[str, Mapping[str, Any]] = {}
        self._tasks = self._read_splits(num_tasks)

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        if count and not self._tasks[split]:
            raise ConfigError(f"{self.name} has no {split} rows; its data set is too small, or set eval.tasks=0")
        return draw(self._tasks[split], count, random_for(self.name, split, seed)) if count else []

    def make_env(self, task: Task, seed: int) -> Env:  # noqa: ARG002 - such an env has no seeds
        if task.id not in self._rows:
            raise ConfigError(f"{self.name} has no row {task.id!r}; its data set has changed since it was drawn")
        return AgentEnv(self._play, self._rows[task.id], {})

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:  # noqa: ARG002 - there are none
        return []

    async def _play(self, client: Any, task: Mapping[str, Any]) -> EnvStep:
        """One rollout of the env, whose model calls go to the policy."""
        theirs = self._clients.OpenAIChatCompletionsClient(client)
        played = await self._env.run_rollout(dict(task), theirs, MODEL, {})
        if played.get("error"):
            raise DataError(f"the env failed: {played['error']!r:.300}")
        reward = float(played["reward"])
        return EnvStep(
            reward=reward,
            terminated=True,
            is_success=reward >= self._success_reward,
            info=numbers_of(played.get("metrics")),
        )

    def _read_splits(self, num_tasks: int) -> Mapping[Split, Sequence[Task]]:
        """Its two data sets; a row that is held out is never trained on. With one data set, one row in five is."""
        train = self._read(self._env.get_dataset(num_tasks))
        has_own = getattr(self._env, "eval_dataset", None) is not None
        test = self._read(self._env.get_eval_dataset(num_tasks)) if has_own else []
        held_out = {task.id for task in test}
        rest = [task for task in train if task.id not in held_out]
        if not test or not rest:
            return {"train": in_split(train, "train"), "test": in_split(train, "test")}
        return {"train": rest, "test": test}

    def _read(self, rows: Any) -> list[Task]:
        found: dict[str, Task] = {}
        for row in rows:
            said = {name: value for name, value in row.items() if name != "example_id"}
            text = json.dumps(said, sort_keys=True, default=str)
            task_id = f"row-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
            self._rows[task_id] = row
            found[task_id] = Task(id=task_id)
        return list(found.values())


def _load(env_id: str, args: Mapping[str, Any]) -> Any:
    if ":" in env_id:
        made = load_attribute(env_id)(**args)
    else:
        made = import_peer("verifiers.utils.env_utils", extra=EXTRA).load_environment(env_id, **args)
    if not callable(getattr(made, "run_rollout", None)):
        raise ConfigError(
            f"{env_id} gives {type(made).__name__}, which has no run_rollout; expected an env of verifiers 0.1.10 to "
            "0.3, such as SingleTurnEnv, MultiTurnEnv or ToolEnv"
        )
    return made


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Such an env replaces the handlers of Ctrl-C and of kill; a run needs its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
