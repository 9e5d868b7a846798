"""Any world, with a judge after its own reward.

    world = judged(get_world("search"), Judge(model, Rubric(criteria="The answer is short and polite.")))

The world's own reward stays as it is. When an attempt is over and passes the gate, the judge scores the whole
conversation, and weight * score is added to the reward of the last turn as the part `judge`. The judge is not asked
about an attempt that does not pass the gate, nor about one that a limit of the rollout cut short.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

from turnwise.envs.base import Env, EnvStep, Task, World
from turnwise.envs.joint import leaves
from turnwise.envs.registry import get_world
from turnwise.envs.sync import as_env
from turnwise.envs.wrapped import EnvWrapper, WorldWrapper
from turnwise.errors import ConfigError
from turnwise.judges.cache import FileCache, MemoryCache
from turnwise.judges.judge import Fallback, Judge, JudgeLimits
from turnwise.judges.models import AddressModel, EmbeddedModel, JudgeModel, SamplerSource
from turnwise.judges.rubric import Rubric
from turnwise.trajectory import Message

Gate = Literal["success", "outcome", "always"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JudgedWorld(WorldWrapper):
    """A world whose finished attempts are judged."""

    inner: World
    judge: Judge
    gate: Gate = "success"
    """Which attempts are judged: those that the world calls a success, those whose outcome is above 0, or all."""
    weight: float = 1.0
    """The reward for a full score."""
    reference_key: str = ""
    """The entry of a task's data that holds the right answer, to show to the judge; empty shows no answer."""

    def __post_init__(self) -> None:
        if self.gate not in ("success", "outcome", "always"):
            raise ConfigError(f"gate={self.gate!r}; expected success, outcome or always")
        if not self.weight > 0:
            raise ConfigError(f"weight={self.weight}; expected more than 0")

    def make_env(self, task: Task, seed: int) -> JudgedEnv:
        return JudgedEnv(self, as_env(self.inner.make_env(task, seed)), self._reference(task))

    def _reference(self, task: Task) -> str:
        if not self.reference_key:
            return ""
        if self.reference_key not in task.data:
            raise ConfigError(
                f"reference_key={self.reference_key!r} is not in the data of task {task.id}; "
                f"it has {', '.join(task.data)}"
            )
        value = task.data[self.reference_key]
        several = cast(Iterable[object], value) if isinstance(value, list | tuple) else [value]
        return " / ".join(map(str, several))


class JudgedEnv(EnvWrapper):
    """One attempt, which the judge scores when the env ends it."""

    def __init__(self, world: JudgedWorld, inner: Env, reference: str) -> None:
        super().__init__(inner)
        self._world = world
        self._reference = reference
        self._outcome = 0.0

    async def step(self, reply: Message) -> EnvStep:
        step = await self._play(reply)
        self._outcome += step.reward_parts.get("outcome", 0.0)
        if not step.is_over or not self._passes_gate(step):
            return step
        verdict = await self._world.judge.score(self._dialogue, self._reference)
        info = {**step.info, "judge_asked": 1.0, "judge_fallback": float(bool(verdict.problem))}
        if verdict.score is None:
            return dataclasses.replace(step, info=info)
        parts = dict(step.reward_parts)
        parts["judge"] = parts.get("judge", 0.0) + self._world.weight * verdict.score
        return dataclasses.replace(step, reward=parts, info={**info, "judge_score": verdict.score})

    def _wrap_fork(self, inner: Env) -> JudgedEnv:
        fork = JudgedEnv(self._world, inner, self._reference)
        fork._dialogue, fork._outcome = list(self._dialogue), self._outcome
        return fork

    def _passes_gate(self, step: EnvStep) -> bool:
        gate = self._world.gate
        return gate == "always" or (bool(step.is_success) if gate == "success" else self._outcome > 0)


def judged(
    world: World, judge: Judge, *, gate: Gate = "success", weight: float = 1.0, reference_key: str = ""
) -> JudgedWorld:
    """`world` with the judge's score added to its reward, as the part `judge`."""
    return JudgedWorld(inner=world, judge=judge, gate=gate, weight=weight, reference_key=reference_key)


def judged_by_model(
    world: str,
    rubric: str,
    model: str,
    *,
    base_url: str = "",
    world_options: dict[str, Any] | None = None,
    api_key_variable: str = "",
    gate: Gate = "success",
    weight: float = 1.0,
    reference_key: str = "",
    highest: float = 10.0,
    max_tokens: int = 512,
    temperature: float = 0.0,
    cache: str = "",
    deadline_s: float = 45.0,
    max_tries: int = 3,
    max_concurrency: int = 8,
    requests_per_minute: float = 0.0,
    fallback: Fallback = "fail",
    fallback_value: float | None = None,
) -> JudgedWorld:
    """Build a world with a judge from plain values, as the command line and a config give them.

    Args:
        rubric: What a good attempt does, or `@file` to read it from a file.
        model: With `base_url`, the model's name at that address. Without it, a model or checkpoint of turnwise, which
            is loaded beside the policy.
        base_url: An OpenAI-compatible address.
        api_key_variable: The environment variable that holds the key; the key itself is never stored.
        highest: The highest score; the scale starts at 0.
        cache: An SQLite file that keeps answers; empty keeps them in memory.
    """
    if api_key_variable and not base_url:
        raise ConfigError(f"api_key_variable={api_key_variable} without base_url; a judge in this process needs no key")
    asked: JudgeModel = EmbeddedModel(model, temperature=temperature, max_tokens=max_tokens)
    if base_url:
        asked = AddressModel(
            base_url=base_url,
            model=model,
            api_key=_read_key(api_key_variable, os.environ),
            temperature=temperature,
            max_tokens=max_tokens,
            timeout_s=deadline_s,
        )
    judge = Judge(
        asked,
        Rubric(criteria=_read_rubric(rubric), highest=highest),
        cache=FileCache(cache) if cache else MemoryCache(),
        limits=JudgeLimits(
            deadline_s=deadline_s,
            max_tries=max_tries,
            max_concurrency=max_concurrency,
            requests_per_minute=requests_per_minute,
            fallback=fallback,
            fallback_value=fallback_value,
        ),
    )
    inner = get_world(world, **(world_options or {}))
    return judged(inner, judge, gate=gate, weight=weight, reference_key=reference_key)


def needs_service(world: World) -> bool:
    """Whether the world's judge is a model that must be loaded before it can be asked."""
    return any(_embedded_model(one) is not None for one in leaves(world).values())


def attach_judge(world: World, service: SamplerSource) -> None:
    """If the world's judge is a model of ours, load it with `service`, which holds the run's own models."""
    for one in leaves(world).values():
        model = _embedded_model(one)
        if model is not None:
            model.attach(service)


def _embedded_model(world: World) -> EmbeddedModel | None:
    while isinstance(world, WorldWrapper) and not isinstance(world, JudgedWorld):
        world = world.inner
    model = world.judge.model if isinstance(world, JudgedWorld) else None
    return model if isinstance(model, EmbeddedModel) else None


def _read_key(variable: str, environment: Mapping[str, str]) -> str:
    if not variable:
        return ""
    if not environment.get(variable):
        raise ConfigError(f"the environment variable {variable} is not set; export the judge's key in it")
    return environment[variable]


def _read_rubric(text: str) -> str:
    if not text.startswith("@"):
        return text
    path = Path(text[1:]).expanduser()
    if not path.is_file():
        raise ConfigError(f"there is no rubric file {path}")
    return path.read_text(encoding="utf-8")
