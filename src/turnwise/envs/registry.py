"""Worlds by name: the shipped ones, and anybody's as `module:Class` or `path/to/file.py:Class`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from turnwise.envs.base import World
from turnwise.envs.schema import Parameter, did_you_mean
from turnwise.envs.worlds import as_world, world_parameters
from turnwise.errors import ConfigError

SHIPPED_WORLDS: Mapping[str, str] = {
    "calculator": "turnwise.envs.library.calculator:Calculator",
    "dialogue": "turnwise.envs.library.dialogue:Dialogue",
    "gsm8k_multi_turn": "turnwise.envs.library.gsm8k_multi_turn:Gsm8kMultiTurn",
    "guess_number": "turnwise.envs.library.guess_number:GuessNumber",
    "key_door": "turnwise.envs.library.key_door:KeyDoor",
}


def world_names() -> tuple[str, ...]:
    return tuple(SHIPPED_WORLDS)


def get_world(name: str, /, **options: Any) -> World:
    """The world called `name`, with its options checked."""
    return as_world(load_target(name), options, label=name)


def world_options(name: str) -> tuple[Parameter, ...]:
    """The options of a world, with types and defaults; empty when it takes any."""
    return world_parameters(load_target(name)) or ()


def load_target(name: str) -> Any:
    """What `name` stands for, imported but not yet made: usually a class."""
    path, colon, attribute = SHIPPED_WORLDS.get(name, name).rpartition(":")
    if not colon:
        near = did_you_mean(name, SHIPPED_WORLDS)
        raise ConfigError(
            f"no world {name!r}{near}; the shipped ones are {', '.join(SHIPPED_WORLDS)}; "
            "one of your own is module:Class or path/to/file.py:Class"
        )
    module = _load_file(Path(path)) if path.endswith(".py") else _load_module(path)
    if not attribute or not hasattr(module, attribute):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ConfigError(f"{path} has no {attribute!r}{did_you_mean(attribute, own)}")
    return getattr(module, attribute)


def _load_module(name: str) -> ModuleType:
    """Import a module; the current folder counts, as it does for `python -m`."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as cause:
        if cause.name is None or not f"{name}.".startswith(f"{cause.name}."):
            raise  # the module is there; something that it imports is not
        raise ConfigError(f"no module {name!r}; looked on Python's path and in {here}") from cause


def _load_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"no file {path}; expected path/to/file.py:Class")
    name = f"turnwise_user_{path.stem}_{hashlib.sha256(str(path).encode('utf-8')).hexdigest()[:8]}"
    known = sys.modules.get(name)
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
