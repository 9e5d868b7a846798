"""Reads a function's signature: makes a JSON schema of it, and checks given arguments against it.

Tools use it to check what a model sends, and the registry to check the options of a world. It knows the types str, int,
float, bool, list, dict, Literal, and unions of them such as `X | None`.
"""

from __future__ import annotations

import inspect
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from turnwise.errors import ConfigError, DataError
from turnwise.runtime.suggest import did_you_mean

Json = dict[str, Any]

_SCALARS: Mapping[object, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_WORDS = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
}
_ARG_LINE = re.compile(r"\s*\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One argument of a function."""

    name: str
    annotation: Any
    is_required: bool
    default: Any = None
    description: str = ""

    @property
    def schema(self) -> Json:
        schema = annotation_to_schema(self.annotation)
        if self.description:
            schema["description"] = self.description
        if not self.is_required and isinstance(self.default, str | int | float | bool):
            schema["default"] = self.default
        return schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A function's arguments and the sentence that says what it does."""

    description: str
    parameters: tuple[Parameter, ...]

    @property
    def schema(self) -> Json:
        return {
            "type": "object",
            "properties": {parameter.name: parameter.schema for parameter in self.parameters},
            "required": [parameter.name for parameter in self.parameters if parameter.is_required],
            "additionalProperties": False,
        }


def read_signature(function: Callable[..., Any]) -> Signature:
    """Read the arguments of a function, or of a class's constructor: types, defaults and docstring."""
    hints = _read_hints(function)
    description, about = _read_docstring(inspect.getdoc(function) or "")
    parameters: list[Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self" or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        is_required = parameter.default is parameter.empty
        default = None if is_required else parameter.default
        annotation = hints.get(name, Any)
        parameters.append(
            Parameter(
                name=name,
                annotation=annotation,
                is_required=is_required,
                default=default,
                description=about.get(name, ""),
            )
        )
    return Signature(description=description, parameters=tuple(parameters))


def _read_hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except NameError:  # the annotation names something that only a type checker imports
        return {}


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the first paragraph as one line, and the text under `Args:` by argument name."""
    paragraphs, _, rest = text.partition("Args:")
    description = " ".join(paragraphs.strip().split("\n\n")[0].split())
    about: dict[str, str] = {}
    for line in rest.splitlines():
        found = _ARG_LINE.fullmatch(line)
        if found:
            about[found[1]] = found[2].strip()
        elif about and line.startswith("  ") and line.strip():
            about[list(about)[-1]] += " " + line.strip()
        elif line.strip() and about:
            break  # the next section
    return description, about


def annotation_to_schema(annotation: Any) -> Json:
    """The JSON schema of a type. `ConfigError` if JSON has no such type."""
    if annotation is Any:
        return {}
    if annotation is Path:
        return {"type": "string"}
    if annotation in _SCALARS:
        return {"type": _SCALARS[annotation]}
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [annotation_to_schema(arg) for arg in args]}
    if (origin or annotation) in (list, Sequence):
        return {"type": "array", **({"items": annotation_to_schema(args[0])} if args else {})}
    if (origin or annotation) in (dict, Mapping):
        if args and args[0] is not str:
            raise ConfigError(f"a dict with {args[0]} keys; JSON objects have str keys")
        return {"type": "object", **({"additionalProperties": annotation_to_schema(args[1])} if args else {})}
    expected = "str, int, float, bool, list, dict, Literal, or a union of them"
    raise ConfigError(f"{annotation!r} has no JSON schema; expected {expected}")


def match_arguments(
    parameters: Sequence[Parameter], given: Mapping[str, Any], noun: str = "argument"
) -> dict[str, Any]:
    """Check and convert the given arguments. A `DataError` says which one is wrong, and why."""
    known = {parameter.name: parameter for parameter in parameters}
    for name in given:
        if name not in known:
            expected = f"expected {', '.join(known)}" if known else "it takes none"
            raise DataError(f"unknown {noun} {name[:40]!r}{did_you_mean(name, known)}; {expected}")
    for parameter in parameters:
        if parameter.is_required and parameter.name not in given:
            raise DataError(f"{noun} {parameter.name!r} is missing; expected {describe_type(parameter.annotation)}")
    return {name: _convert(name, known[name].annotation, value) for name, value in given.items()}


def _convert(name: str, annotation: Any, value: Any) -> Any:
    converted = _fit(annotation, value)
    if converted is _MISFIT:
        raise DataError(f"{name}={_shorten(value)} does not fit; expected {describe_type(annotation)}")
    return converted


_MISFIT = object()


def _fit(annotation: Any, value: Any) -> Any:
    """Convert `value` to the annotated type, or return `_MISFIT`. As in JSON, 2.0 passes as int and 2 as float."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return value
    if origin is Literal:
        return value if any(type(arg) is type(value) and arg == value for arg in args) else _MISFIT
    if origin in (Union, types.UnionType):
        return next((fitted for arg in args if (fitted := _fit(arg, value)) is not _MISFIT), _MISFIT)
    if (origin or annotation) in (list, Sequence):
        return _fit_list(args, value)
    if (origin or annotation) in (dict, Mapping):
        return _fit_dict(args, value)
    return _fit_scalar(annotation, value)


def _fit_list(args: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, list | tuple):
        return _MISFIT
    items = cast(Sequence[Any], value)
    fitted = [_fit(args[0], item) for item in items] if args else list(items)
    return _MISFIT if any(item is _MISFIT for item in fitted) else fitted


def _fit_dict(args: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, Mapping):
        return _MISFIT
    items = cast(Mapping[Any, Any], value)
    if not all(isinstance(key, str) for key in items):
        return _MISFIT
    fitted = {key: _fit(args[1], item) if args else item for key, item in items.items()}
    return _MISFIT if any(item is _MISFIT for item in fitted.values()) else fitted


def _fit_scalar(annotation: Any, value: Any) -> Any:
    if isinstance(value, bool) and annotation in (int, float):
        return _MISFIT
    if annotation is float and isinstance(value, int | float):
        return float(value) if abs(value) < 1e300 and math.isfinite(value) else _MISFIT
    if annotation is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if annotation is Path and isinstance(value, str):
        return Path(value)
    return value if isinstance(value, annotation) else _MISFIT


def describe_type(annotation: Any) -> str:
    """A type in words: `a whole number`, `one of "red", "blue"`, `a list of text`."""
    if annotation is Any:
        return "any value"
    schema = annotation_to_schema(annotation)
    return _describe_schema(schema)


def _describe_schema(schema: Json) -> str:
    if not schema:
        return "any value"
    if "enum" in schema:
        return "one of " + ", ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_describe_schema(option) for option in schema["anyOf"])
    if schema["type"] == "array":
        return "a list" + (f" of {_describe_schema(schema['items'])}" if schema.get("items") else "")
    if schema["type"] == "object":
        return "an object"
    return _WORDS[schema["type"]]


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def check_fractions(options: object, *names: str) -> None:
    """Refuse the named attributes of `options` that are not between 0 and 1."""
    for name in names:
        if not 0 <= getattr(options, name) <= 1:
            raise ConfigError(f"{name}={getattr(options, name)}; expected 0 to 1")
