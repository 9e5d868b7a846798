"""Tools that a policy can call: `@tool` on functions or methods, and a `Toolbox` that describes, reads and runs them.

    @tool
    def add(a: int, b: int = 1) -> int:
        "Add two numbers."
        return a + b

    box = Toolbox(add)
    content, calls, problem = parse_tool_calls('<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>')
    await box.call(calls[0])        # Message(role="tool", name="add", content="3")

If the policy made a mistake, it gets a tool message that begins with `error:` and can try again. Such mistakes are: a
call that cannot be read, an unknown tool, arguments of the wrong type, and what the tool reports about its input
(`ToolError`, `ValueError`, `LookupError`, `ArithmeticError`, a missing file). Any other exception means that the tool
itself is broken: it is raised as `AttemptFailed`, which blames the tool, and the attempt is not scored.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast, overload

from turnwise.envs.schema import Json, Signature, match_arguments, read_signature
from turnwise.envs.sync import call_in_thread
from turnwise.errors import AttemptFailed, ConfigError, DataError, Party
from turnwise.runtime.pending_calls import PENDING_CALLS
from turnwise.runtime.raised_at import describe_error
from turnwise.runtime.suggest import did_you_mean
from turnwise.trajectory import Message, ToolCall

DEFAULT_TIMEOUT_S = 30.0

CALL_FORMAT = '<tool_call>{"name": "NAME", "arguments": {"KEY": VALUE}}</tool_call>'

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MARK = "__turnwise_tool__"

F = TypeVar("F", bound=Callable[..., Any])


class ToolError(Exception):
    """Raised by a tool to tell the policy what was wrong with its call."""


_POLICY_FAULTS = (
    ToolError,
    ValueError,
    LookupError,
    ArithmeticError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """What `@tool` read from a function."""

    name: str
    signature: Signature
    timeout_s: float

    @property
    def schema(self) -> Json:
        """The JSON schema in the form that chat templates and most APIs take."""
        function = {
            "name": self.name,
            "description": self.signature.description,
            "parameters": self.signature.schema,
        }
        return {"type": "function", "function": function}


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(*, name: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Callable[[F], F]: ...
def tool(
    function: F | None = None, /, *, name: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> F | Callable[[F], F]:
    """Mark a function or method as a tool; it stays the function it was.

    Args:
        name: The tool's name for the policy. The default is the function's name.
        timeout_s: A call that takes longer fails, and the tool is blamed, not the policy.

    >>> import turnwise as tw
    >>> @tw.tool
    ... def add(a: int, b: int) -> int:
    ...     '''Add two numbers.'''
    ...     return a + b
    >>> add(2, 3)
    5
    """

    def mark(marked: F) -> F:
        try:
            signature = read_signature(marked)
            _ = signature.schema
        except ConfigError as error:
            raise ConfigError(f"@tool on {marked.__qualname__}: {error}") from error
        setattr(marked, _MARK, ToolSpec(name=name or marked.__name__, signature=signature, timeout_s=timeout_s))
        return marked

    return mark if function is None else mark(function)


class ParsedReply(NamedTuple):
    """The parts of a reply: text, calls, and what could not be read. If there is a problem, there are no calls."""

    content: str
    calls: tuple[ToolCall, ...]
    problem: str | None


def parse_tool_calls(text: str) -> ParsedReply:
    """Find `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` blocks; the rest of the text is content."""
    pieces: list[str] = []
    calls: list[ToolCall] = []
    problem: str | None = None
    place = 0
    while (start := text.find(_OPEN, place)) >= 0:  # a regex would take very long on thousands of open tags
        pieces.append(text[place:start])
        end = text.find(_CLOSE, start)
        if end < 0:
            return ParsedReply("".join([*pieces, text[start:]]).strip(), (), f"a {_OPEN} without its {_CLOSE}")
        call = _read_call(text[start + len(_OPEN) : end])
        if isinstance(call, str):
            problem = problem or call
        else:
            calls.append(call)
        place = end + len(_CLOSE)
    content = "".join([*pieces, text[place:]]).strip()
    return ParsedReply(content, (), problem) if problem else ParsedReply(content, tuple(calls), None)


def read_calls(reply: Message) -> ParsedReply:
    """Read the calls in a reply's text; if there are none, take the reply's `tool_calls`."""
    parsed = parse_tool_calls(reply.content)
    return parsed if parsed.calls or parsed.problem else ParsedReply(parsed.content, reply.tool_calls, None)


def _read_call(block: str) -> ToolCall | str:
    """Return the call in one block, or a text that says what is wrong with it."""
    call = _read_object(block)
    if isinstance(call, str):
        return f"the tool call is {call}; expected {CALL_FORMAT}"
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not name:
        return f'the tool call has no "name"; expected {CALL_FORMAT}'
    if isinstance(arguments, str):  # some models write the arguments as a JSON string
        arguments = _read_object(arguments)
    if not isinstance(arguments, dict):
        return f'"arguments" of {name} is not an object; expected {CALL_FORMAT}'
    return ToolCall(name=name, arguments=cast(dict[str, Any], arguments))


def _read_object(text: str) -> dict[str, Any] | str:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        return f"not JSON ({reason})"
    return cast(dict[str, Any], value) if isinstance(value, dict) else "not a JSON object"


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def format_tool_call(name: str, /, **arguments: object) -> str:
    """Write a call as text that `parse_tool_calls` can read, for demonstrations and tests."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Toolbox:
    """A set of tools: functions marked with `@tool`, or objects that have such methods."""

    def __init__(self, *sources: object) -> None:
        self._tools: dict[str, tuple[ToolSpec, Callable[..., Any]]] = {}
        for source in sources:
            found = _marked(source)
            if not found:
                raise ConfigError(f"no @tool found on {source!r:.60}; mark the functions that the policy may call")
            for function in found:
                spec = cast(ToolSpec, getattr(function, _MARK))
                if spec.name in self._tools:
                    raise ConfigError(f"two tools named {spec.name!r}; give one of them @tool(name=...)")
                self._tools[spec.name] = (spec, function)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(spec for spec, _ in self._tools.values())

    def schemas(self) -> list[Json]:
        """One JSON schema per tool, for chat templates that show tools."""
        return [spec.schema for spec in self.specs]

    def describe(self) -> str:
        """A short text about the tools and how to call them, for a system prompt."""
        lines = [_describe(spec) for spec in self.specs]
        return "\n".join(["Tools:", *lines, "Call a tool like this:", CALL_FORMAT])

    def read(self, reply: Message) -> ParsedReply:
        """Read the calls of a reply, as `read_calls` does."""
        return read_calls(reply)

    async def call(self, call: ToolCall) -> Message:
        """Run one call. The answer is a tool message, also when the policy made a mistake."""
        try:
            return Message(role="tool", name=call.name, content=await self._run(call))
        except _POLICY_FAULTS as error:
            return Message(role="tool", name=call.name, content=f"error: {_describe_error(error)}")

    def call_now(self, call: ToolCall) -> Message:
        """Run one call in this thread, without a deadline: for plain tools that return at once, such as a game's."""
        try:
            spec, function, arguments = self._find(call)
            try:
                result = function(**arguments)
            except _POLICY_FAULTS:
                raise
            except Exception as cause:
                raise AttemptFailed(Party.TOOL, f"{spec.name}: {describe_error(cause)}") from cause
            return Message(role="tool", name=call.name, content=_result_to_text(spec.name, result))
        except _POLICY_FAULTS as error:
            return Message(role="tool", name=call.name, content=f"error: {_describe_error(error)}")

    async def call_all(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Run calls in order, one after the other, because a call may depend on an earlier one."""
        return [await self.call(call) for call in calls]

    def _find(self, call: ToolCall) -> tuple[ToolSpec, Callable[..., Any], dict[str, Any]]:
        """The tool of a call, and its arguments in the types that it takes."""
        if call.name not in self._tools:
            near = did_you_mean(call.name, self._tools)
            raise ToolError(f"no tool {call.name[:40]!r}{near}; the tools are {', '.join(self._tools)}")
        spec, function = self._tools[call.name]
        try:
            return spec, function, match_arguments(spec.signature.parameters, call.arguments)
        except DataError as error:
            raise ToolError(f"{spec.name}: {error}") from error

    async def _run(self, call: ToolCall) -> str:
        spec, function, arguments = self._find(call)
        deadline = asyncio.timeout(spec.timeout_s)
        try:
            with PENDING_CALLS.listed("tool", spec.name, spec.timeout_s):
                async with deadline:
                    result = await _await_call(function, arguments)
        except (*_POLICY_FAULTS, AttemptFailed):
            raise
        except TimeoutError as cause:
            late = f"no answer within {spec.timeout_s:g} s" if deadline.expired() else describe_error(cause)
            raise AttemptFailed(Party.TOOL, f"{spec.name}: {late}") from cause
        except Exception as cause:
            raise AttemptFailed(Party.TOOL, f"{spec.name}: {describe_error(cause)}") from cause
        return _result_to_text(spec.name, result)


def _marked(source: object) -> list[Callable[..., Any]]:
    if callable(source) and hasattr(source, _MARK):
        return [source]
    names = [name for name in dir(type(source)) if hasattr(getattr(type(source), name), _MARK)]
    return [getattr(source, name) for name in names]


async def _await_call(function: Callable[..., Any], arguments: dict[str, Any]) -> object:
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await call_in_thread(lambda: function(**arguments))


def _result_to_text(name: str, result: object) -> str:
    """Return text as it is, and anything else as JSON."""
    try:
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as cause:
        raise AttemptFailed(Party.TOOL, f"{name} returned {result!r:.60}, which is neither text nor JSON") from cause


def _describe_error(error: BaseException) -> str:
    """Add the type's name to Python's own errors, because `KeyError('x')` prints as just `'x'`."""
    text = str(error)
    if isinstance(error, ToolError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _describe(spec: ToolSpec) -> str:
    arguments = [
        f"{parameter.name}: {_type_name(parameter.schema)}"
        + ("" if parameter.is_required else f" = {parameter.default!r}")
        for parameter in spec.signature.parameters
    ]
    return f"- {spec.name}({', '.join(arguments)}): {spec.signature.description}"


def _type_name(schema: Json) -> str:
    if "enum" in schema:
        return "|".join(str(value) for value in schema["enum"])
    if "anyOf" in schema:
        return "|".join(_type_name(option) for option in schema["anyOf"])
    return str(schema.get("type", "any"))
