"""Turns messages and tools of OpenAI clients into what our renderers take, and replies back into OpenAI's form.

Tools are described in the system message, in the words of `turnwise.envs.tools`, and calls are the `<tool_call>`
blocks that its worlds use. So a policy that learned to use tools in a world can use them here, and the other way round.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from turnwise.envs.chat_api.bodies import MessageBody, ToolBody, read_arguments
from turnwise.envs.tools import CALL_FORMAT, parse_tool_calls
from turnwise.errors import DataError
from turnwise.trajectory import Message, ToolCall

MAX_CALL_TEXT = 100_000
"""Characters of one tool's schema that are shown to the model."""


def read_messages(bodies: Sequence[MessageBody]) -> list[Message]:
    """The messages. An assistant's tool calls are kept apart from its content (see `with_call_text`)."""
    names: dict[str, str] = {}
    messages: list[Message] = []
    for index, body in enumerate(bodies):
        calls = tuple(
            ToolCall(name=call.function.name, arguments=read_arguments(call), id=call.id)
            for call in body.tool_calls or ()
        )
        if calls and body.role != "assistant":
            raise DataError(f"messages.{index}: tool_calls are the assistant's; the role is {body.role}")
        names.update({call.id: call.name for call in calls})
        if body.role == "assistant":
            messages.append(Message(role="assistant", content=_text(body, index), tool_calls=calls))
        elif body.role == "tool":
            name = body.name or names.get(body.tool_call_id or "")
            messages.append(Message(role="tool", content=_text(body, index), name=name))
        else:
            messages.append(Message(role="user" if body.role == "user" else "system", content=_text(body, index)))
    return messages


def _text(body: MessageBody, index: int) -> str:
    if body.content is None:
        if body.role != "assistant":
            raise DataError(f"messages.{index}: a {body.role} message without content")
        return ""
    if isinstance(body.content, str):
        return body.content
    for part in body.content:
        if part.type != "text" or part.text is None:
            raise DataError(f"messages.{index}: content of type {part.type!r} is not supported; send text")
    return "".join(part.text or "" for part in body.content)


def with_tools(messages: Sequence[Message], tools: Sequence[ToolBody]) -> list[Message]:
    """The same conversation; the end of its system message describes the tools."""
    text = describe_tools(tools)
    if messages and messages[0].role == "system":
        return [replace(messages[0], content=f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [Message(role="system", content=text), *messages]


def describe_tools(tools: Sequence[ToolBody]) -> str:
    try:
        lines = [_describe(tool) for tool in tools]
    except (RecursionError, ValueError) as cause:
        raise DataError("a tool's parameters cannot be shown to the model: they nest too deep") from cause
    return "\n".join(["Tools:", *lines, "Call a tool like this:", CALL_FORMAT])


def _describe(tool: ToolBody) -> str:
    function = tool.function
    schema = function.parameters or {}
    properties: Any = schema.get("properties") or {}
    required = schema.get("required") or ()
    if not isinstance(properties, dict):
        raise DataError(f"tool {function.name}: parameters.properties is not an object")
    arguments = [
        f"{name}: {_type_name(inner)}" + _default(inner, is_required=name in required)
        for name, inner in cast(dict[str, Any], properties).items()
    ]
    line = f"- {function.name}({', '.join(arguments)}): {function.description or ''}".rstrip()
    if len(line) > MAX_CALL_TEXT:
        raise DataError(f"tool {function.name}: its schema is too long to be shown to the model")
    return line


def _default(schema: Any, *, is_required: bool) -> str:
    if is_required:
        return ""
    return f" = {schema['default']!r}" if isinstance(schema, dict) and "default" in schema else " (optional)"


def _type_name(schema: Any) -> str:
    """The short name of a type, or the whole schema if the type has no short name."""
    if not isinstance(schema, dict) or not schema:
        return "any"
    known = cast(dict[str, Any], schema)
    if isinstance(known.get("enum"), list):
        return "|".join(str(value) for value in known["enum"])
    if isinstance(known.get("anyOf"), list):
        return "|".join(_type_name(option) for option in known["anyOf"])
    if known.get("type") in ("string", "integer", "number", "boolean", "null"):
        return str(known["type"])
    return json.dumps(schema, separators=(",", ":"))


def with_call_text(message: Message) -> Message:
    """The message as a renderer takes it: an assistant's calls are part of its content."""
    if not message.tool_calls:
        return message
    calls = [_call_text(call) for call in message.tool_calls]
    return replace(message, content="\n".join([*([message.content] if message.content else []), *calls]))


def _call_text(call: ToolCall) -> str:
    """The same text as `format_tool_call` gives, but arguments may have any name."""
    return f"<tool_call>{json.dumps({'name': call.name, 'arguments': call.arguments})}</tool_call>"


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model said, taken apart."""

    content: str
    calls: tuple[ToolCall, ...] = ()

    def to_json(self) -> dict[str, object]:
        found: dict[str, object] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.calls:
            found |= {"content": self.content or None, "tool_calls": [call_to_json(call) for call in self.calls]}
        return found

    def is_said_by(self, message: Message) -> bool:
        """Whether a client sent this reply back. White space around it does not count."""
        calls = [(call.name, call.arguments) for call in message.tool_calls]
        return (
            message.role == "assistant"
            and message.content.strip() == self.content.strip()
            and calls == [(call.name, call.arguments) for call in self.calls]
        )


def read_reply(text: str, *, has_tools: bool) -> Reply:
    """The text of a reply. Calls that cannot be parsed stay in the text."""
    parsed = parse_tool_calls(text) if has_tools else None
    if parsed is None or not parsed.calls:
        return Reply(text)
    return Reply(parsed.content, tuple(replace(call, id=new_call_id()) for call in parsed.calls))


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def call_to_json(call: ToolCall) -> Mapping[str, object]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def are_same(one: Sequence[Message], other: Sequence[Message]) -> bool:
    """Whether two conversations say the same; the ids of tool calls do not matter."""
    return len(one) == len(other) and all(_said(a) == _said(b) for a, b in zip(one, other, strict=True))


def _said(message: Message) -> tuple[str, str, str | None, list[tuple[str, Mapping[str, object]]]]:
    content = message.content.strip() if message.role == "assistant" else message.content
    return message.role, content, message.name, [(call.name, call.arguments) for call in message.tool_calls]


def continues(asked: Sequence[Message], before: Sequence[Message], reply: Reply) -> bool:
    """Whether `asked` is an earlier call's messages, the reply to it, and something new that no assistant said."""
    size = len(before)
    if len(asked) <= size + 1 or not reply.is_said_by(asked[size]):
        return False
    is_plain = all(message.role != "assistant" for message in asked[size + 1 :])
    return is_plain and are_same(asked[:size], before)
