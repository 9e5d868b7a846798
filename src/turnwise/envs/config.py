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
