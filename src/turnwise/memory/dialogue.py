"""What of a dialogue a prompt shows. It depends on the messages alone, so a replay and a resumed run see the same.

    start | r1 o1 | r2 o2 ask | summary o2 | r3 o3 ...          window 2: the policy is asked after its second turn

    prompt of r2            start r1 o1
    prompt of the summary   start r1 o1 r2 o2 ask
    prompt of r3            start + summary + o2                rewritten: a new datum starts here

`ask` is a message of the world (`is_request`); the reply to it is a summary. It replaces everything before it, also
older summaries. Without summaries a window slides: `start + o(n-k) ... rn on`. Where two user messages would meet at a
seam, they become one, because some chat templates accept no other order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from turnwise.memory.config import MemoryConfig
from turnwise.trajectory import Message

MEMORY = "memory"
"""The `Message.name` of a message that asks for a summary."""


def request(num_tokens: int) -> Message:
    """The message that asks the policy for a summary."""
    text = f"Memory is full. Sum up what to remember, in at most {num_tokens} tokens."
    return Message(role="user", content=text, name=MEMORY)


def is_request(message: Message) -> bool:
    """Whether the world asks for a summary; no prompt shows the mark, and no template can lose it."""
    return message.role == "user" and message.name == MEMORY


def answers_request(dialogue: Sequence[Message]) -> list[bool]:
    """For each reply of a dialogue, whether it is a summary."""
    return [reply.is_summary for reply in _split(dialogue)[1]]


@dataclass(frozen=True, slots=True)
class _AnsweredReply:
    """A reply and what the world said after it."""

    said: Message
    observation: tuple[Message, ...]
    is_summary: bool


def visible(dialogue: Sequence[Message], memory: MemoryConfig) -> tuple[Message, ...]:
    """The messages that the next prompt shows, of all messages so far."""
    start, replies = _split(dialogue)
    if memory.summary_tokens:
        return _after_summary(start, replies, memory.keep)
    if not memory.window or len(replies) <= memory.window:
        return tuple(dialogue)
    first = len(replies) - memory.window
    return _joined(start, "", replies[first - 1].observation, replies[first:])


def _after_summary(start: Sequence[Message], replies: Sequence[_AnsweredReply], keep: int) -> tuple[Message, ...]:
    written = [index for index, reply in enumerate(replies) if reply.is_summary and reply.observation]
    if not written:
        return (*start, *_messages(replies))
    summary, since = replies[written[-1]], replies[written[-1] + 1 :]
    text = f"Memory: {summary.said.content.strip()}"
    turns = [replace(one, observation=_unasked(one)) for one in replies[: written[-1]] if not one.is_summary]
    kept = turns[len(turns) - keep :]
    if not kept:
        return _joined(start, text, summary.observation, since)
    before = turns[-keep - 1].observation if len(turns) > keep else ()
    kept[-1] = replace(kept[-1], observation=summary.observation)
    return _joined(start, text, before, [*kept, *since])


def _joined(
    start: Sequence[Message], text: str, observation: Sequence[Message], replies: Sequence[_AnsweredReply]
) -> tuple[Message, ...]:
    """The start, the memory's text and the observation, as one user message where all are plain text, then replies."""
    parts = [start[-1]] if start and start[-1].role == "user" else []
    head = list(start[: len(start) - len(parts)])
    parts += [Message(role="user", content=text)] if text else []
    parts += observation
    if all(_is_plain(part) for part in parts):
        parts = [Message(role="user", content="\n".join(part.content for part in parts))]
    return (*head, *parts, *_messages(replies))


def _is_plain(message: Message) -> bool:
    """Whether the message is text from the world and nothing more."""
    return replace(message, role="user", name=None) == Message(role="user", content=message.content)


def _messages(replies: Sequence[_AnsweredReply]) -> list[Message]:
    return [message for reply in replies for message in (reply.said, *reply.observation)]


def _unasked(reply: _AnsweredReply) -> tuple[Message, ...]:
    return tuple(message for message in reply.observation if not is_request(message))


def _split(dialogue: Sequence[Message]) -> tuple[tuple[Message, ...], list[_AnsweredReply]]:
    """The messages before the first reply, and the replies."""
    places = [index for index, message in enumerate(dialogue) if message.role == "assistant"]
    if not places:
        return tuple(dialogue), []
    replies: list[_AnsweredReply] = []
    for place, end in zip(places, [*places[1:], len(dialogue)], strict=True):
        asked = place > 0 and is_request(dialogue[place - 1])
        replies.append(_AnsweredReply(dialogue[place], tuple(dialogue[place + 1 : end]), asked))
    return tuple(dialogue[: places[0]]), replies
