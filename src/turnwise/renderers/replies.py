"""A reply's text as a message, and the part of it that some formats forget."""

from __future__ import annotations

from turnwise.envs.tools import parse_tool_calls
from turnwise.errors import DataError
from turnwise.trajectory import Message

THINKING_END = "</think>"


def text_to_reply(text: str) -> Message:
    """The assistant's message: its content is the whole text, and `tool_calls` are the calls written in it."""
    return Message(role="assistant", content=text, tool_calls=parse_tool_calls(text).calls)


def has_thinking(text: str) -> bool:
    return THINKING_END in text


def without_thinking(text: str) -> str:
    """What Qwen3's template keeps of an earlier reply: what follows the last `</think>`."""
    return text.rpartition(THINKING_END)[2].lstrip("\n") if has_thinking(text) else text


def reply_text(reply: Message) -> str:
    """What the model has to say for this message to come out of `text_to_reply`."""
    if reply.role != "assistant":
        raise DataError(f"a message of {reply.role}; only an assistant's message is a reply")
    if reply.tool_calls and not parse_tool_calls(reply.content).calls:
        raise DataError(
            "a reply with tool_calls that its content does not hold; write them out with "
            "turnwise.envs.tools.format_tool_call"
        )
    return reply.content
