"""The section `env` of a run's config."""

from __future__ import annotations

from pydantic import Field, JsonValue

from turnwise.runtime.section import Section


class EnvConfig(Section):
    """The world: where tasks and envs come from."""

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
        description="Level of the world's difficulty dial, from 0 (docs/flywheel.md); -1: as the options say.",
    )
    tasks: str = Field(
        default="",
        description="A file of tasks to play in place of the world's own draws, one JSON object per line "
        "(docs/flywheel.md); empty: the world draws.",
    )
