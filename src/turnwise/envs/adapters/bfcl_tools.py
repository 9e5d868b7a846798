"""The tools of a BFCL task: objects of the package that hold the state, called by name, and the calls of the answer."""

from __future__ import annotations

import ast
import copy
import decimal
import functools
import hashlib
import importlib
import importlib.resources
import json
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from turnwise.errors import DataError
from turnwise.runtime.suggest import did_you_mean
from turnwise.trajectory import ToolCall

PACKAGE = "bfcl_eval"
_MATH = "MathAPI"
_MAX_MATH = 1000
"""Largest exponent and number of digits: larger ones would compute for hours."""
_NO_STATE = ("_last_modified", "parent")
_MATH_LOCK = threading.Lock()
"""The mathematical tools set the precision of the whole process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDoc:
    """What the package says about one tool."""

    name: str
    owner: str
    """The class whose object has it."""
    description: str
    parameters: Mapping[str, Mapping[str, Any]]
    required: tuple[str, ...]

    def to_text(self) -> str:
        arguments = [
            f"{name}: {about.get('type', 'any')}" + ("" if name in self.required else " (optional)")
            for name, about in self.parameters.items()
        ]
        return f"- {self.name}({', '.join(arguments)}): {self.description}"


@functools.cache
def read_docs(owner: str) -> tuple[ToolDoc, ...]:
    """The tools of one class, in the package's order."""
    config = importlib.import_module(f"{PACKAGE}.constants.executable_backend_config")
    file = importlib.resources.files(PACKAGE) / "data" / "multi_turn_func_doc"
    text = (file / config.MULTI_TURN_FUNC_DOC_FILE_MAPPING[owner]).read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines() if line.strip()]
    return tuple(
        ToolDoc(
            name=row["name"],
            owner=owner,
            description=" ".join(row["description"].rpartition("Tool description:")[2].split()),
            parameters=row["parameters"].get("properties", {}),
            required=tuple(row["parameters"].get("required", ())),
        )
        for row in rows
    )


def read_gold_call(text: str, docs: Mapping[str, ToolDoc]) -> ToolCall:
    """A call of the answer, `mkdir(dir_name='temp')`, as a tool call. Arguments without a name get theirs."""
    node = ast.parse(text.strip(), mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise DataError(f"the answer has {text!r:.80}; expected a call such as mkdir(dir_name='temp')")
    name = node.func.id
    arguments = dict(zip(docs[name].parameters, (ast.literal_eval(value) for value in node.args), strict=False))
    arguments |= {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}
    return ToolCall(name=name, arguments=arguments)


class StatefulTools:
    """The objects of one attempt. A failed call is an answer that begins with `Error`, as in the benchmark."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        config = importlib.import_module(f"{PACKAGE}.constants.executable_backend_config")
        is_long = "long_context" in entry["id"]
        self.objects: dict[str, Any] = {}
        self.docs: dict[str, ToolDoc] = {}
        for owner in entry["involved_classes"]:
            made = getattr(importlib.import_module(config.CLASS_FILE_PATH_MAPPING[owner]), owner)()
            if owner not in config.STATELESS_CLASSES:
                made._load_scenario(copy.deepcopy(entry["initial_config"].get(owner, {})), long_context=is_long)
            self.objects[owner] = made
            self.docs |= {doc.name: doc for doc in read_docs(owner)}

    def call(self, call: ToolCall, shown: Sequence[str]) -> str:
        """Run a call of one of the shown tools."""
        if call.name not in shown:
            return f"Error: no tool {call.name[:40]!r}{did_you_mean(call.name, shown)}"
        doc = self.docs[call.name]
        unknown = [name for name in call.arguments if name not in doc.parameters]
        missing = [name for name in doc.required if name not in call.arguments]
        if unknown or missing:
            takes = ", ".join(doc.parameters) or "no arguments"
            return f"Error: {doc.name} takes {takes}; check {(unknown + missing)[0]!r}"
        method = getattr(self.objects[doc.owner], doc.name)
        try:
            result = _do_math(method, call.arguments) if doc.owner == _MATH else method(**copy.deepcopy(call.arguments))
            return _to_text(result)
        except Exception as error:  # noqa: BLE001 - the tools check little, so most of these are the policy's arguments
            return f"Error: {type(error).__name__}: {error}"

    def copy(self) -> StatefulTools:
        twin = object.__new__(StatefulTools)
        twin.objects, twin.docs = copy.deepcopy(self.objects), self.docs
        return twin

    def key(self, more: Sequence[int | str]) -> str:
        """A name of the whole state, and of what else an attempt remembers."""
        state = {owner: _to_plain(made) for owner, made in sorted(self.objects.items())}
        return hashlib.sha256(json.dumps([state, list(more)], sort_keys=True).encode()).hexdigest()[:24]


def _to_plain(value: Any) -> Any:
    """The state of an object of the package as JSON. Times of change come from the clock and decide nothing."""
    if isinstance(value, random.Random):
        return hashlib.sha256(repr(value.getstate()).encode()).hexdigest()[:16]
    if isinstance(value, dict):
        return {str(name): _to_plain(one) for name, one in cast(dict[object, object], value).items()}
    if isinstance(value, list | tuple):
        return [_to_plain(one) for one in cast(Sequence[object], value)]
    if not hasattr(value, "__dict__"):
        return repr(value)
    attributes = cast(dict[str, object], vars(value))
    held = {name: _to_plain(one) for name, one in attributes.items() if name not in _NO_STATE}
    return {**held, "path": _path_of(value)}


def _path_of(folder: Any) -> list[str]:
    """The names of a folder and of those that it is in; empty for anything else."""
    names: list[str] = []
    while hasattr(folder, "parent"):
        names.append(str(folder.name))
        folder = folder.parent
    return names


def _do_math(method: Any, arguments: Mapping[str, Any]) -> Any:
    for name in ("exponent", "precision"):
        value = arguments.get(name, 0)
        if isinstance(value, int | float) and abs(value) > _MAX_MATH:
            raise ValueError(f"{name}={value} is too large; expected at most {_MAX_MATH}")
    with _MATH_LOCK, decimal.localcontext():
        return method(**arguments)


def _to_text(result: Any) -> str:
    """What the benchmark shows: text as it is, an object as JSON."""
    if not isinstance(result, dict):
        return str(result)
    try:
        return json.dumps(result)
    except (TypeError, ValueError):
        return str(cast(object, result))  # some hold objects of their own
