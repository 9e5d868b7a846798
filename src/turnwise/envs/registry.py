"""Finds worlds by name: a shipped one, your own as `module:Class`, or another library's as `prefix:name`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from turnwise.envs.base import World
from turnwise.envs.difficulty import levels_of
from turnwise.envs.schema import Parameter
from turnwise.envs.worlds import as_world, world_parameters
from turnwise.errors import ConfigError
from turnwise.runtime.import_path import load_attribute
from turnwise.runtime.suggest import did_you_mean

SHIPPED_WORLDS: Mapping[str, str] = {
    "bargain": "turnwise.envs.library.bargain:Bargain",
    "browser": "turnwise.envs.library.browser:BrowserWorld",
    "calculator": "turnwise.envs.library.calculator:Calculator",
    "code": "turnwise.envs.library.code:Code",
    "customer_service": "turnwise.envs.library.customer_service:CustomerService",
    "dialogue": "turnwise.envs.library.dialogue:DialogueWorld",
    "gsm8k_multi_turn": "turnwise.envs.library.gsm8k_multi_turn:Gsm8kMultiTurn",
    "guess_number": "turnwise.envs.library.guess_number:GuessNumber",
    "key_door": "turnwise.envs.library.key_door:KeyDoor",
    "negotiate": "turnwise.envs.library.negotiate:Negotiate",
    "phone": "turnwise.envs.library.phone:Phone",
    "swe": "turnwise.envs.library.swe:Swe",
    "text_to_sql": "turnwise.envs.library.text_to_sql:TextToSql",
    "tic_tac_toe": "turnwise.envs.library.tic_tac_toe:TicTacToe",
    "twenty_questions": "turnwise.envs.library.twenty_questions:TwentyQuestions",
    "search": "turnwise.envs.library.search:Search",
    "repository": "turnwise.envs.library.repository:Repository",
    "household": "turnwise.envs.library.household:Household",
    "workflow": "turnwise.envs.library.workflow:Workflow",
    "workspace": "turnwise.envs.library.workspace:Workspace",
}

ADAPTERS: Mapping[str, str] = {
    "agentdojo": "turnwise.envs.adapters.agentdojo:AgentDojoWorld",
    "bfcl": "turnwise.envs.adapters.bfcl:BfclWorld",
    "chat": "turnwise.envs.adapters.chat:ChatWorld",
    "gymnasium": "turnwise.envs.adapters.gymnasium:GymnasiumWorld",
    "openenv": "turnwise.envs.adapters.openenv:OpenEnvWorld",
    "reasoning_gym": "turnwise.envs.adapters.reasoning_gym:ReasoningGymWorld",
    "scienceworld": "turnwise.envs.adapters.scienceworld:ScienceWorldWorld",
    "served": "turnwise.envs.remote.client:RemoteWorld",
    "skyrl_gym": "turnwise.envs.adapters.skyrl_gym:SkyRLGymWorld",
    "tau2": "turnwise.envs.adapters.tau2:Tau2World",
    "textarena": "turnwise.envs.adapters.textarena:TextArenaWorld",
    "textworld": "turnwise.envs.adapters.textworld:TextWorldWorld",
    "textworld_express": "turnwise.envs.adapters.textworld_express:TextWorldExpressWorld",
    "verifiers": "turnwise.envs.adapters.verifiers:VerifiersWorld",
    "verifiers_classic": "turnwise.envs.adapters.verifiers_classic:ClassicVerifiersWorld",
}
"""Adapters for other libraries and for data, by prefix. `prefix:rest` passes `rest`, then the options, to the class."""

_PAGES = "docs/adapters/index.md"
PYTHON_PREFIX = "python:"
"""Prefix of the name of a world that was passed to a run as a Python object. Such a name cannot be looked up."""


def world_names() -> tuple[str, ...]:
    return tuple(SHIPPED_WORLDS)


def get_world(name: str, /, **options: Any) -> World:
    """Make the world called `name`, after checking its options."""
    return as_world(load_target(name), options, label=name)


def world_options(name: str) -> tuple[Parameter, ...]:
    """The options of a world, with types and defaults. Empty if it takes any option."""
    return world_parameters(load_target(name)) or ()


def load_target(name: str) -> Any:
    """Import what `name` stands for, usually a class, without calling it."""
    if name.startswith(PYTHON_PREFIX):
        raise ConfigError(
            f"{name} was a Python object of the process that started the run; pass it again, as "
            f"env={name.removeprefix(PYTHON_PREFIX)}, to turnwise.Run.resume or turnwise.eval"
        )
    prefix, colon, rest = name.partition(":")
    if colon and prefix in ADAPTERS:
        return _bind(load_attribute(ADAPTERS[prefix]), rest, name)
    target = SHIPPED_WORLDS.get(name, name)
    if name in ADAPTERS:
        raise ConfigError(f"world {name!r} is missing the name after the colon; expected {name}:NAME ({_PAGES})")
    if ":" not in target:
        near = did_you_mean(name, [*SHIPPED_WORLDS, *ADAPTERS])
        raise ConfigError(
            f"no world {name!r}{near or '.'} The shipped ones are {', '.join(sorted(SHIPPED_WORLDS))}; "
            "one of your own is module:Class or path/to/file.py:Class; "
            f"one of another library is {', '.join(f'{prefix}:...' for prefix in ADAPTERS)}"
        )
    return load_attribute(target)


def _bind(world_class: type, rest: str, name: str) -> Callable[..., World]:
    """The adapter's class with its first argument filled in. The other arguments are the world's options."""
    first, *options = inspect.signature(world_class).parameters.values()
    if not rest:
        raise ConfigError(f"world {name!r} is missing its {first.name}; expected {name}NAME ({_PAGES})")

    def make(**options: Any) -> World:
        return world_class(rest, **options)

    hints = get_type_hints(world_class.__init__)
    make.__name__, make.__doc__ = world_class.__name__, world_class.__init__.__doc__
    make.__annotations__ = {option.name: hints[option.name] for option in options}
    vars(make)["__signature__"] = inspect.Signature(options)
    vars(make)["difficulties"] = levels_of(world_class)
    return make
