"""The section `env` of a run's config."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self, cast

from pydantic import Field, JsonValue, field_validator, model_validator

from turnwise.runtime.section import Section

MIX = "mix"
"""What `env.name` says of a run in several worlds."""
CURRICULUM_OPTIONS = ("curriculum_target", "curriculum_window", "curriculum_explore")


class OneWorld(Section):
    """What a world is made of."""

    name: str = Field(
        default="guess_number",
        min_length=1,
        description="A world of the library, `module:Class` for your own, or `prefix:name` of another library.",
    )
    options: dict[str, JsonValue] = Field(
        default_factory=dict, description="The world's own options, such as `env.options.high=16`."
    )
    difficulty: int = Field(
        default=-1,
        ge=-1,
        description="Level of the world's difficulty dial, from 0 (docs/flywheel.md); -1: as the options say. With a "
        "curriculum: the level to become good at; -1: all of them.",
    )
    tasks: str = Field(
        default="",
        description="A file of tasks to play in place of the world's own draws, one JSON object per line "
        "(docs/flywheel.md); empty: the world draws.",
    )
    curriculum: bool = Field(
        default=False,
        description="Choose the level of each training task by how often attempts at it succeed (docs/mix.md). "
        "Held-out tasks stay as they are.",
    )
    curriculum_target: float = Field(
        default=0.5, gt=0, lt=1, description="With a curriculum: levels near this success rate are the likeliest."
    )
    curriculum_window: int = Field(
        default=8, ge=1, description="With a curriculum: groups of a level, its last ones, that make its success rate."
    )
    curriculum_explore: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="With a curriculum: share of the groups whose level is drawn from all levels alike.",
    )

    @model_validator(mode="after")
    def _curriculum_fits(self) -> Self:
        unread = [name for name in CURRICULUM_OPTIONS if name in self.changed_options()]
        if unread and not self.curriculum:
            raise ValueError(f"{unread[0]} is not read without curriculum=true; leave it out")
        if self.curriculum and self.tasks:
            raise ValueError(f"tasks={self.tasks} says which tasks are played, and curriculum chooses them; leave one")
        return self


class MixedWorld(OneWorld):
    """A member of a mix."""

    share: float = Field(default=1.0, gt=0, description="How many groups it gets, against the other members' shares.")


class EnvConfig(OneWorld):
    """The world: where tasks and envs come from."""

    mix: dict[str, MixedWorld] = Field(
        default_factory=dict,
        description="Several worlds in one run, by name, each with `share` and the options above (docs/mix.md): "
        "`env.mix=guess_number=2,key_door=1`, or `env.mix.key_door.difficulty=1`.",
    )

    @field_validator("mix", mode="before")
    @classmethod
    def _read_mix(cls, given: object) -> object:
        return read_mix(given)

    @model_validator(mode="before")
    @classmethod
    def _name_the_mix(cls, given: Any) -> Any:
        held = cast(dict[str, Any], given) if isinstance(given, dict) else {}
        return {"name": MIX, **held} if held.get("mix") else cast(object, given)

    @model_validator(mode="after")
    def _one_world_or_a_mix(self) -> Self:
        if not self.mix:
            if self.name == MIX:
                raise ValueError("name=mix has no worlds; say which: env.mix=guess_number=2,key_door=1")
            return self
        unread = [name for name in self.changed_options() if name not in ("name", "mix")]
        if self.name != MIX:
            raise ValueError(
                f"name={self.name} beside mix={','.join(self.mix)}: both are worlds; leave one of them out"
            )
        if unread:
            raise ValueError(f"{unread[0]} is not read beside mix; set it for a member: env.mix.NAME.{unread[0]}=...")
        if len(self.mix) < 2:
            (only,) = self.mix.values()
            raise ValueError(f"mix has one world, {only.name}; expected two or more, or env={only.name}")
        for name in self.mix:
            if not re.fullmatch(r"\w+", name):
                raise ValueError(
                    f"mix: {name!r} cannot be a member's name; expected letters, digits and _, and the world as its "
                    f"`name`: env.mix.mine.name={name}"
                )
        return self

    @property
    def has_curriculum(self) -> bool:
        """Whether some world of the run chooses its levels."""
        return self.curriculum or any(member.curriculum for member in self.mix.values())


def read_mix(given: object) -> dict[str, object]:
    """Names, names with shares, or names with sections, as sections. A member is the world of its name unless it says
    which. Raises ValueError for anything else."""
    if isinstance(given, str):
        given = _split_names(given)
    if isinstance(given, list | tuple):
        names = [str(name) for name in cast(list[object], given)]
        if len(set(names)) < len(names):
            raise ValueError("a name comes twice; give the members names: {easy: {name: key_door, difficulty: 0}}")
        given = dict.fromkeys(names)
    if not isinstance(given, Mapping):
        raise ValueError(f"{given!r}; expected names, or names with shares: guess_number=2,key_door=1")
    return {str(name): _member(str(name), held) for name, held in cast(Mapping[object, Any], given).items()}


def _split_names(text: str) -> dict[str, object]:
    """`guess_number=2, key_door` as names with shares."""
    found: dict[str, object] = {}
    for entry in (part.strip() for part in text.split(",")):
        name, separator, share = (part.strip() for part in entry.partition("="))
        if not name or (separator and not share):
            raise ValueError(f"{entry!r} is no member; expected NAME or NAME=SHARE, as in guess_number=2,key_door=1")
        if name in found:
            raise ValueError(f"{name} comes twice; give the members names of their own, in a file or with env.mix.NAME")
        found[name] = {"share": share} if separator else None
    return found


def _member(name: str, given: object) -> object:
    """A member's section: a bare number is its share, nothing is a share of 1, and its world has its name."""
    if given is None or isinstance(given, int | float):
        given = {} if given is None else {"share": given}
    return {"name": name, **cast(dict[str, Any], given)} if isinstance(given, dict) else given
