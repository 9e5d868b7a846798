"""Worlds, rewards, methods, losses and loggers that a run was given as Python objects, not by name.

A run directory cannot hold them. It records which ones there were (`meta["objects"]`), and whoever resumes the run or
evaluates it passes them again. A run without its loggers does the same work, so they are only asked for in a note.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.envs.agents import AgentWorld
from turnwise.envs.base import World
from turnwise.envs.config import MIX, EnvConfig, OneWorld
from turnwise.envs.difficulty import level_options, levels_of
from turnwise.envs.joint import JointWorld, level_name
from turnwise.envs.listed import NO_LEVEL, list_world
from turnwise.envs.registry import PYTHON_PREFIX, load_target
from turnwise.envs.rewarded import RewardedWorld, RewardFunction
from turnwise.envs.worlds import as_world, world_parameters
from turnwise.errors import ConfigError
from turnwise.losses.outside import LossFunction, as_loss_name
from turnwise.memory.config import NO_MEMORY, MemoryConfig
from turnwise.memory.world import MemoryWorld
from turnwise.methods.lookup import SHIPPED, PassedMethod, as_method_options
from turnwise.methods.options import MethodOptions
from turnwise.opponents.seating import two_sided
from turnwise.runlog.reader import RunReader
from turnwise.runtime.import_path import import_path, is_importable
from turnwise.watch.loggers import MetricLogger

META_KEY = "objects"
LOGGERS = "loggers"
PLAYED_WITH = ("env", "reward")
"""The objects that decide how an attempt is played and scored; the others matter only to training."""
PlayedBy = Callable[[World, dict[str, Any]], World]


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonObjects:
    """What a caller passed as Python objects; None for what the config names."""

    env: Any = None
    """A world, a class or function that makes one, or an env class (`turnwise.envs.worlds.as_world`)."""
    reward: RewardFunction | None = None
    method: Any = None
    """A method that is built, a class with `Options`, or options (`turnwise.methods.lookup.as_method_options`)."""
    loss: LossFunction | None = None
    loggers: Sequence[MetricLogger] = ()

    def make_world(
        self,
        env: EnvConfig,
        *,
        max_turns: int = 0,
        played_by: PlayedBy | None = None,
        memory: MemoryConfig = NO_MEMORY,
    ) -> World:
        """The world of a run, with its own reward where there is one, and with a memory if one is asked for.

        Args:
            max_turns: The rollout's limit, for a world that tells its players about it; 0: none.
            played_by: Lets others play the world; takes it, and the options that it was made with.
        """
        if not env.mix:
            return self._make_one(env, max_turns=max_turns, played_by=played_by, memory=memory)
        if self.env is not None:
            raise ConfigError(f"env.mix beside {object_name(self.env)}: both are worlds; leave one of them out")
        parts = {name: self._make_one(member, max_turns=max_turns, memory=memory) for name, member in env.mix.items()}
        for name, part in parts.items():
            _check_scripted(part, f"env.mix.{name}")
        sources = {name: member.name for name, member in env.mix.items()}
        return JointWorld(name=MIX, kind="world", parts=parts, sources=sources)

    def _make_one(
        self, env: OneWorld, *, max_turns: int, memory: MemoryConfig, played_by: PlayedBy | None = None
    ) -> World:
        """One world, or the levels that its curriculum chooses from."""
        target = load_target(env.name) if self.env is None else self.env
        if not env.curriculum:
            return self._make_level(env, target, max_turns=max_turns, memory=memory, played_by=played_by)
        num_levels = len(levels_of(target, env.options))
        if num_levels < 2 or env.difficulty == 0:
            raise ConfigError(
                f"curriculum: {env.name} has {num_levels} levels"
                + (", and difficulty=0 leaves the first one" if num_levels > 1 else "")
                + "; expected two or more to choose from: leave the curriculum out, or take a world with a dial"
            )
        goal = num_levels - 1 if env.difficulty == NO_LEVEL else env.difficulty
        parts: dict[str, World] = {}
        for level in range(goal + 1):
            one = env.model_copy(update={"difficulty": level, "curriculum": False})
            parts[level_name(level)] = self._make_level(one, target, max_turns=max_turns, memory=memory)
        _check_scripted(parts[level_name(0)], "env")
        return JointWorld(
            name=next(iter(parts.values())).name,
            kind="level",
            parts=parts,
            sources=dict.fromkeys(parts, env.name),
            tested=() if env.difficulty == NO_LEVEL else (level_name(goal),),
        )

    def _make_level(
        self,
        env: OneWorld,
        target: Any,
        *,
        max_turns: int,
        memory: MemoryConfig,
        played_by: PlayedBy | None = None,
    ) -> World:
        """One world with the options and the level that its config names."""
        tells_limit = max_turns and any(option.name == "max_turns" for option in world_parameters(target) or ())

        def options_of(level: int) -> dict[str, Any]:
            options = dict(env.options)
            if level != NO_LEVEL:
                options = level_options(target, level, options, env.name)
            if tells_limit:
                options.setdefault("max_turns", max_turns)
            return options

        def make_level(level: int) -> World:
            return as_world(target, options_of(level), label=env.name)

        world = make_level(env.difficulty)
        if memory.is_on and isinstance(world, AgentWorld):
            raise ConfigError(
                f"memory.{memory.changed_options()[0]}, and {env.name} is an agent, which says itself what each prompt "
                "holds; leave the memory out, and shorten the messages in the agent"
            )
        if env.tasks and played_by is not None:
            raise ConfigError(
                f"env.tasks={env.tasks} mixes levels, and a worker of cluster.env_workers serves one; "
                "leave one of them out"
            )
        if env.tasks:
            world = list_world(world, Path(env.tasks), make_level)
        world = world if played_by is None else played_by(world, options_of(env.difficulty))
        world = world if self.reward is None else RewardedWorld(world, self.reward)
        return MemoryWorld(world, memory) if memory.is_on else world

    def to_json(self) -> str:
        """The names of what a run directory cannot hold, by parameter."""
        names: dict[str, str] = {}
        if self.env is not None and object_name(self.env).startswith(PYTHON_PREFIX):
            names["env"] = _short_name(self.env)
        if self.reward is not None:
            names["reward"] = _short_name(self.reward)
        if self.method is not None and not _can_be_named(as_method_options(self.method)):
            names["method"] = _short_name(self.method)
        if self.loss is not None and not is_importable(import_path(self.loss)):
            names["loss"] = _short_name(self.loss)
        if self.loggers:
            names[LOGGERS] = f"[{', '.join(_short_name(logger) for logger in self.loggers)}]"
        return json.dumps(names)


NO_OBJECTS = PythonObjects()


def object_name(target: Any) -> str:
    """What `env.name` says of an object: `module:Class` where that can be imported again, else `python:Class`."""
    path = import_path(target) if hasattr(target, "__qualname__") else ""
    return path if is_importable(path) else f"{PYTHON_PREFIX}{_short_name(target)}"


def check_objects(run: RunReader, given: PythonObjects) -> None:
    """Refuse to go on with a run without the objects that it was started with; make loss and method known by name."""
    if given.loss is not None:
        as_loss_name(given.loss)
    if given.method is not None:
        as_method_options(given.method)
    if missing := missing_objects(run, given):
        raise ConfigError(
            f"{run.directory} was started from Python with {missing}, which a run directory cannot hold; pass the same "
            f"objects again: turnwise.Run.resume({str(run.directory)!r}, {missing})"
        )


def check_played_objects(run: RunReader, given: PythonObjects) -> None:
    """Refuse to play the run's world without the world and the reward function that the run was started with."""
    if missing := missing_objects(run, given, PLAYED_WITH):
        raise ConfigError(
            f"{run.directory} was started from Python with {missing}, which a run directory cannot hold, and its "
            f"attempts are played and scored with that; pass the same objects again: "
            f"turnwise.eval({str(run.directory)!r}, {missing})"
        )


