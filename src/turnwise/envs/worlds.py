"""Turns anything that can be a world into a `World`: a world class or object, an env class by itself, or an agent.

An env class is enough to train on if its constructor takes a `task` or a `seed`. The tasks are then numbers: even ones
for training, odd ones held out.

    class Coin:                                   # python: as_world(Coin)    command line: turnwise train coin.py:Coin
        def __init__(self, seed: int): ...
        def start(self): ...
        def step(self, reply): ...
        def close(self): ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from turnwise.envs.adapters.base_environment import BaseEnvironment, BaseEnvironmentWorld
from turnwise.envs.agents import CLIENT, TASK, AgentWorld, is_agent
from turnwise.envs.base import Env, Split, Task, World
from turnwise.envs.schema import Parameter, annotation_to_schema, match_arguments, read_signature
from turnwise.envs.scripted import has_demonstrations, play_demonstrations
from turnwise.envs.splits import random_for
from turnwise.envs.sync import as_env, check_env_methods, missing_methods
from turnwise.errors import ConfigError, DataError
from turnwise.trajectory import Message

DEFAULT_MAX_TURNS = 10
DEFAULT_MAX_TOKENS = 64

_NUM_SEEDS = 2**30


class EnvClassWorld:
    """A world made of one env class. Task n is the env with seed n."""

    def __init__(self, env_class: Callable[..., Any], options: Mapping[str, Any], *, is_single: bool = False) -> None:
        names = set(inspect.signature(env_class).parameters)
        self._takes = names & {"task", "seed"}
        self.name: str = env_class.__name__
        if not self._takes and not is_single:
            raise ConfigError(
                f"the constructor of {env_class.__name__} takes neither `task` nor `seed`, so every task would be the "
                "same and nothing could be held out; take one of them, or write a World (docs/envs.md)"
            )
        self._env_class = env_class
        self._options = options
        self.max_turns = _read_limit(env_class, options, "max_turns", DEFAULT_MAX_TURNS)
        self.max_tokens = _read_limit(env_class, options, "max_tokens", DEFAULT_MAX_TOKENS)

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        rng = random_for(self.name, split, seed)
        numbers = [2 * number + (split == "test") for number in rng.sample(range(_NUM_SEEDS), count)]
        return [Task(id=f"{split}-{number}", data={"seed": number}) for number in numbers]

    def make_env(self, task: Task, seed: int) -> Env:
        given: dict[str, Any] = {"task": task, "seed": seed if "task" in self._takes else task.data["seed"]}
        return as_env(self._env_class(**self._options, **{name: given[name] for name in self._takes}))

    def demonstrations(self, count: int, seed: int) -> Sequence[Sequence[Message]]:
        """What the envs demonstrate; none if the class has no `demonstrate`."""
        return play_demonstrations(self, lambda _: None, count, seed) if has_demonstrations(self._env_class) else []


def _read_limit(env_class: Callable[..., Any], options: Mapping[str, Any], name: str, default: int) -> int:
    """Return the option if it is given, else the default of the constructor's argument, else the class attribute."""
    parameter = inspect.signature(env_class).parameters.get(name)
    for value in (options.get(name), parameter and parameter.default, getattr(env_class, name, None)):
        if isinstance(value, int):
            return value
    return default


def is_world(value: object) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("tasks", "make_env"))


def is_env(value: object) -> bool:
    return not missing_methods(value)


def _is_meant_as_env(target: type) -> bool:
    """A class that plays, and is no world: it has `start` or `step`."""
    plays = any(callable(getattr(target, name, None)) for name in ("start", "step"))
    return plays and not is_world(target)


