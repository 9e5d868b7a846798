"""The env workers of a run: `cluster.env_workers` as a world whose attempts are played by other processes."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Generator
from typing import Any

from turnwise.config.config import Config
from turnwise.envs.base import World
from turnwise.envs.registry import PYTHON_PREFIX
from turnwise.envs.remote.client import WorkedWorld, check_served, worked_part
from turnwise.envs.remote.workers import KEY_VARIABLE, EnvWorkers, find_workers
from turnwise.errors import ConfigError
from turnwise.judges import needs_service
from turnwise.rollout.config import RolloutConfig
from turnwise.training.objects import PlayedBy, PythonObjects

Tell = Callable[[str], None]


def make_played_world(config: Config, objects: PythonObjects) -> World:
    """The world of a run, played by the workers that its config names."""
    played_by = _let_workers_play(config) if config.cluster.env_workers else None
    return objects.make_world(config.env, max_turns=config.rollout.max_turns, played_by=played_by, memory=config.memory)


def _let_workers_play(config: Config) -> PlayedBy:
    def played_by(world: World, options: dict[str, Any]) -> World:
        _check_playable_elsewhere(config, world)
        return WorkedWorld(world, _make_workers(config, options))

    return played_by


def _check_playable_elsewhere(config: Config, world: World) -> None:
    """Refuse worlds that need something of the training process."""
    why = ""
    if config.env.name.startswith(PYTHON_PREFIX):
        why = "is a Python object of this process; put it into a module, and pass module:Class"
    elif worked_part(world) is not None:
        why = "is played by workers already; leave cluster.env_workers out"
    elif needs_service(world):
        why = "is judged by a model of this run; give the judge an address"
    if why:
        raise ConfigError(f"cluster.env_workers={config.cluster.env_workers!r}, and the world {config.env.name} {why}")


def _make_workers(config: Config, options: dict[str, Any]) -> EnvWorkers:
    workers = config.cluster.env_workers
    if not isinstance(workers, int):
        found, answers = find_workers(workers, os.environ.get(KEY_VARIABLE, ""))
        check_served(found, answers, config.env.name, options)
        return found
    try:
        from turnwise.env_service.processes import LocalEnvWorkers, WorkerSpec
        from turnwise.env_service.ray_workers import RayEnvWorkers
    except ImportError as cause:
        raise ConfigError(f"cluster.env_workers needs {cause.name}: pip install 'turnwise[served]'") from cause
    rollout = config.rollout
    spec = WorkerSpec(
        env=config.env.name,
        options=options,
        max_envs=config.cluster.envs_per_worker or math.ceil(rollout.max_concurrency / workers),
        deadline_s=rollout.step_deadline_s,
    )
    if config.cluster.uses_ray:
        return RayEnvWorkers(spec, workers, config.cluster.address)
    return LocalEnvWorkers(spec, workers)


def bounded_by_workers(rollout: RolloutConfig, world: World) -> RolloutConfig:
    """The same play with no more attempts at once than the workers have places: an attempt that waits for a place
    would otherwise miss its deadline, and the env would be blamed."""
    part = worked_part(world)
    if part is None or part.workers.num_places >= rollout.max_concurrency:
        return rollout
    return rollout.model_copy(update={"max_concurrency": part.workers.num_places})


def worker_line(config: Config, world: World) -> list[str]:
    """A line of the plan: who plays the envs."""
    part = worked_part(world)
    if part is None:
        return []
    count, places = len(part.workers.workers), part.workers.num_places
    cluster = config.cluster
    own = f"actors of Ray at {cluster.address}" if cluster.uses_ray else "processes of this machine"
    where = own if isinstance(cluster.env_workers, int) else "addresses"
    bound = "" if places >= config.rollout.max_concurrency else f"; they bound rollout.max_concurrency to {places}"
    return [f"envs         {count} workers ({where}), {places} envs at once{bound}"]


@contextlib.contextmanager
def running_workers(world: World, tell: Tell = lambda _: None) -> Generator[None]:
    """Start the workers that are processes of this machine, and end them with the block."""
    part = worked_part(world)
    start = getattr(part.workers, "start", None) if part is not None else None
    if part is None or start is None:
        yield
        return
    workers: Any = part.workers
    workers.on_restart = tell
    workers.start()
    try:
        yield
    finally:
        workers.close()