def logger_notes(run: RunReader, given: PythonObjects) -> list[str]:
    """Say that the run goes on without the loggers that it was started with."""
    loggers = _recorded(run).get(LOGGERS)
    if loggers is None or given.loggers:
        return []
    again = f"turnwise.Run.resume({str(run.directory)!r}, {LOGGERS}={loggers})"
    return [
        f"the run was started from Python with {LOGGERS}={loggers}, which now hear nothing of it; to log again: {again}"
    ]


def missing_objects(run: RunReader, given: PythonObjects, needed: Sequence[str] = ()) -> str:
    """`name=label, ...` of the objects that the run was started with and that are not given; empty: none.

    Args:
        needed: The names to look at; empty: all but the loggers.
    """
    return ", ".join(
        f"{name}={label}"
        for name, label in _recorded(run).items()
        if name != LOGGERS and getattr(given, name) is None and (not needed or name in needed)
    )


def _recorded(run: RunReader) -> dict[str, str]:
    """What `to_json` wrote of the run."""
    return json.loads(run.meta(META_KEY) or "{}")


def _can_be_named(method: MethodOptions) -> bool:
    """Another process finds the method by its name: it ships with the package, or can be imported."""
    return not isinstance(method, PassedMethod) and (method.name in SHIPPED or is_importable(method.name))


def _check_scripted(world: World, option: str) -> None:
    """Refuse an opponent that is a model where several worlds are joined: only scripts play there."""
    sided = two_sided(world)
    if sided is not None and sided.opponent not in sided.scripted_opponents:
        raise ConfigError(
            f"{option}.options.opponent={sided.opponent} is a model, and neither a mix nor a curriculum has opponents "
            f"that are models; expected a script: {', '.join(sided.scripted_opponents)}"
        )


def _short_name(target: Any) -> str:
    return str(getattr(target, "__name__", "") or getattr(target, "name", "") or type(target).__name__)