def as_world(target: Any, options: Mapping[str, Any] | None = None, *, label: str = "") -> World:
    """Make a `World` of a world, a world class, a function that makes one, an env class, a `BaseEnvironment`, or an
    agent: a function of (client, task).

    Args:
        options: Arguments for the constructor. An unknown name is refused, with the nearest known name in the message.
        label: The name to use in messages.
    """
    given = dict(options or {})
    label = label or getattr(target, "__name__", type(target).__name__)
    if not callable(target):
        if given:
            raise ConfigError(f"{label} is an object already, so it takes no options; got {', '.join(given)}")
        return _checked(target, label)
    function = cast(Callable[..., Any], target)
    if inspect.isclass(target) and issubclass(target, BaseEnvironment):
        return _base_environment_world(target, given, label)
    if inspect.isclass(target) and is_env(target) and not is_world(target):
        checked = check_options(label, world_parameters(target), given)
        return EnvClassWorld(function, checked)
    if is_agent(target):
        return _agent_world(function, given, label)
    if inspect.isclass(target) and _is_meant_as_env(target):
        check_env_methods(target)
    return _checked(function(**check_options(label, world_parameters(target), given)), label)


def world_parameters(target: Any) -> tuple[Parameter, ...] | None:
    """The options that `as_world(target)` takes. None if it takes any (`**kwargs`)."""
    if not callable(target):
        return ()
    if inspect.isclass(target) and issubclass(target, BaseEnvironment):
        ours = _own_parameters(BaseEnvironmentWorld, without=("env_class", "env_options"))
        return (*ours, *_own_parameters(target, without=[parameter.name for parameter in ours]))
    if is_agent(target):
        ours = _own_parameters(AgentWorld, without=("agent", "options"))
        return (*ours, *_own_parameters(target, without=(CLIENT, TASK)))
    kinds = {parameter.kind for parameter in inspect.signature(target).parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return None
    is_env_class = inspect.isclass(target) and is_env(target) and not is_world(target)
    return _own_parameters(target, without=("task", "seed") if is_env_class else ())


def check_options(label: str, parameters: Sequence[Parameter] | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Check names and types of options. An option of a type that JSON does not have is passed on unchecked."""
    if parameters is None:
        return dict(given)
    loose = [parameter if _has_schema(parameter) else _untyped(parameter) for parameter in parameters]
    try:
        return match_arguments(loose, given, noun="option")
    except DataError as error:
        raise ConfigError(f"world {label}: {error}") from error


def _own_parameters(target: Callable[..., Any], without: Sequence[str] = ()) -> tuple[Parameter, ...]:
    return tuple(parameter for parameter in read_signature(target).parameters if parameter.name not in without)


def _has_schema(parameter: Parameter) -> bool:
    try:
        annotation_to_schema(parameter.annotation)
    except ConfigError:
        return False
    return True


def _untyped(parameter: Parameter) -> Parameter:
    return Parameter(name=parameter.name, annotation=Any, is_required=parameter.is_required, default=parameter.default)


def _base_environment_world(env_class: type[BaseEnvironment], given: dict[str, Any], label: str) -> World:
    if "dataset" not in given:
        raise ConfigError(
            f"world {label}: option 'dataset' is missing; expected a file of rows with prompt and ground_truth: "
            "dataset=rows.jsonl for check-env, env.options.dataset=rows.jsonl for train"
        )
    checked = check_options(label, world_parameters(env_class), given)
    own = {parameter.name for parameter in _own_parameters(BaseEnvironmentWorld)}
    env_options = {name: value for name, value in checked.items() if name not in own}
    rest = {name: value for name, value in checked.items() if name in own}
    return BaseEnvironmentWorld(env_class, env_options=env_options, **rest)


def _agent_world(agent: Callable[..., Any], given: dict[str, Any], label: str) -> World:
    checked = check_options(label, world_parameters(agent), given)
    own = {parameter.name for parameter in _own_parameters(AgentWorld)}
    agent_options = {name: value for name, value in checked.items() if name not in own}
    return AgentWorld(agent, agent_options, **{name: value for name, value in checked.items() if name in own})


def _checked(value: object, label: str) -> World:
    if is_world(value):
        return cast(World, value)
    if is_env(value):
        name = type(value).__name__
        raise ConfigError(
            f"{label} gives an env, an object of {name}; pass the class {name} itself, because every attempt makes an "
            "env of its own; or pass a world with tasks(split, count, seed) and make_env(task, seed)"
        )
    raise ConfigError(
        f"{label} gives {type(value).__name__}; expected a world with tasks(split, count, seed) and "
        "make_env(task, seed)"
    )
