"""The base of every config section, and how a mistake in one is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from turnwise.errors import ConfigError
from turnwise.runtime.suggest import nearest


class Section(BaseModel):
    """Frozen and closed: an unknown key is an error, and so is a number that is not finite.

    A section is the config of one room. A room declares it once; the run's config, the command line and the docs all
    read its fields. Construction with a wrong value raises a ConfigError that names the field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)

    def __init__(self, /, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as cause:
            raise ConfigError("; ".join(explain(error) for error in cause.errors())) from None

    # Pydantic then does not call this __init__ for a section inside another one: the outermost reports all mistakes.
    __init__.__pydantic_base_init__ = True  # pyright: ignore[reportFunctionMemberAccess]

    def changed_options(self) -> list[str]:
        """Names of the options that are not at their defaults."""
        fields = type(self).model_fields.items()
        return [name for name, field in fields if getattr(self, name) != field.get_default(call_default_factory=True)]


def _one_or_more(given: object) -> object:
    return ((given,) if given else ()) if isinstance(given, str) else given


ONE_OR_MORE = BeforeValidator(_one_or_more)
"""For an option that takes several values: one text is a list of one, and an empty text is none. It is written
`Annotated[tuple[str, ...], ONE_OR_MORE]`."""


def explain(error: Mapping[str, Any]) -> str:
    """One mistake that pydantic found, as a sentence that begins with the option's name."""
    path = ".".join(str(part) for part in error["loc"])
    message = str(error["msg"])
    if error["type"] == "extra_forbidden":
        return f"{path} is not an option"
    if error["type"] == "value_error":
        message = message.removeprefix("Value error, ")
        return f"{path}: {message}" if path else message
    if error["type"] == "literal_error":
        choices = str(error["ctx"]["expected"]).replace(" or ", ", ").split(", ")
        near = nearest(str(error["input"]), [choice.strip("'") for choice in choices], cutoff=0.6)
        message += "" if near is None else f"; did you mean {near}?"
    return f"{path}={error['input']!r}: {message[0].lower()}{message[1:]}"
