"""The difficulty dial: a world's levels, from the easiest to the hardest, as sets of its own options.

    class KeyDoor:
        difficulties: ClassVar[Levels] = ({"num_rooms": 1}, {"num_rooms": 2}, {"num_rooms": 4})

`env.difficulty=1` sets the options of level 1. A world without `difficulties` has no dial.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.errors import ConfigError

Levels = tuple[Mapping[str, Any], ...]


def levels_of(target: object) -> Levels:
    """The levels of a world, or of the class that makes one; empty if it has no dial."""
    found: Any = getattr(target, "difficulties", ())
    return tuple(found)


def level_options(target: object, level: int, given: Mapping[str, Any], label: str) -> dict[str, Any]:
    """The options of a level together with the user's, which may not say the same thing twice."""
    levels = levels_of(target)
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
