"""The engine that trains, where other processes sample for the run: it needs no room for sampling."""

from __future__ import annotations

from collections.abc import Iterator

from turnwise.config.config import Config
from turnwise.engine.config import EngineConfig
from turnwise.envs.base import World
from turnwise.envs.joint import leaves
from turnwise.envs.wrapped import WorldWrapper
from turnwise.judges.world import JudgedWorld
from turnwise.outcomes.world import OutcomeWorld
from turnwise.rollout.server_options import OTHER_SAMPLERS
from turnwise.training.opponent_words import needs_opponents

TRAINER_CACHE_GIB = 0.05
"""KV cache of an engine that does not sample; its self-test draws a few tokens."""


def trainer_engine(config: Config, world: World) -> EngineConfig:
    """The engine of the first learner: without room for sampling where nothing samples on it.

    Opponents, judges and outcome models may be sampled by the run's own service, so a run with one of them keeps it.
    """
    engine = config.engine_in_use
    samples_elsewhere = config.cluster.has_own_samplers or config.rollout.backend in OTHER_SAMPLERS
    if not samples_elsewhere or needs_opponents(config, world) or any(map(_asks_a_model, _wrappers(world))):
        return engine
    update: dict[str, object] = {} if engine.merge_adapter == "always" else {"merge_adapter": "never"}
    if not engine.kv_cache_gib:
        update["kv_cache_gib"] = TRAINER_CACHE_GIB
    return engine.model_copy(update=update)


def _asks_a_model(world: World) -> bool:
    return isinstance(world, JudgedWorld | OutcomeWorld)


def _wrappers(world: World) -> Iterator[World]:
    """Whatever is wrapped around the world, or around each world of several."""
    for one in leaves(world).values():
        while isinstance(one, WorldWrapper):
            yield one
            one = one.inner
