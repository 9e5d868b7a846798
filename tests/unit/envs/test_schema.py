from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from turnwise.envs.schema import (
    Parameter,
    annotation_to_schema,
    describe_type,
    match_arguments,
    read_signature,
)
from turnwise.errors import ConfigError, DataError
from turnwise.runtime.suggest import did_you_mean


def search(query: str, limit: int = 3, kind: Literal["web", "news"] = "web", since: str | None = None) -> str:
    """Search for pages,
    newest first.

    A second paragraph.

    Args:
        query: What to look for,
            in a few words.
        limit (int): How many at most.

    Returns:
        text: pages
    """
    return f"{query}{limit}{kind}{since}"


def test_signature_and_docstring_become_a_schema() -> None:
    signature = read_signature(search)
    assert signature.description == "Search for pages, newest first."
    assert signature.schema == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for, in a few words."},
            "limit": {"type": "integer", "description": "How many at most.", "default": 3},
            "kind": {"enum": ["web", "news"], "default": "web"},
            "since": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["query"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (bool, {"type": "boolean"}),
        (float, {"type": "number"}),
        (list, {"type": "array"}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (Optional[int], {"anyOf": [{"type": "integer"}, {"type": "null"}]}),  # noqa: UP045 - the old spelling too
        (Path, {"type": "string"}),
        (Any, {}),
    ],
)
def test_types_become_schemas(annotation: Any, schema: dict[str, Any]) -> None:
    assert annotation_to_schema(annotation) == schema


@pytest.mark.parametrize("annotation", [set, bytes, dict[int, str], list[bytes]])
def test_a_type_that_json_does_not_have_is_refused(annotation: Any) -> None:
    with pytest.raises(ConfigError):
        annotation_to_schema(annotation)


def fit(annotation: Any, value: Any) -> Any:
    return match_arguments([Parameter(name="x", annotation=annotation, is_required=True)], {"x": value})["x"]


@pytest.mark.parametrize(
    ("annotation", "value", "fitted"),
    [
        (int, 3, 3),
        (int, 3.0, 3),
        (float, 3, 3.0),
        (str, "3", "3"),
        (bool, True, True),
        (int | None, None, None),
        (int | str, "x", "x"),
        (list[int], [1, 2.0], [1, 2]),
        (dict[str, int], {"a": 1}, {"a": 1}),
        (Literal["red", 2], 2, 2),
        (Path, "a/b", Path("a/b")),
        (Any, object, object),
    ],
)
def test_values_that_fit_are_converted(annotation: Any, value: Any, fitted: Any) -> None:
    result = fit(annotation, value)
    assert result == fitted
    assert type(result) is type(fitted)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, "3"),
        (int, 3.5),
        (int, True),
        (float, False),
        (float, float("nan")),
        (str, 3),
        (bool, 1),
        (list[int], [1, "x"]),
        (list[int], "12"),
        (dict[str, int], {1: 1}),
        (dict[str, int], [1]),
        (Literal["red"], "blue"),
        (int | None, "x"),
    ],
)
def test_values_that_do_not_fit_are_refused(annotation: Any, value: Any) -> None:
    with pytest.raises(DataError, match=r"x=.* does not fit; expected "):
        fit(annotation, value)


def test_missing_and_unknown_arguments_are_named() -> None:
    parameters = read_signature(search).parameters
    with pytest.raises(DataError, match="argument 'query' is missing; expected text"):
        match_arguments(parameters, {})
    with pytest.raises(DataError, match="unknown argument 'querry'; did you mean 'query'"):
        match_arguments(parameters, {"querry": "x"})
    with pytest.raises(DataError, match="it takes none"):
        match_arguments((), {"x": 1})


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int | None, "a whole number or null"),
        (Literal["a", 1], 'one of "a", 1'),
        (list[str], "a list of text"),
        (dict[str, int], "an object"),
        (Any, "any value"),
    ],
)
def test_types_in_words(annotation: Any, words: str) -> None:
    assert describe_type(annotation) == words


def test_names_that_only_a_type_checker_knows_are_any() -> None:
    def uses_it(x: NoSuchType) -> None: ...  # noqa: F821 # pyright: ignore[reportUndefinedVariable]

    assert read_signature(uses_it).parameters[0].annotation is Any


def test_nothing_near_is_not_suggested() -> None:
    assert did_you_mean("zzz", ["apple"]) == ""
    assert did_you_mean("aple", ["apple"]) == "; did you mean 'apple'?"
