"""SkyRL-Gym envs as worlds: `turnwise train skyrl_gym:gsm8k`.

The name is an id of SkyRL-Gym's registry, or your own `BaseTextEnv` as `skyrl_gym:module:Class` or
`skyrl_gym:file.py:Class`. The env gets what SkyRL's generator gives it: `env_config`, and the row of the data set as
`extras`. Rows come from a file (JSON, JSON lines, parquet) with `prompt` (messages) and what the env reads, usually
`reward_spec.ground_truth`. `gsm8k` and `gsm8k_multi_turn` also work without a file, on generated word problems.

The reward of a step is the reward of that turn. `done` means terminated; these envs have no truncation and no seed.
Numbers in `metadata` and `get_metrics()` are logged. `postprocessed_action` is not used, because the policy's tokens
must stay as they are; `info["postprocessed"]` counts the turns in which the env wanted to change them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from turnwise.envs.adapters.base_environment import observation_to_messages
from turnwise.envs.adapters.peers import import_peer, numbers_of, row_tasks
from turnwise.envs.base import Env, EnvStep, Split, Task
from turnwise.envs.library.gsm_problems import draw_problem
from turnwise.envs.scripted import ScriptedPlayer, play_demonstrations
from turnwise.envs.splits import draw, draw_tasks, random_for
from turnwise.envs.sync import as_env
from turnwise.errors import ConfigError, DataError
from turnwise.runtime.import_path import load_attribute
from turnwise.runtime.suggest import did_you_mean
from turnwise.trajectory import Message

GENERATED = ("gsm8k", "gsm8k_multi_turn")
"""The envs that can use generated word problems."""

_MAX_STEPS = 3
_FORM = 'Solve it step by step. The last line is "#### " and the number.'


class SkyRLGymWorld:
    """One env of SkyRL-Gym with its rows."""

    def __init__(
        self,
        env_id: str,
        *,
        data: Path | None = None,
        test_data: Path | None = None,
        row_key: str = "",
        env_config: dict[str, Any] | None = None,
        max_turns: int | None = None,
        max_tokens: int = 256,
        success_reward: float = 1.0,
    ) -> None:
        """
        Args:
            data: Rows with `prompt` and what the env reads. gsm8k and gsm8k_multi_turn need none.
            test_data: Held-out rows. Without them, one row of `data` in five is held out, by hash.
            row_key: The fields that identify a task, such as `prompt,reward_spec`: rows that are equal in them are in
                one split. Empty: what the row asks (`turnwise.envs.rows.what_row_asks`), unless all rows ask the same.
            env_config: The env's own config, as `environment.skyrl_gym.<env>` holds it in SkyRL.
            max_turns: Put into the env's `extras`. The default is the env's own number.
            success_reward: An attempt is a success when its rewards add up to at least this.
        """
        self._env_class = _find_class(env_id)
        self._env_config = _make_config(self._env_class, env_config or {})
        self._env_id = env_id
        self._max_turns_given = max_turns
        self.name = f"skyrl_gym:{env_id}"
        self.max_tokens = max_tokens
        self.success_reward = success_reward
        if data is None and env_id not in GENERATED:
            raise ConfigError(
                f"{self.name} needs rows: env.options.data=rows.jsonl (or .parquet), each with a prompt and what the "
                f"env reads, such as reward_spec.ground_truth; generated rows exist for {', '.join(GENERATED)}"
            )
        self._rows = None if data is None else row_tasks(data, test_data, row_key)
        self.max_turns = self._read_max_turns()

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        rng = random_for(self.name, split, seed)
        if self._rows is None:
            return draw_tasks(self._draw_row, split, count, rng)
        if not self._rows[split]:
            raise ConfigError(
                f"{self.name} has no {split} rows; give it more rows, or a test_data of their own, or name the fields "
                "that tell tasks apart: row_key=prompt,reward_spec"
            )
        return draw(self._rows[split], count, rng)

    def make_env(self, task: Task, seed: int) -> Env:  # noqa: ARG002 - these envs take no seed
        return as_env(SkyRLGymEnv(self, self._make_inner, task.data))

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        """Solutions of the generated problems. Rows from a file have none."""
        return play_demonstrations(self, self._player, count, seed) if self._rows is None else []

    def _make_inner(self, row: Mapping[str, Any]) -> Any:
        extras = {**row, **({} if self._max_turns_given is None else {"max_turns": self._max_turns_given})}
        return self._env_class(env_config=self._env_config, extras=extras)

    def _read_max_turns(self) -> int:
        """Make an env of the first task and read its limit. This also finds incomplete rows early."""
        task = self.tasks("train", 1, 0)[0]
        try:
            inner = self._make_inner(task.data)
        except (AssertionError, AttributeError, LookupError, OSError, TypeError, ValueError) as cause:
            raise ConfigError(
                f"{self.name} cannot be made from its first row (keys {', '.join(task.data)}): {cause!r}; "
                "look at the rows and at env.options.env_config"
            ) from cause
        inner.close()
        return max(1, int(getattr(inner, "max_turns", 1)))

    def _draw_row(self, rng: random.Random) -> Task:
        problem = draw_problem(rng, _MAX_STEPS)
        return Task(
            id=f"{self._env_id}-{problem.question}",
            data={
                "prompt": [{"role": "user", "content": f"{problem.question} {_FORM}"}],
                "reward_spec": {"method": "rule", "ground_truth": str(problem.answer)},
                "extra_info": {"steps": list(problem.steps)},
            },
        )

    def _player(self, task: Task) -> ScriptedPlayer:
        steps, truth = task.data["extra_info"]["steps"], task.data["reward_spec"]["ground_truth"]
        return lambda dialogue: "\n".join([*steps, f"#### {truth}"])  # noqa: ARG005 - the script knows the answer


class SkyRLGymEnv:
    """One attempt. Its methods are plain functions; `as_env` runs them."""

    def __init__(self, world: SkyRLGymWorld, make: Callable[[Mapping[str, Any]], Any], row: Mapping[str, Any]) -> None:
        self._world = world
        self._make = make
        self._row = row
        self._inner: Any = None
        self._return = 0.0
        self._postprocessed = 0

    def start(self) -> list[Message]:
        if "prompt" not in self._row:
            raise DataError(f"a row with {', '.join(self._row) or 'nothing'}; expected a prompt, a list of messages")
        self._inner = self._make(self._row)
        prompt, _ = self._inner.init(self._row["prompt"])
        return observation_to_messages(prompt)

    def step(self, reply: Message) -> EnvStep:
        out = self._inner.step(reply.content)
        reward, is_over = float(out["reward"]), bool(out["done"])
        self._return += reward
        postprocessed = out.get("postprocessed_action")
        self._postprocessed += postprocessed is not None and postprocessed != reply.content
        metrics = {**numbers_of(out.get("metadata")), **(numbers_of(self._inner.get_metrics()) if is_over else {})}
        if self._postprocessed:
            metrics["postprocessed"] = float(self._postprocessed)
        return EnvStep(
            messages=observation_to_messages(out["observations"] or []),
            reward=reward,
            terminated=is_over,
            is_success=self._return >= self._world.success_reward if is_over else None,
            info=metrics,
        )

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
            self._inner = None


def _find_class(env_id: str) -> type:
    peer = import_peer("skyrl_gym", extra="skyrl-gym")
    if ":" not in env_id and env_id not in peer.registry:
        near = did_you_mean(env_id, peer.registry)
        raise ConfigError(
            f"skyrl_gym has no env {env_id!r}{near}; registered: {', '.join(peer.registry)}; "
            "one of your own is skyrl_gym:module:Class"
        )
    target = env_id if ":" in env_id else peer.spec(env_id).entry_point
    env_class = load_attribute(target) if isinstance(target, str) else target
    base = import_peer("skyrl_gym.envs.base_text_env", extra="skyrl-gym").BaseTextEnv
    if not (isinstance(env_class, type) and issubclass(env_class, base)):
        raise ConfigError(f"{env_id} is {env_class!r:.60}; expected a subclass of skyrl_gym's BaseTextEnv")
    return env_class


def _make_config(env_class: type, given: Mapping[str, Any]) -> Any:
    """The given values, and the defaults of the dataclass that annotates the constructor's `env_config`."""
    omegaconf = import_peer("omegaconf", extra="skyrl-gym")
    annotation = get_type_hints(env_class.__init__).get("env_config")
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type) and is_dataclass(kind)]
    try:
        return omegaconf.OmegaConf.merge(*(omegaconf.OmegaConf.structured(kind) for kind in kinds[:1]), dict(given))
    except omegaconf.errors.OmegaConfBaseException as cause:
        raise ConfigError(f"env_config={dict(given)} does not fit {env_class.__name__}: {cause}") from cause
