"""Any world, with an outcome model's score added to its reward: the option `reward.model`.

When the world ends an attempt, the outcome model reads the whole conversation, and its score is added as the reward
part `judge` (`reward.weights.judge`). With `reward.weights.outcome=0` the policy learns from the outcome model alone.
The world's own verdict is kept: whether the two agree is logged at every step, and an alarm tells when they part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from turnwise.envs.base import Env, EnvStep, Task, World
from turnwise.envs.joint import leaves
from turnwise.envs.sync import as_env
from turnwise.envs.wrapped import EnvWrapper, WorldWrapper
from turnwise.errors import AttemptFailed, Party, TurnwiseError
from turnwise.outcomes.measure import THRESHOLD
from turnwise.outcomes.model import ModelSource, OutcomeModel
from turnwise.trajectory import Message


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeWorld(WorldWrapper):
    """A world whose finished attempts are scored by an outcome model."""

    inner: World
    model: OutcomeModel

    def make_env(self, task: Task, seed: int) -> OutcomeEnv:
        return OutcomeEnv(as_env(self.inner.make_env(task, seed)), self.model)


class OutcomeEnv(EnvWrapper):
    """One attempt, which the outcome model scores when the env ends it."""

    def __init__(self, inner: Env, model: OutcomeModel) -> None:
        super().__init__(inner)
        self._model = model

    async def step(self, reply: Message) -> EnvStep:
        step = await self._play(reply)
        if not step.is_over:
            return step
        try:
            (score,) = await self._model.score([self._dialogue])
        except TurnwiseError as cause:
            raise AttemptFailed(Party.JUDGE, f"outcome model: {cause}") from cause
        parts = dict(step.reward_parts)
        parts["judge"] = parts.get("judge", 0.0) + score
        info = {**step.info, "outcome_score": score, "outcome_cut": float(self._model.cuts(self._dialogue))}
        if step.is_success is not None:
            info["outcome_agreement"] = float((score >= THRESHOLD) == step.is_success)
        return dataclasses.replace(step, reward=parts, info=info)

    def _wrap_fork(self, inner: Env) -> OutcomeEnv:
        fork = OutcomeEnv(inner, self._model)
        fork._dialogue = list(self._dialogue)
        return fork


def has_outcome_model(world: World) -> bool:
    """Whether an outcome model scores the world's attempts; it must be loaded before it can be asked."""
    return any(_outcome_models(world))


def attach_outcome_model(world: World, service: ModelSource) -> None:
    """If an outcome model scores the world's attempts, load it with `service`, which holds the run's own models."""
    for model in _outcome_models(world):
        if not model.is_attached:
            model.attach(service)


def _outcome_models(world: World) -> Iterator[OutcomeModel]:
    for one in leaves(world).values():
        while isinstance(one, WorldWrapper):
            if isinstance(one, OutcomeWorld):
                yield one.model
            one = one.inner
