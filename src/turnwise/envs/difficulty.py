"""The difficulty dial: a world's levels, from the easiest to the hardest, as sets of its own options.

    class KeyDoor:
        difficulties: ClassVar[Levels] = ({"num_rooms": 1}, {"num_rooms": 2}, {"num_rooms": 4})

`env.difficulty=1` sets the options of level 1. A world without `difficulties` has no dial. Where the levels depend on
other options, a static method `levels_for` returns those of a world with the options that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.errors import ConfigError

Levels = tuple[Mapping[str, Any], ...]
NO_OPTIONS: Mapping[str, Any] = {}


def levels_of(target: object, given: Mapping[str, Any] = NO_OPTIONS) -> Levels:
    """The levels of a world, or of the class that makes one, with the user's options; empty if it has no dial."""
    levels_for: Any = getattr(target, "levels_for", None)
    found: Any = levels_for(given) if levels_for is not None else getattr(target, "difficulties", ())
    return tuple(found)


def level_options(target: object, level: int, given: Mapping[str, Any], label: str) -> dict[str, Any]:
    """The options of a level together with the user's, which may not say the same thing twice."""
    levels = levels_of(target, given)
    if not levels:
        raise ConfigError(
            f"env.difficulty={level}: {label} has no levels; leave it out, set the world's own options, or give the "
            "class an attribute `difficulties`, a tuple of options from the easiest level to the hardest"
        )
    if not 0 <= level < len(levels):
        raise ConfigError(f"env.difficulty={level}: {label} has the levels 0 to {len(levels) - 1}")
    both = [name for name in levels[level] if name in given]
    if both:
        raise ConfigError(
            f"env.options.{both[0]} and env.difficulty={level} both set {both[0]} of {label}; leave one of them out"
        )
    return {**given, **levels[level]}
